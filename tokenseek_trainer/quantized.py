"""4-bit weights of bitsandbytes on a CPU: keep them in the format that has a backward.

On CPUs with AVX512-BF16, the first forward in evaluation mode repacks a `Linear4bit` weight for a faster kernel (seen in
bitsandbytes 0.50). That kernel has no backward and stays in use when training goes on, so every gradient below the layer
silently becomes zero.
"""

import contextlib
import warnings

from torch import nn

from .errors import UnsupportedModelError


PACKING_FLAG = "support_avx512bf16_for_cpu"


def holds_quantized_weights(module: nn.Module) -> bool:
    """Whether the module itself owns a parameter of integers."""
    return any(not p.is_floating_point() for p in module.parameters(recurse=False))


@contextlib.contextmanager
def cpu_packing_off(model: nn.Module):
    """Evaluate without repacking 4-bit weights."""
    modules = [module for module in model.modules() if getattr(module, PACKING_FLAG, False)]
    for module in modules:
        setattr(module, PACKING_FLAG, False)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, PACKING_FLAG, True)


def undo_cpu_packing(model: nn.Module) -> None:
    """Turn 4-bit weights that an evaluation elsewhere has repacked back into the format that training needs.

    The repacking has rounded their scales to bfloat16, which cannot be undone; a warning says so.

    Raises:
        UnsupportedModelError: the installed bitsandbytes has no way back.
    """
    weights = {id(w): w for w in (getattr(module, "weight", None) for module in model.modules()) if w is not None}
    packed = [w for w in weights.values() if getattr(getattr(w, "quant_state", None), "packing_format_for_cpu", False)]
    if not packed:
        return
    try:
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as unpack
    except ImportError:
        raise UnsupportedModelError(
            "bitsandbytes has repacked the 4-bit weights for evaluation on this CPU, in a format without gradients, and this "
            "version cannot undo it. Load the model again, and evaluate it with the trainer only."
        ) from None
    for weight in packed:
        weight.data, weight.quant_state = unpack(weight.data, weight.quant_state)
        state = weight.quant_state
        if state.absmax.ndim == 2:  # without double quantisation they are left transposed
            state.absmax = state.absmax.T.reshape(-1).float()
    warnings.warn(
        "An evaluation had repacked the 4-bit weights for this CPU, which rounded their scales to bfloat16; training goes on "
        "with those. Evaluate with the trainer, or load the model anew, to keep the exact ones.",
        stacklevel=2,
    )
