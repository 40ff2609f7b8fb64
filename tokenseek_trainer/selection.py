"""From scores to the tokens that are kept: top-k (the paper's rule) or sampling with inverse-probability weights.

Letters: B batch rows, n positions of a row, M instances, k kept positions of the fullest row, c candidates of the
largest instance.
"""

from dataclasses import dataclass

import torch

from .config import TokenSeekConfig
from .errors import InputError
from .instances import Instances, mix, uniform


@dataclass(frozen=True)
class TokenSelection:
    """The kept positions of every row, in ascending order.

    Attributes:
        indices: (B, k) int64 positions. Rows with fewer than k end in slots that hold 0.
        mask: (B, k) bool, False at those slots.
        weights: (B, k) float64, the weight of each kept position's loss; 0 where it carries none. In sequence classification
            they say only which kept positions the head reads.
    """

    indices: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor

    @property
    def supervised(self) -> torch.Tensor:
        """(B, k) bool: kept positions whose loss counts."""
        return self.weights > 0

    def parts(self, count: int) -> list["TokenSelection"]:
        """Every row's kept positions in `count` parts of nearly equal size, the last positions first.

        Rows with fewer kept positions than parts have parts without any.
        """
        n_kept = self.mask.sum(1, keepdim=True)
        slots = torch.arange(self.mask.shape[1], device=self.mask.device)
        found = []
        for part in reversed(range(count)):
            first, end = part * n_kept // count, (part + 1) * n_kept // count
            width = max(1, int((end - first).max()))
            index = first + slots[:width]
            mask = index < end
            index = torch.where(mask, index, 0)
            indices = torch.where(mask, self.indices.gather(1, index), 0)
            found.append(TokenSelection(indices, mask, self.weights.gather(1, index).masked_fill(~mask, 0.0)))
        return found

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Take the kept positions of a (B, n, ...) tensor: (B, k, ...)."""
        index = self.indices.reshape(self.indices.shape + (1,) * (values.ndim - 2))
        return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def candidates(instances: Instances, config: TokenSeekConfig, causal: bool) -> torch.Tensor:
    """(B, n) bool: positions that may be kept.

    Padding never is, nor a position of an instance without any loss, nor, in a causal model, one after the last
    supervised position of its instance: it can influence no loss. All others are kept at ratio 1.0, whatever `select_from`,
    and in sequence classification every token of a row is one.
    """
    real = instances.ids >= 0
    if not _selects_from_all(instances, config) and config.ratio < 1:
        return real & instances.supervised
    last = instances.last_supervised()[instances.ids.clamp(min=0)]
    if not causal or instances.per_row:
        return real & (last >= 0)
    index = torch.arange(real.shape[1], device=real.device)
    return real & (index <= last)


def _selects_from_all(instances: Instances, config: TokenSeekConfig) -> bool:
    """In sequence classification whatever the setting: no token has a loss of its own."""
    return config.select_from == "all" or instances.per_row


def budgets(instances: Instances, config: TokenSeekConfig, n_candidates: torch.Tensor) -> torch.Tensor:
    """(M,) int64: k_i = max(min_tokens, round(ratio * n_i)), at most the instance's candidates."""
    k = torch.round(config.ratio * instances.n_tokens.double()).long()
    return torch.minimum(k.clamp(min=config.min_tokens), n_candidates)


def select(
    scores: torch.Tensor, instances: Instances, config: TokenSeekConfig, *, causal: bool = True, step: int = 0
) -> TokenSelection:
    """Choose k_i positions of every instance by `config.selection`.

    The choice depends on the instance alone: never on padding, on the batch around it, or on the accumulation split.

    Args:
        scores: (B, n) float. `"topk"` keeps the greatest, ties to the earlier position; `"sample"` reads them as
            importances, so they must be >= 0.
        causal: whether a position sees only earlier ones.
        step: the optimizer step, part of the seed of `"sample"`.
    """
    allowed = candidates(instances, config, causal)
    layout = _Layout(instances, allowed)
    k = budgets(instances, config, layout.n_candidates)
    scores = layout.read(scores.double(), fill=-torch.inf)
    # An instance with a loss keeps at least one position that carries it: in sequence classification one that the head
    # reads. Among supervised candidates any choice does.
    force = torch.zeros_like(layout.valid)
    if _selects_from_all(instances, config):
        force = _best_supervised(scores, layout.read(instances.supervised, fill=False))
    if config.selection == "topk":
        order = scores.masked_fill(force, torch.inf).argsort(dim=1, descending=True, stable=True)
        keep = torch.zeros_like(force).scatter(1, order, layout.slot < k[:, None])
        probability = None
    else:
        probability = inclusion_probabilities(scores, layout.valid, k, config.uniform_share, force)
        keep = systematic_sample(probability, k, draw(instances.keys, config.seed, step)) & layout.valid
    return _build(
        instances, config, layout.write(keep), layout.write(probability) if probability is not None else None
    )


