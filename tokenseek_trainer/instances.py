"""`Instances`: which positions of a batch form one document, and which of them carry a loss.

Letters: B batch rows, n positions of a row, M instances of the batch.
"""

import dataclasses
from dataclasses import dataclass

import torch

from .errors import InputError


IGNORE_INDEX = -100
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as int64; the splitmix64 increment


@dataclass(frozen=True)
class Instances:
    """The documents of a batch. Every field is on the batch's device.

    Attributes:
        ids: (B, n) int64, the instance of each position in 0..M-1, -1 for padding.
        position_ids: (B, n) int64, what the model is given; 0 at padding.
        targets: (B, n) int64, the label that a position predicts, -100 where it predicts none.
        n_tokens: (M,) int64, real tokens of each instance (n_i in the paper).
        n_supervised: (M,) int64, positions of each instance that carry a loss (N_i).
        keys: (M,) int64, a hash of each instance's content. Random choices are seeded with it, so they do not depend
            on padding, on the other rows of the batch, or on how an accumulated batch is split.
        per_row: True for sequence classification. The loss is then the row's, and its supervised positions are those that
            the head reads: the first token, the last one, or with mean pooling all.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    n_tokens: torch.Tensor
    n_supervised: torch.Tensor
    keys: torch.Tensor
    per_row: bool = False

    @property
    def count(self) -> int:
        return len(self.n_tokens)

    @property
    def supervised(self) -> torch.Tensor:
        """(B, n) bool."""
        return self.targets != IGNORE_INDEX

    def reading(self, read: torch.Tensor) -> "Instances":
        """The same rows, whose head is known to read the positions `read` (B, n) bool."""
        return dataclasses.replace(
            self,
            targets=torch.where(read, 0, IGNORE_INDEX),
            n_supervised=_count(self.ids, read, self.count),
            per_row=True,
        )

    @property
    def place(self) -> torch.Tensor:
        """(B, n) int64: the index of each position within its instance, counted from 0; meaningless at padding."""
        counted = (self.ids >= 0).long().cumsum(-1)
        slot = (self.ids + 1).flatten()  # padding has a slot of its own, so that nothing waits for the device
        first = torch.zeros(self.count + 1, dtype=torch.long, device=self.ids.device)
        first = first.scatter_reduce(0, slot, counted.flatten(), "amin", include_self=False)
        return counted - first[slot].view_as(counted)

    def learned(self, shift: bool) -> torch.Tensor:
        """(B, n) bool: tokens that a position learns to predict, as opposed to a prompt.

        The first token of an instance, which nothing can predict, goes with the second.

        Args:
            shift: True if position j predicts token j + 1, False if it predicts its own token.
        """
        if not shift:
            return self.supervised
        before = torch.nn.functional.pad(self.supervised, (1, 0))[:, :-1]
        return torch.where(self.place == 0, self.supervised, before) & (self.ids >= 0)

    def last_supervised(self) -> torch.Tensor:
        """(M,) int64: row index of each instance's last supervised position, -1 if it has none."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        last = torch.full_like(self.n_tokens, -1)
        where = self.supervised
        return last.scatter_reduce(0, self.ids[where], index[where], "amax")


def find_instances(inputs: dict, labels: torch.Tensor | None, shift: bool) -> Instances:
    """Read the documents of a batch off the model's inputs.

    A row is one instance, unless `attention_mask` is absent and `position_ids` restart within a row: then every run
    of consecutive positions is one, which is the rule by which transformers keeps packed documents apart.

    Args:
        inputs: model inputs: `input_ids` (B, n) or `inputs_embeds` (B, n, E); `attention_mask` (B, n), None for no
            padding; `position_ids` (B, n) or (1, n), None to count the real tokens of each row from 0.
        labels: (B, n), -100 where there is no loss; None if nothing is supervised (only scores are wanted).
        shift: True if position j predicts labels[j + 1] (causal models), False if it predicts labels[j].

    Raises:
        InputError: no tokens, or shapes that do not fit together.
    """
    tokens = inputs.get("input_ids")
    embeds = inputs.get("inputs_embeds")
    given = embeds if tokens is None else tokens
    if given is None:
        raise InputError(
            f"The batch needs input_ids or inputs_embeds; it has: {', '.join(sorted(inputs)) or 'nothing'}."
        )
    shape, device = (given.shape if tokens is not None else given.shape[:2]), given.device
    if len(shape) != 2:
        raise InputError(f"input_ids must have shape (batch, tokens), got {tuple(shape)}.")

    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != shape:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(shape)}. Masks that are already expanded "
            "to (batch, heads, queries, keys) are not supported: pass the (batch, tokens) one."
        )
    real = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask.to(device).bool()

    positions = inputs.get("position_ids")
    if positions is None:
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        restarts = torch.zeros_like(positions)
    else:
        if positions.ndim != 2 or positions.shape[1] != shape[1] or positions.shape[0] not in (1, shape[0]):
            raise InputError(f"position_ids must have shape {tuple(shape)}, got {tuple(positions.shape)}.")
        positions = positions.to(device).long().expand(shape)
        restarts = torch.zeros_like(positions)
        if mask is None:
            restarts = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
    document = restarts.long().cumsum(-1)  # within the row
    per_row = document[:, -1] + 1
    first = per_row.cumsum(0) - per_row
    ids = torch.where(real, document + first[:, None], -1)
    count = int(per_row.sum())

    targets = _targets(labels, shape, shift, real, device)
    keys_of = tokens if tokens is not None else targets
    return Instances(
        ids=ids,
        position_ids=torch.where(real, positions, 0),
        targets=targets,
        n_tokens=_count(ids, real, count),
        n_supervised=_count(ids, targets != IGNORE_INDEX, count),
        keys=_content_keys(keys_of, ids, real, count),
    )


def _targets(labels, shape, shift, real, device):
    if labels is None:
        return torch.full(shape, IGNORE_INDEX, device=device)
    if labels.shape != shape:
        raise InputError(f"labels must have shape {tuple(shape)} like input_ids, got {tuple(labels.shape)}.")
    labels = labels.to(device).long()
    if shift:
        labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    # Padding predicts nothing: with left padding the last pad would otherwise predict the first real token.
    return torch.where(real, labels, IGNORE_INDEX)


def _count(ids, where, count):
    return torch.bincount(ids[where], minlength=count)


def _content_keys(tokens, ids, real, count):
    """(M,) int64. The sum over an instance of a hash of (token, index within the instance)."""
    flat = ids[real]
    n_before = _count(ids, real, count).cumsum(0) - _count(ids, real, count)
    index = torch.arange(len(flat), device=flat.device) - n_before[flat]
    hashed = mix(mix(tokens[real].long()) + index)
    return torch.zeros(count, dtype=torch.int64, device=flat.device).index_add(0, flat, hashed)


def mix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 hash of int64 values, elementwise and the same on every device (Steele et al., 2014)."""
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def uniform(x: torch.Tensor) -> torch.Tensor:
    """Map int64 values to float64 numbers that are uniform in [0, 1) by way of `mix`."""
    return _shift_right(mix(x), 11).double() / 2.0**53


def _shift_right(x, bits):
    # `>>` on int64 copies the sign bit; a logical shift clears it.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
