"""`TokenSeekCollator`: pad examples to a batch, with labels, positions and the token columns of the data set."""

import numbers
from dataclasses import dataclass
from typing import Any

import torch

from .errors import InputError
from .instances import IGNORE_INDEX


TOKEN_COLUMNS = ("token_indices", "token_scores")
OPTIONAL_COLUMNS = (*TOKEN_COLUMNS, "token_type_ids")


@dataclass
class TokenSeekCollator:
    """Pads a list of examples; every field of an example is a list with one entry per token, but `token_indices`.

    Fields of an example:
        input_ids: the tokens.
        labels: optional, -100 where there is no loss; default: the tokens themselves, so every token is supervised, an
            eos token too if it happens to be the padding token.
        completion_mask: optional, 1 where there is a loss; labels are -100 elsewhere.
        label or labels, with `labels_per_row`: a class (int), a number (float), or a list of numbers (multi-label).
        token_indices: optional, the positions to keep, counted from the example's first token. With them nothing is scored.
        token_scores: optional, a score per token (>= 0 for `selection="sample"`) that replaces the computed one.

    Args:
        pad_token_id: what fills `input_ids`. None takes 0; padding is masked, so any token does.
        max_length: longer examples are cut at the end, with their token columns. None: no limit.
        pad_to_multiple_of: round the batch's length up to a multiple of this. None: pad to the longest example.
        padding_side: "right" or "left".
        labels_per_row: True for sequence classification: a label belongs to the example and must be there.
        causal: True if position j predicts token j + 1. Then no label asks the padding before a row to predict its
            first token.

    A batch holds input_ids, attention_mask, labels, position_ids (all (B, n) int64; labels per row (B,) int64 or float32, or
    (B, labels) float32), and if every example has them
    token_indices (B, m) int64, positions in the padded row, -1 at unused slots; token_scores (B, n) float32, 0 at padding.

    Raises:
        InputError: an empty example, fields of different lengths, token columns in only some examples, or indices that
            are not integers inside their example.
    """

    pad_token_id: int | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    padding_side: str = "right"
    causal: bool = True
    labels_per_row: bool = False

    def __post_init__(self):
        if self.padding_side not in ("right", "left"):
            raise InputError(f"padding_side must be 'right' or 'left', got {self.padding_side!r}.")
        for name in ("max_length", "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
                raise InputError(f"{name} must be an integer >= 1 or None, got {value!r}.")

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [self._read(example, i) for i, example in enumerate(examples)]
        columns = [name for name in OPTIONAL_COLUMNS if any(name in row for row in rows)]
        for name in columns:
            without = [i for i, row in enumerate(rows) if name not in row]
            if without:
                raise InputError(
                    f"Example {without[0]} of the batch has no {name}, others have. Give it to all or to none."
                )
        n = max(len(row["input_ids"]) for row in rows)
        if self.pad_to_multiple_of:
            n = -(-n // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {
            "input_ids": self._pad([row["input_ids"] for row in rows], n, self.pad_token_id or 0),
            "attention_mask": self._pad([[1] * len(row["input_ids"]) for row in rows], n, 0),
            "labels": self._labels([row["labels"] for row in rows], n),
            "position_ids": self._pad([list(range(len(row["input_ids"]))) for row in rows], n, 0),
        }
        if "token_type_ids" in columns:
            batch["token_type_ids"] = self._pad([row["token_type_ids"] for row in rows], n, 0)
        if "token_scores" in columns:
            batch["token_scores"] = self._pad([row["token_scores"] for row in rows], n, 0.0)
        if "token_indices" in columns:
            shift = [n - len(row["input_ids"]) if self.padding_side == "left" else 0 for row in rows]
            indices = [[i + s for i in row["token_indices"]] for row, s in zip(rows, shift, strict=True)]
            width = max(1, max(map(len, indices)))
            batch["token_indices"] = torch.tensor([i + [-1] * (width - len(i)) for i in indices])
        return batch

    def _read(self, example, number) -> dict[str, list]:
        example = {name: values for name, values in example.items() if values is not None}  # datasets' missing values
        if "input_ids" not in example:
            raise InputError(
                f"Example {number} of the batch has no input_ids; it has: {', '.join(example) or 'nothing'}."
            )
        tokens = _as_list(example["input_ids"])
        length = len(tokens)
        if length == 0:
            raise InputError(f"Example {number} of the batch has no tokens. Filter empty examples out.")
        if self.labels_per_row:
            return self._read_columns(example, {"input_ids": tokens, "labels": _row_label(example, number)}, number)
        row = {"input_ids": tokens, "labels": _as_list(example.get("labels", tokens))}
        _check_length("labels", row["labels"], length, number)
        if "completion_mask" in example:
            mask = _as_list(example["completion_mask"])
            _check_length("completion_mask", mask, length, number)
            row["labels"] = [label if keep else IGNORE_INDEX for label, keep in zip(row["labels"], mask, strict=True)]
        return self._read_columns(example, row, number)

    def _read_columns(self, example, row, number) -> dict[str, list]:
        """Add the optional columns to a row, and cut it."""
        length = len(row["input_ids"])
        if "token_scores" in example:
            row["token_scores"] = [float(score) for score in _as_list(example["token_scores"])]
            _check_length("token_scores", row["token_scores"], length, number)
        if "token_type_ids" in example:
            row["token_type_ids"] = _as_list(example["token_type_ids"])
            _check_length("token_type_ids", row["token_type_ids"], length, number)
        cut = row.keys() - {"labels"} if self.labels_per_row else row.keys()
        row = {name: values[: self.max_length] if name in cut else values for name, values in row.items()}
        if self.causal and self.padding_side == "left" and not self.labels_per_row:
            row["labels"][0] = IGNORE_INDEX
        if "token_indices" in example:
            indices = _as_list(example["token_indices"])
            check_token_indices(indices, length, number)
            row["token_indices"] = sorted(i for i in indices if i < len(row["input_ids"]))
        return row

    def _labels(self, labels: list, n: int) -> torch.Tensor:
        if not self.labels_per_row:
            return self._pad(labels, n, IGNORE_INDEX)
        # Whole numbers are classes; the targets of several labels are numbers, which the loss takes as floats.
        return torch.tensor(
            labels, dtype=torch.long if all(isinstance(label, int) for label in labels) else torch.float32
        )

    def _pad(self, rows, n, fill) -> torch.Tensor:
        if self.padding_side == "left":
            return torch.tensor([[fill] * (n - len(row)) + row for row in rows])
        return torch.tensor([row + [fill] * (n - len(row)) for row in rows])


def _row_label(example, number):
    """The label of an example as Python numbers."""
    label = example.get("labels", example.get("label"))
    if label is None:
        raise InputError(f"Example {number} of the batch has no label; it has: {', '.join(example)}.")
    label = label.tolist() if hasattr(label, "tolist") else label
    return [float(value) for value in label] if isinstance(label, (list, tuple)) else label


def check_token_indices(indices: list, length: int, number: int) -> None:
    """Raise InputError unless `indices` are distinct integers in [0, length)."""
    for i in indices:
        if isinstance(i, bool) or not isinstance(i, numbers.Integral):
            raise InputError(f"token_indices of example {number} must be integers, got {i!r} ({type(i).__name__}).")
        if not 0 <= int(i) < length:
            raise InputError(
                f"token_indices of example {number} hold {i}, but the example has {length} tokens: 0 to {length - 1} are allowed."
            )
    if len(set(indices)) < len(indices):
        raise InputError(f"token_indices of example {number} name a position twice.")


def _as_list(values) -> list:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _check_length(name, values, length, number):
    if len(values) != length:
        raise InputError(f"{name} of example {number} has {len(values)} entries, input_ids {length}.")
