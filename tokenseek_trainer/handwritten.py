"""Attention that a model file writes out, seen from the operations it calls: its products, its softmax, its mask table.

Letters: B batch rows, H heads, D head width, n tokens of a row, k selected ones, t the tokens of a call: n or k.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .attention import rows_at


PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
SOFTMAX = {torch.softmax, torch.Tensor.softmax, functional.softmax}


class AttentionProducts(TorchFunctionMode):
    """Watches one call of an attention module, which forms softmax(Q K^T + mask) V for t tokens.

    Args:
        batch, n_tokens: B and t.
        put_keys, put_values: map the (B, H, t, D) keys and values that the module made to those that the products use;
            None leaves them.

    Attributes:
        key, value: (B, H, t, D), as the module made them; None if its products were not found.
        weights: functions from query positions (B, q) to attention probabilities (B, H, q, t), one for each softmax over
            (t, t) or each call of scaled_dot_product_attention.
    """

    def __init__(
        self, batch: int, n_tokens: int, put_keys: Callable | None = None, put_values: Callable | None = None
    ):
        super().__init__()
        self.batch, self.n_tokens = batch, n_tokens
        self.put_keys, self.put_values = put_keys, put_values
        self.key = self.value = None
        self.weights: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in PRODUCTS and len(args) == 2:
            args = (args[0], self._second_factor(*args))
        if function is functional.scaled_dot_product_attention:
            self.weights.append(lambda queries: _sdpa_weights(queries, *args, **kwargs))
        result = function(*args, **kwargs)
        if function in SOFTMAX and result.ndim >= 3 and result.shape[-2:] == (self.n_tokens, self.n_tokens):
            probabilities = self._with_heads(result)
            self.weights.append(lambda queries: rows_at(probabilities, queries))
        return result

    def _second_factor(self, left, right):
        """Of the first product of two (.., t, D) and (.., D, t) tensors the keys, of the next with (.., t, D) the values."""
        if not (isinstance(right, torch.Tensor) and left.ndim == right.ndim >= 3 and left.shape[-2] == self.n_tokens):
            return right
        if self.key is None and right.shape[-1] == self.n_tokens:
            self.key = self._with_heads(right).transpose(-1, -2)
            return (
                right
                if self.put_keys is None
                else self.put_keys(self.key).transpose(-1, -2).reshape(*right.shape[:-1], -1)
            )
        if self.key is not None and self.value is None and right.shape[-2] == self.n_tokens:
            self.value = self._with_heads(right)
            return (
                right
                if self.put_values is None
                else self.put_values(self.value).reshape(*right.shape[:-2], -1, right.shape[-1])
            )
        return right

    def _with_heads(self, tensor):
        """(B * H, ...) or (B, H, ...) -> (B, H, ...)."""
        return tensor.unflatten(0, (self.batch, -1)) if tensor.ndim == 3 else tensor


def _sdpa_weights(queries, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    """The probabilities (B, H, q, n) that torch's scaled_dot_product_attention does not show."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = rows_at(query, queries).to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if is_causal:
        logits = logits.masked_fill(
            queries[:, None, :, None] < torch.arange(key.shape[2], device=key.device), -torch.inf
        )
    if attn_mask is not None:
        rows = rows_at(attn_mask.expand(*logits.shape[:2], *attn_mask.shape[-2:]), queries)
        logits = logits.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else logits + rows
    return logits.softmax(-1)


def mask_tables(module: nn.Module) -> list[str]:
    """Buffers (1, 1, N, N) in which a module (GPT-Neo's attention, GPT's) looks up which tokens may attend to which."""
    return [
        name
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.ndim == 4 and buffer.shape[:2] == (1, 1) and buffer.shape[2] == buffer.shape[3] > 1
    ]


class TableRows:
    """Stands for a mask table: a slice of its last rows is that of the selected tokens.

    Args:
        table: (1, 1, N, N).
        selected: what the (B, k) positions are now, and n; None where all tokens are there.
    """

    def __init__(self, table: torch.Tensor, selected: Callable):
        self._table, self._selected = table, selected

    def __getitem__(self, index):
        """(B, 1, k, n)."""
        found = self._selected()
        if found is None:
            return self._table[index]
        positions, n_tokens = found
        return self._table[0, 0, :, :n_tokens][positions][:, None]


@contextlib.contextmanager
def table_replaced(module: nn.Module, name: str, selected: Callable):
    """Let the module find `TableRows` for one of its buffers. The buffer stays where it is: the instance's own name hides it."""
    module.__dict__[name] = TableRows(getattr(module, name), selected)
    try:
        yield
    finally:
        del module.__dict__[name]
