"""What the model is given: positions that skip the padding; in the seek pass all tokens of a batch, in the ditch pass the selected ones."""

import torch

from .errors import InputError
from .instances import Instances
from .selection import TokenSelection
from .structure import ModelStructure


NOT_FOR_MODEL = ("labels", "shift_labels", "token_indices", "token_scores", "num_items_in_batch")
# Lengths of packed documents for flash attention's kernels, which read them off position_ids if they are not given.
PACKING_HINTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def shape_of(inputs: dict) -> tuple[int, int]:
    """(B, n) of a batch."""
    tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    return tokens.shape[0], tokens.shape[1]


def with_position_ids(inputs: dict) -> dict:
    """Count positions from the first real token, so that left padding does not shift them; given ones stay."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or inputs.get("position_ids") is not None:
        return inputs
    return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def inputs_of_all(inputs: dict, instances: Instances, structure: ModelStructure) -> dict:
    """A batch without labels (but those of sequence classification) and token columns, with position_ids, without cache.

    Raises:
        InputError: encoder_hidden_states, or packed documents for a model that takes no position_ids.
    """
    if inputs.get("encoder_hidden_states") is not None:
        raise InputError("encoder_hidden_states are not supported: a decoder is trained on its own tokens only.")
    kept = {k: v for k, v in inputs.items() if k not in (*NOT_FOR_MODEL, *PACKING_HINTS) and v is not None}
    if structure.loss_per_row and inputs.get("labels") is not None:
        kept["labels"] = inputs["labels"]
    if not structure.forward_accepts("position_ids") and instances.count > len(instances.ids):
        raise InputError(
            f"The {structure.model_type!r} model takes no position_ids, so packed documents cannot be told apart. "
            "Train without packing."
        )
    kept = structure.with_own_positions({**kept, "position_ids": instances.position_ids})
    if structure.forward_accepts("use_cache"):
        kept["use_cache"] = False
    return kept


def inputs_of_selected(inputs: dict, selection: TokenSelection, shape: torch.Size, keep_mask: bool) -> dict:
    """Gather every per-token input of `inputs_of_all`.

    The attention mask is dropped, since the recorded rules carry it, or kept as it is, of all tokens.

    Args:
        shape: (B, n).

    Raises:
        InputError: an input that does not begin with (B, n).
    """
    selected = {k: v for k, v in inputs.items() if k != "attention_mask"}
    for name, value in selected.items():
        if isinstance(value, torch.Tensor):
            if value.shape[:2] != shape:
                raise InputError(
                    f"The input {name!r} has shape {tuple(value.shape)}. TokenSeek can gather only inputs that begin "
                    f"with (batch, tokens) = {tuple(shape)}; images and other extra inputs are not supported."
                )
            selected[name] = selection.gather(value)
    if keep_mask:
        mask = inputs.get("attention_mask")
        selected["attention_mask"] = (
            mask if mask is not None else torch.ones(shape, dtype=torch.long, device=selection.indices.device)
        )
    return selected
