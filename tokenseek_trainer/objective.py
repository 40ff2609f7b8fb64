"""Which label a position predicts: known for transformers' loss functions, found by a trial for a model with its own."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from .errors import InputError, UnsupportedModelError
from .instances import Instances


OWN_LABELS = (ForMaskedLMLoss, ForTokenClassification, ForSequenceClassificationLoss)
N_TOKENS = 5  # of the trial
LEAST_LABELS = 8  # masked-LM collators leave a tenth of the masked tokens as they are: eight of them by chance never


def shifts_labels(lm: PreTrainedModel) -> bool:
    """True if position j predicts label j + 1 (causal-LM loss), False if it predicts label j, or the label is the row's.

    The decoders of Bart and its kin compute the cross-entropy of every position with its own label: they expect labels that
    are shifted already.

    Raises:
        UnsupportedModelError: the model trains on something else.
    """
    name = f"{type(lm).__name__} (model type {lm.config.model_type!r})"
    if lm.loss_function not in (ForCausalLMLoss, *OWN_LABELS):
        raise UnsupportedModelError(
            f"{name} trains with {getattr(lm.loss_function, '__name__', lm.loss_function)}; supported are causal and "
            "masked language modelling, sequence classification and token classification."
        )
    if not any("labels" in inspect.signature(forward).parameters for forward in _forwards(lm)):
        raise UnsupportedModelError(
            f"{name} takes no labels and computes no loss, so there is nothing to train it on."
        )
    if lm.loss_function in OWN_LABELS:
        return False
    if uses_loss_function(lm):
        return True
    if _predicts_own_labels(lm):
        return False
    raise UnsupportedModelError(
        f"{name} computes its loss itself, and not as the cross-entropy of every position's logits with its label, so it "
        "is not known which label a position predicts."
    )


def refuse_copying(inputs: dict, instances: Instances, lm: PreTrainedModel) -> None:
    """Raise InputError if a model that predicts each position's own label is given the tokens themselves as labels."""
    tokens, where = inputs.get("input_ids"), instances.supervised
    if tokens is None or where.sum() < LEAST_LABELS or (instances.targets != tokens)[where].any():
        return
    raise InputError(
        f"Every label of the batch is the token at its own position, and {type(lm).__name__} predicts the label of each "
        "position, not of the next: it would learn to copy. For masked language modelling mask the tokens (transformers' "
        "DataCollatorForLanguageModeling); for a decoder of Bart's kind shift the labels: labels[j] = input_ids[j + 1]."
    )


def uses_loss_function(lm: PreTrainedModel) -> bool:
    """Whether a forward of the model names transformers' loss function."""
    return any("loss_function" in f.__code__.co_names for f in _forwards(lm) if hasattr(f, "__code__"))


def _forwards(lm: PreTrainedModel) -> list[Callable]:
    """The forwards of the model's class and of its bases, to which it may pass on."""
    return [inspect.unwrap(cls.__dict__["forward"]) for cls in type(lm).__mro__ if "forward" in cls.__dict__]


class _CrossEntropies(TorchFunctionMode):
    """Collects the calls of cross_entropy: logits, labels, other arguments, result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is cross_entropy:
            bound = inspect.signature(cross_entropy).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.calls.append((bound.arguments, result))
        return result


def _predicts_own_labels(lm: PreTrainedModel) -> bool:
    """Whether the loss is nothing but the mean cross-entropy of all logits with all labels, in their order.

    Tried on a copy without data: the model's class on the meta device, whose tensors still tell which of them are views of
    the labels and the logits.
    """
    try:
        with torch.device("meta"), torch.no_grad():
            # eager attention: the mask of others depends on whether there is padding, which is a value
            twin = type(lm)._from_config(copy.deepcopy(lm.config), attn_implementation="eager").eval()
            labels = torch.ones(1, N_TOKENS, dtype=torch.long)
            inputs: dict[str, Any] = {"input_ids": torch.ones_like(labels), "labels": labels}
            for name, value in (("use_cache", False), ("attention_mask", torch.ones_like(labels))):
                if name in inspect.signature(type(lm).forward).parameters:
                    inputs[name] = value
            with _CrossEntropies() as seen:
                output = twin(**inputs)
    except Exception:  # it needs other inputs, or values: then the trial says nothing
        return False
    if len(seen.calls) != 1:
        return False
    arguments, result = seen.calls[0]
    plain = (arguments["weight"], arguments["ignore_index"], arguments["reduction"], arguments["label_smoothing"])
    return (
        plain == (None, -100, "mean", 0.0)
        and getattr(output, "loss", None) is result
        and _is_all_of(arguments["target"], labels)
        and _is_all_of(arguments["input"], output.logits)
    )


def _is_all_of(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `view` is `tensor` in another shape."""
    same = view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return same and view.numel() == tensor.numel() and view.is_contiguous() and tensor.is_contiguous()