def select_given(token_indices: torch.Tensor, instances: Instances, config: TokenSeekConfig) -> TokenSelection:
    """Keep exactly the given positions.

    Args:
        token_indices: (B, m) integer positions, -1 at unused slots.

    Raises:
        InputError: an index lies outside its row, at padding, or twice in it.
    """
    if token_indices.is_floating_point() or token_indices.dtype == torch.bool:
        raise InputError(f"token_indices must be integers, got {token_indices.dtype}.")
    n_rows, n = instances.ids.shape
    if token_indices.ndim != 2 or len(token_indices) != n_rows:
        raise InputError(
            f"token_indices must have shape ({n_rows}, m) for {n_rows} rows, got {tuple(token_indices.shape)}."
        )
    used = token_indices != -1
    bad = used & ((token_indices < 0) | (token_indices >= n))
    if bad.any():
        row, slot = bad.nonzero()[0].tolist()
        raise InputError(
            f"token_indices of row {row} hold {int(token_indices[row, slot])}, but the row has positions 0 to {n - 1}."
        )
    rows = torch.arange(len(used), device=used.device)[:, None].expand_as(used)
    named = (rows[used], token_indices[used].long())
    hits = torch.zeros_like(instances.ids).index_put(named, torch.ones_like(named[1]), accumulate=True)
    for problem, text in ((hits > 1, "twice"), ((hits > 0) & (instances.ids < 0), "although it is padding")):
        if problem.any():
            row, index = problem.nonzero()[0].tolist()
            raise InputError(f"token_indices of row {row} name position {index} {text}.")
    return _build(instances, config, hits > 0, None)


def check_given(selection: TokenSelection, instances: Instances) -> None:
    """Refuse token_indices without any token that a classifier's head reads."""
    if instances.per_row and not selection.supervised.any(-1).all():
        row = int((~selection.supervised.any(-1)).nonzero()[0])
        raise InputError(
            f"token_indices of row {row} leave out position {int(instances.supervised[row].long().argmax())}, by which the "
            "model classifies it. Add it."
        )


def check_scores(scores: torch.Tensor, instances: Instances, config: TokenSeekConfig) -> None:
    """Refuse a token_scores column that cannot be ranked, or drawn from."""
    if scores.shape != instances.ids.shape:
        raise InputError(
            f"token_scores have shape {tuple(scores.shape)}, input_ids {tuple(instances.ids.shape)}. Give one per token."
        )
    least = 0 if config.selection == "sample" else -torch.inf
    bad = ~(scores.isfinite() & (scores >= least))
    if bad.any():
        raise InputError(
            f"token_scores hold {float(scores[bad][0])}. They must be finite"
            + (", and >= 0 for selection='sample', which draws in proportion to them." if least == 0 else ".")
        )


