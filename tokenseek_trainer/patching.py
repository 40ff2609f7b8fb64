"""Temporary changes to a model, each a context manager that undoes exactly what it did, also after an exception."""

import contextlib
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .errors import UnsupportedModelError
from .quantized import holds_quantized_weights


def _implementation(decoder: nn.Module) -> str:
    """The attention implementation that the user chose."""
    config: Any = decoder.config
    return config._attn_implementation or "eager"


@contextlib.contextmanager
def attention_replaced(lm: PreTrainedModel, decoder: nn.Module, name: str, attention, mask):
    """Register `attention` and `mask` under one name, and point every config of the model at it.

    Both are needed: an attention function without its mask function loses padding and sliding windows silently.

    Yields:
        The name of the implementation that the user chose, which stays the one to delegate to.
    """
    chosen = _implementation(decoder)
    if chosen not in ("eager", *AttentionInterface().valid_keys()) or chosen.startswith("paged|"):
        raise UnsupportedModelError(f"The attention implementation {chosen!r} is not supported for training.")
    configs: dict[int, Any] = {
        id(module.config): module.config for module in lm.modules() if hasattr(module, "config")
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield chosen
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


@contextlib.contextmanager
def masks_replaced(lm: PreTrainedModel, decoder: nn.Module, mask):
    """Let `mask` build the masks of a model whose attention is written out in the model file.

    Its config keeps its implementation, on which such attention branches (Falcon's two branches differ). So the mask
    function of that implementation is replaced, and passes on calls for any other model's config.

    Yields:
        The name of the implementation.
    """
    chosen = _implementation(decoder)
    if chosen not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"The {lm.config.model_type!r} model does not call transformers' attention interface; with the attention "
            f"implementation {chosen!r} its keys and values cannot be recorded. Use 'sdpa' or 'eager'."
        )
    configs = {id(module.config) for module in lm.modules() if hasattr(module, "config")}
    base, local = ALL_MASK_ATTENTION_FUNCTIONS[chosen], ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    before = dict(local)

    def of_config(*args, config=None, **kwargs):
        function = mask if id(config) in configs else base
        return function(*args, config=config, **kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS[chosen] = of_config
    try:
        yield chosen
    finally:
        del local[chosen]
        local.update({name: function for name, function in before.items() if name == chosen})


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward):
    """Let `module(...)` call `forward`, inside the module's own hooks.

    Yields:
        The forward that it replaces: the class's, or one that another library had put on the instance.
    """
    original = module.forward
    had_own = "forward" in module.__dict__
    module.forward = forward
    try:
        yield original
    finally:
        if had_own:
            module.forward = original
        else:
            del module.forward


@contextlib.contextmanager
def dropout_off(model: nn.Module):
    """Put every module into evaluation mode, and back those that were in training mode.

    Modules with quantised weights keep their mode: they have no dropout, and evaluation mode may repack their weights.
    """
    training = [module for module in model.modules() if module.training and not holds_quantized_weights(module)]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def depends_on_length(module: nn.Module) -> bool:
    """Whether a rotary embedding changes its frequencies with the longest position it sees (dynamic NTK, LongRoPE)."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


@contextlib.contextmanager
def neftune_scaled(lm: PreTrainedModel, kept_fraction: float):
    """Keep NEFTune's noise as large as in ordinary training.

    It divides by the square root of the number of tokens it sees, which is now `kept_fraction` of the row.
    """
    embeddings = lm.get_input_embeddings()
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    if alpha is None:
        yield
        return
    embeddings.neftune_noise_alpha = alpha * kept_fraction**0.5
    try:
        yield
    finally:
        embeddings.neftune_noise_alpha = alpha
