"""Count the floating-point operations of matrix products: what a step costs where it is bound by computing."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Operations(TorchDispatchMode):
    """Context manager that counts the operations of matrix products inside it, an addition and a multiplication as two.

    PyTorch's own formulas (`torch.utils.flop_counter`), and besides: attention's fused kernel on the CPU, which PyTorch does not
    count; half of the square under a causal mask, since kernels leave the other half out; grouped products of experts.
    Element by element work is not counted.

    ```python
    with Operations() as operations:
        model(**batch).loss.backward()
    operations.total
    ```

    Attributes:
        total: operations so far.
        each_counts: what an operation counts, for work of which a part stands for all (`standing_for`).
    """

    def __init__(self):
        super().__init__()
        self.total = 0.0
        self.each_counts = 1.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        formula = FORMULAS.get(function._overloadpacket)
        if formula is not None:
            self.total += self.each_counts * formula(*args, **(kwargs or {}), out_val=output)
        return output

    @contextlib.contextmanager
    def standing_for(self, times: float):
        """Inside, every operation counts this many times."""
        self.each_counts = times
        try:
            yield
        finally:
            self.each_counts = 1.0

    def backward_standing_for(self, times: float, start: torch.Tensor, end: torch.Tensor) -> None:
        """The same for the backward from `start`, a result, to `end`, the tensor that it was made of."""
        if start.requires_grad and end.requires_grad:
            start.register_hook(lambda gradient: setattr(self, "each_counts", times))
            end.register_hook(lambda gradient: setattr(self, "each_counts", 1.0))


def _attention(query, key, value, dropout_p=0.0, is_causal=False, **others) -> float:
    """The scores, and the mean of the values."""
    return _pairs(query, key, is_causal) * 2 * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    gradient, query, key, value, out, logsumexp, dropout_p=0.0, is_causal=False, **others
) -> float:
    """The scores once more, and the gradients of the weights, values, queries and keys."""
    return _pairs(query, key, is_causal) * 2 * (3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query, key, is_causal: bool) -> float:
    """How many pairs of a query and a key are computed, over batch and heads."""
    rows, heads, n, _ = query.shape
    return rows * heads * (n * (n + 1) / 2 if is_causal and n == key.shape[-2] else n * key.shape[-2])


def _grouped(a, b, *others, **named) -> float:
    """Products of the groups' slices: of rows (2-D by 3-D), of columns (3-D by 2-D), of what is summed over (2-D by 2-D)."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


aten = torch.ops.aten
FORMULAS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
}