def draw(keys: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """(M,) float64, uniform in [0, 1): one number per instance and step, the same wherever the instance stands."""
    return uniform(mix(keys + seed) + step)


def random_scores(instances: Instances, seed: int, step: int) -> torch.Tensor:
    """(B, n) float64, uniform in [0, 1): a score for each position that depends on its instance, place and step."""
    keys = mix(mix(instances.keys + seed) + step)[instances.ids.clamp(min=0)]
    return uniform(keys + instances.place)


def inclusion_probabilities(importance, valid, k, uniform_share, force) -> torch.Tensor:
    """Probability that each position is kept: min(1, k * p), renormalised so that every instance's sum is k.

    Args:
        importance: (M, c) float64 >= 0; p is proportional to it, mixed with `uniform_share` of an even spread.
        valid: (M, c) bool, False at unused slots.
        k: (M,) int64, at most the number of valid slots.
        force: (M, c) bool, positions that are kept for certain (at most one per instance).
    """
    importance = importance.masked_fill(~valid, 0.0).clamp(min=0)
    total = importance.sum(1, keepdim=True)
    even = valid.double() / valid.sum(1, keepdim=True).clamp(min=1)
    usable = (total > 0) & total.isfinite()  # importances that overflowed say nothing
    p = torch.where(usable, (1 - uniform_share) * importance / total.clamp(min=1e-300) + uniform_share * even, even)
    p = p.masked_fill(force, 2.0)  # first in the order below, whatever the importance of the others
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    tail = ordered.flip(1).cumsum(1).flip(1)  # sum of p from this rank on
    left = (k[:, None] - torch.arange(p.shape[1], device=p.device)).clamp(min=0)  # what is left of k at this rank
    # A position is certain if its share of what is left would reach 1; in descending order these come first.
    certain = (left * ordered >= tail) & (left > 0) | force.gather(1, order)
    n_certain = certain.sum(1, keepdim=True)
    share = (k[:, None] - n_certain).clamp(min=0) / ordered.masked_fill(certain, 0).sum(1, keepdim=True).clamp(
        min=1e-300
    )
    probability = torch.where(certain, 1.0, share * ordered)
    return torch.zeros_like(p).scatter(1, order, probability).masked_fill(~valid, 0.0)


def systematic_sample(probability: torch.Tensor, k: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Keep position j if one of start, start + 1, ..., start + k - 1 falls into its stretch of the cumulated probability.

    Exactly k positions are kept, each with its probability (systematic sampling; Madow, 1949).

    Args:
        probability: (M, c) float64 that sums to k in every row.
        start: (M,) float64 in [0, 1).
    """
    end = probability.cumsum(1)
    whole = k[:, None].double()
    end = torch.where(end > whole - 1e-9, whole, end)  # rounding must not lose the last one
    hits = end.floor() + (end - end.floor() > start[:, None])  # points below end, without rounding a difference up
    return hits > torch.nn.functional.pad(hits, (1, 0))[:, :-1]


def _best_supervised(scores, supervised):
    """(M, c) bool: the best supervised position of each instance that has one."""
    finite = scores.clamp(min=torch.finfo(scores.dtype).min)  # the worst of them still beats every unsupervised one
    best = finite.masked_fill(~supervised, -torch.inf).argmax(1, keepdim=True)
    return torch.zeros_like(supervised).scatter(1, best, True) & supervised


def _build(instances, config, keep, probability) -> TokenSelection:
    n_kept = keep.sum(1)
    k = max(1, int(n_kept.max()))
    indices = torch.argsort(~keep, dim=1, stable=True)[:, :k]  # kept positions first, in ascending order
    mask = torch.arange(k, device=keep.device) < n_kept[:, None]
    indices = torch.where(mask, indices, 0)
    counted = keep & instances.supervised
    ids = instances.ids.clamp(min=0)
    if config.token_weight == "none":
        weights = counted.double()
    elif probability is not None:
        weights = counted / probability.clamp(min=1e-300)
    else:
        n_counted = torch.bincount(instances.ids[counted], minlength=instances.count)
        weights = counted * (instances.n_supervised.double() / n_counted.clamp(min=1))[ids]
    return TokenSelection(indices, mask, weights.gather(1, indices).masked_fill(~mask, 0.0))


class _Layout:
    """The candidates of each instance in reading order, as an (M, c) table; `read` fills it, `write` undoes that."""

    def __init__(self, instances: Instances, allowed: torch.Tensor):
        self.shape = allowed.shape
        self.where = allowed.flatten().nonzero()[:, 0]
        self.row = instances.ids.flatten()[self.where]
        self.n_candidates = torch.bincount(self.row, minlength=instances.count)
        first = self.n_candidates.cumsum(0) - self.n_candidates
        self.column = torch.arange(len(self.row), device=self.row.device) - first[self.row]
        self.slot = torch.arange(max(1, int(self.n_candidates.max())), device=self.row.device)
        self.valid = self.slot < self.n_candidates[:, None]

    def read(self, values, fill):
        table = torch.full(self.valid.shape, fill, dtype=values.dtype, device=values.device)
        table[self.row, self.column] = values.flatten()[self.where]
        return table

    def write(self, table):
        values = torch.zeros(self.shape, dtype=table.dtype, device=table.device)
        values.view(-1)[self.where] = table[self.row, self.column]
        return values
