"""Sequence classification: the model's own head and loss on hidden states of which only the kept ones carry a gradient.

The head sees all tokens of a row: the kept ones as the ditch pass made them, the others as constants from the seek pass.
So its loss is that of the ordinary forward, of every row, and needs no weights: a selection, also a drawn one, decides
only through which tokens the gradient flows back.

Letters: B batch rows, n tokens of a row, E hidden width.
"""

from collections.abc import Callable

import torch
from transformers.trainer_pt_utils import LabelSmoother

from .attention import SelectedPositions
from .errors import InputError, UnsupportedModelError


def classify(
    forward: Callable, inputs: dict, label_smoothing: float = 0.0, num_items_in_batch=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and loss of the model's own forward, the loss as the stock Trainer takes it.

    Args:
        forward: the model's forward.
        inputs: its keyword arguments, with `labels` if a loss is wanted.
        num_items_in_batch: only label smoothing divides by it; no head of transformers does.

    Returns:
        logits, and the scalar loss (None without labels).
    """
    labels = inputs.get("labels")
    if not label_smoothing or labels is None:
        output = forward(**inputs)
        return output.logits, None if labels is None else output.loss
    output = forward(**{name: value for name, value in inputs.items() if name != "labels"})
    return output.logits, LabelSmoother(label_smoothing)(output, labels, num_items_in_batch=num_items_in_batch)


def positions_read(logits: torch.Tensor, hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Which hidden states the head reads, found by differentiating it: NaN spreads through a weight of 0 too.

    Args:
        logits: attached to the graph of `hidden`, which is kept.
        hidden: (B, n, E), the decoder's output; real: (B, n) bool, False at padding.

    Returns:
        (B, n) bool, True at some real token of every row.

    Raises:
        UnsupportedModelError: the head reads other hidden states.
        InputError: the head reads padding in place of a token, as one that reads the first position does with left padding.
    """
    nan = torch.full_like(logits, torch.nan)
    (gradient,) = torch.autograd.grad(logits, hidden, nan, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise UnsupportedModelError("The model's head reads other hidden states than those that its decoder returns.")
    read = gradient.isnan().any(-1)
    lost = ~(read & real).any(-1)
    if lost.any():
        row = int(lost.nonzero()[0])
        raise InputError(
            f"The model classifies row {row} of the batch by position {int(read[row].long().argmax())}, which is padding. Set "
            "tokenizer.padding_side to the other side."
        )
    return read & real


def put_back(kept: torch.Tensor, ordinary: torch.Tensor, positions: SelectedPositions) -> torch.Tensor:
    """(B, n, E) hidden states: `kept` (B, k, E) at the selected positions, the constants `ordinary` (B, n, E) elsewhere."""
    values = kept[positions.rows, positions.slots].to(ordinary.dtype)
    return ordinary.index_put((positions.rows, positions.positions), values)
