"""Seek: the two scores of a token, and how they combine (TokenSeek, section 3.2).

Letters: B batch rows, H heads, G key/value heads, q queries of a chunk, n keys, D head width, M instances.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .config import TokenSeekConfig
from .instances import Instances
from .selection import random_scores


CHUNK_ELEMENTS = 2**22  # attention probabilities held at once: 16 MiB in float32


def attention_received(
    weights_of: Callable[[torch.Tensor], torch.Tensor], real: torch.Tensor, n_heads: int
) -> torch.Tensor:
    """Context score I1(j) = sum over queries i of A_ij, A being the softmax attention, averaged over heads.

    Args:
        weights_of: maps query positions (B, q) to their attention probabilities (B, H, q, n). It is called on chunks
            of queries, so that (n, n) probabilities never exist.
        real: (B, n) bool, False at padding, which neither gives nor receives a score.
        n_heads: H.

    Returns:
        (B, n) float32, or float64 if the probabilities are; 0 at padding.
    """
    batch, n = real.shape
    chunk = max(1, CHUNK_ELEMENTS // (batch * n_heads * n))
    received = torch.zeros(())
    for start in range(0, n, chunk):
        queries = torch.arange(start, min(start + chunk, n), device=real.device).expand(batch, -1)
        given = real[:, start : start + chunk]
        probabilities = weights_of(queries)
        probabilities = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
        part = (probabilities.sum(1) * given[..., None]).sum(1) / n_heads
        received = part if start == 0 else received + part
    return received.masked_fill(~real, 0)


def eager_attention_weights(query, key, allowed, scaling: float) -> torch.Tensor:
    """Softmax attention probabilities, in float32 or better: the specification that kernels are compared with.

    Args:
        query: (B, H, q, D). key: (B, G, n, D), H a multiple of G.
        allowed: (B, 1, q, n) bool.

    Returns:
        (B, H, q, n). Rows that allow nothing are uniform.
    """
    batch, heads, q, width = query.shape
    groups = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):  # it would undo the cast to float32
        grouped = query.reshape(batch, groups, heads // groups, q, width).to(dtype)
        logits = torch.einsum("bgrqd,bgnd->bgrqn", grouped, key.to(dtype)) * scaling
        logits = logits.masked_fill(~allowed[:, :, None], torch.finfo(dtype).min)
        return logits.softmax(-1).reshape(batch, heads, q, -1)


def gradient_magnitude(gradient: torch.Tensor) -> torch.Tensor:
    """Gradient score I2(j) = sum over the hidden width of |dL/dz_j|. (B, n, E) -> (B, n), float32 or better."""
    return gradient.abs().sum(-1, dtype=torch.promote_types(gradient.dtype, torch.float32))


def tokens_first(hidden: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Hidden states as (B, n, width), None if they do not show `shape` = (B, n).

    A model with several residual streams passes on (B, n, streams, E) or (streams, B, n, E).
    """
    if hidden.shape[:2] == shape:
        return hidden.flatten(2)
    if hidden.ndim == 4 and hidden.shape[1:3] == shape:
        return hidden.permute(1, 2, 0, 3).flatten(2)
    return None


def minmax(values: torch.Tensor, instances: Instances) -> torch.Tensor:
    """Scale (B, n) values to [0, 1] within every instance; 0 where they are all equal, and at padding."""
    real = instances.ids >= 0
    ids = instances.ids[real]
    low, high = (
        torch.zeros(instances.count, dtype=values.dtype, device=values.device).scatter_reduce(
            0, ids, values[real], reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    span = (high - low)[ids]
    scaled = torch.zeros_like(values)
    scaled[real] = torch.where(span > 0, (values[real] - low[ids]) / torch.where(span > 0, span, 1), 0)
    return scaled


def combine(
    context: torch.Tensor | None, gradient: torch.Tensor | None, instances: Instances, config: TokenSeekConfig
) -> torch.Tensor:
    """Score(j) = alpha * log(I1(j)) + beta * minmax(I2(j)) (paper, equation 5), or one of the two alone.

    Args:
        context, gradient: (B, n) float, I1 and I2; None where `config` does not need them.

    Returns:
        (B, n) float64. Padding has no meaningful score.
    """
    if config.scorer == "context":
        return _needed(context, "context")
    if config.scorer == "gradient":
        return _needed(gradient, "gradient")
    score = torch.zeros(instances.ids.shape, dtype=torch.float64, device=instances.ids.device)
    if config.alpha > 0:
        score += config.alpha * _needed(context, "context").clamp(min=torch.finfo(torch.float64).tiny).log()
    if config.beta > 0:
        score += config.beta * minmax(_needed(gradient, "gradient"), instances)
    return score


def _needed(score: torch.Tensor | None, name: str) -> torch.Tensor:
    if score is None:
        raise ValueError(f"These settings need the {name} score, and it was not computed.")
    return score.double()


def importance(scores: torch.Tensor, instances: Instances, config: TokenSeekConfig) -> torch.Tensor:
    """What `selection="sample"` draws in proportion to: the score, exponentiated if it is a sum of logarithms.

    (B, n) float64 >= 0; at most 1 within an instance if exponentiated.
    """
    if config.scorer != "tokenseek":
        return scores
    real, slot = (
        instances.ids >= 0,
        instances.ids + 1,
    )  # padding has a slot of its own, so that nothing waits for the device
    top = torch.full((instances.count + 1,), -torch.inf, dtype=scores.dtype, device=scores.device)
    top = top.scatter_reduce(0, slot.flatten(), scores.flatten(), "amax")
    return torch.where(real, (scores - top[slot]).exp(), 0.0)


@dataclass
class SeekResult:
    """What the seek pass found. None where the config's scorer does not need it.

    Attributes:
        context: (B, n), attention received (I1).
        gradient: (B, n), gradient magnitude at the last block's input (I2), of the summed loss.
        loss_sum: scalar, the summed cross-entropy of all supervised positions; in sequence classification the rows' mean loss
            times their number.
        instances: those that a selection is made from: in sequence classification with the positions that the head reads.
    """

    context: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    loss_sum: torch.Tensor | None = None
    instances: Instances | None = None

    def scores(self, instances: Instances, config: TokenSeekConfig, step: int) -> torch.Tensor:
        """(B, n) float64: scores to rank (`"topk"`), or importances to draw by (`"sample"`)."""
        if config.scorer == "random":
            if config.selection == "sample":
                return torch.ones(instances.ids.shape, dtype=torch.float64, device=instances.ids.device)
            return random_scores(instances, config.seed, step)
        scores = combine(self.context, self.gradient, instances, config)
        return importance(scores, instances, config) if config.selection == "sample" else scores
