"""Attention of the two passes: what is recorded of the ordinary forward, and how selected tokens attend in its place.

Letters: B batch rows, H heads, G key/value heads, D head width, n tokens of a row, k selected ones.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from .errors import UnsupportedModelError
from .scoring import eager_attention_weights
from .selection import TokenSelection


# Arguments that change the attention formula; a call that has one goes through the model file's own eager function.
SPECIAL_ARGUMENTS = ("softcap", "s_aux", "position_bias", "alibi")


@dataclass
class MaskRule:
    """One mask of the model (one per layer type), kept as the function that it was built from."""

    arguments: dict

    def rows(self, queries: torch.Tensor) -> torch.Tensor:
        """The rows of the mask for the given queries, at O(k * n) cost.

        Args:
            queries: (B, k) int64 positions.

        Returns:
            (B, 1, k, n) bool, True where attention is allowed.
        """
        n = self.arguments["kv_length"]
        rule, padding = self.arguments["mask_function"], self.arguments["attention_mask"]
        batch = torch.arange(len(queries), device=queries.device)
        keys = torch.arange(n, device=queries.device)
        head = torch.zeros(1, dtype=torch.long, device=queries.device)
        if self.arguments.get("use_vmap"):  # a user's own mask function may not broadcast
            over_keys = torch.vmap(rule, in_dims=(None, None, None, 0))
            over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
            allowed = torch.vmap(over_queries, in_dims=(0, None, 0, None))(batch, head[0], queries, keys)[:, None]
        else:
            allowed = rule(batch[:, None, None, None], head[:, None, None], queries[:, None, :, None], keys)
        if padding is not None:
            allowed = allowed & padding[:, None, None, :n]
        return allowed.expand(len(queries), 1, queries.shape[1], n)


@dataclass
class DenseMask:
    """A mask that the model has copied or changed after building it: (B or 1, 1, n, n) bool, or float with 0 where allowed."""

    mask: torch.Tensor

    def rows(self, queries: torch.Tensor) -> torch.Tensor:
        """As `MaskRule.rows`."""
        allowed = self.mask if self.mask.dtype == torch.bool else self.mask == 0
        index = queries[:, None, :, None].expand(-1, 1, -1, allowed.shape[-1])
        return allowed.expand(len(queries), -1, -1, -1).gather(2, index)

    def says_all(self) -> bool:
        """Whether the mask is nothing but allowed and forbidden pairs, the same for all heads."""
        if self.mask.ndim != 4 or self.mask.shape[1] != 1:
            return False
        if self.mask.dtype == torch.bool:
            return True
        return bool(((self.mask == 0) | (self.mask <= torch.finfo(self.mask.dtype).min / 2)).all())


def chosen_keys(allowed: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """Of the keys that a mask shows, those that an indexer chose (sparse attention of DeepSeek's kind).

    Args:
        allowed: (B, 1, q, n), bool, or float with 0 where allowed.
        indices: (B, q, t) integer; None: all keys.
    """
    if indices is None:
        return allowed
    chosen = torch.zeros_like(allowed, dtype=torch.bool).scatter_(-1, indices[:, None].long(), True)
    if allowed.dtype == torch.bool:
        return allowed & chosen
    return allowed.masked_fill(~chosen, torch.finfo(allowed.dtype).min)


@dataclass
class CarriedGradient:
    """Gradient at one module's keys, or values, of the positions whose part is still to come: (m, G, D), None before any."""

    values: torch.Tensor | None = None


@dataclass
class LayerRecord:
    """Keys and values of one attention module, (B, G, n, D), as the ordinary forward made them.

    `uses` counts the calls of the module in a ditch pass; a checkpointed block calls it again in the backward.
    """

    key: torch.Tensor
    value: torch.Tensor
    uses: int = 0
    at_key: CarriedGradient = field(default_factory=CarriedGradient)
    at_value: CarriedGradient = field(default_factory=CarriedGradient)

    @classmethod
    def of(cls, key, value, device: str) -> "LayerRecord":
        return cls(_own(key, device), _own(value, device))


class LayerCache(Cache):
    """Stands for the cache in an attention that is written out in the model file: its keys and values pass through here.

    Args:
        update: maps fresh (B, G, q, D) keys and values to those that the queries attend to.
    """

    def __init__(self, update):
        super().__init__(layers=[])
        self._update = update

    def update(self, key, value, *args, **kwargs):
        return self._update(key, value)

    def get_seq_length(self, *args, **kwargs) -> int:
        return 0


def _own(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Detach from the graph, and from a larger storage (a fused qkv projection would keep its queries alive)."""
    tensor = tensor.detach()
    if device == "cpu" and tensor.device.type != "cpu":
        return tensor.to("cpu")
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class _Splice(torch.autograd.Function):
    """Write the selected tokens' keys (or values) over the recorded ones, in place; all other positions are constants.

    Their gradient is that of this part's queries, and of those of later tokens, whose parts ran before. What this part's
    queries send to positions of parts to come is carried there: a causal model's tokens are seen by later ones only.
    """

    @staticmethod
    def forward(ctx, fresh, store, selected, carried):
        ctx.selected, ctx.carried, ctx.shape = selected, carried, fresh.shape
        rows, positions, slots = selected.rows, selected.positions, selected.slots
        # `.data`: a recomputed layer writes again, into a storage whose first version autograd still watches.
        store = store.data
        store[rows, :, positions] = fresh[rows, :, slots].to(store.dtype)
        return store

    @staticmethod
    def backward(ctx, gradient):
        selected, carried = ctx.selected, ctx.carried
        own = gradient[selected.rows, :, selected.positions]
        if carried.values is not None:
            own, carried.values = own + carried.values[: len(own)], carried.values[len(own) :]
        if len(selected.rows_to_come):
            to_come = gradient[selected.rows_to_come, :, selected.positions_to_come]
            carried.values = to_come if carried.values is None else carried.values + to_come
        fresh = gradient.new_zeros(ctx.shape)
        fresh[selected.rows, :, selected.slots] = own
        return fresh, None, None, None


@dataclass
class SelectedPositions:
    """The selected positions that are not empty slots, as lists, and those of the parts to come, part after part."""

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows_to_come: torch.Tensor
    positions_to_come: torch.Tensor

    @classmethod
    def of(cls, selection: TokenSelection, to_come: Sequence[TokenSelection] = ()) -> "SelectedPositions":
        rows, slots = selection.mask.nonzero(as_tuple=True)
        later = [part.mask.nonzero(as_tuple=True) for part in to_come]
        return cls(
            rows,
            selection.indices[rows, slots],
            slots,
            torch.cat([rows[:0], *(r for r, _ in later)]),
            torch.cat([rows[:0], *(part.indices[at] for part, at in zip(to_come, later, strict=True))]),
        )

    def splice(self, fresh: torch.Tensor, store: torch.Tensor, carried: CarriedGradient) -> torch.Tensor:
        """(B, G, k, D) fresh keys or values into the (B, G, n, D) recorded ones."""
        return _Splice.apply(fresh, store.to(fresh.device), self, carried)


class RowMasks:
    """Mask rows as additive biases, built once per mask and shared by all layers that use it."""

    def __init__(self):
        self._built = {}

    def bias(self, allowed: torch.Tensor, dtype: torch.dtype, repeats: int) -> torch.Tensor:
        """(B, 1, k, n) bool -> (B, 1, repeats * k, n), 0 or the dtype's least number."""
        key = (id(allowed), dtype, repeats)
        if key not in self._built:
            batch, _, k, n = allowed.shape
            # An empty slot may stand at padding, which sees nothing; a softmax over nothing would be NaN.
            visible = allowed | ~allowed.any(-1, keepdim=True)
            # Rows start at multiples of 8 elements, as the GPU kernels want; they would copy the mask per layer otherwise.
            bias = torch.full(
                (batch, 1, repeats, k, (n + 7) // 8 * 8), torch.finfo(dtype).min, dtype=dtype, device=allowed.device
            )
            bias[..., :n].masked_fill_(visible[:, :, None], 0)
            self._built[key] = (allowed, bias.flatten(2, 3)[..., :n])
        return self._built[key][1]


def attend_selected(module, query, key, value, allowed, masks: RowMasks, dropout=0.0, scaling=None, **kwargs):
    """Attention of k selected queries over all n keys, without ever repeating keys or values over a head group.

    Args:
        query: (B, H, k, D); key, value: (B, G, n, D); allowed: (B, 1, k, n) bool.

    Returns:
        (B, k, H, D), as every attention function of transformers does.
    """
    if needs_eager(module, kwargs):
        bias = masks.bias(allowed, query.dtype, 1)
        return eager_function(module)(module, query, key, value, bias, dropout=dropout, scaling=scaling, **kwargs)[0]
    batch, heads, k, width = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    folded = query.reshape(batch, groups, repeats * k, width)
    bias = masks.bias(allowed, query.dtype, repeats)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling)
    return output.reshape(batch, heads, k, -1).transpose(1, 2).contiguous()


def attention_weights(module, query, key, value, allowed, scaling=None, **kwargs):
    """Attention probabilities (B, H, q, n) of some queries, by the model file's own formula where that is special."""
    if needs_eager(module, kwargs):
        bias = RowMasks().bias(allowed, query.dtype, 1)
        return eager_function(module)(module, query, key, value, bias, scaling=scaling, dropout=0.0, **kwargs)[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return eager_attention_weights(query, key, allowed, scaling)


def rows_at(tensor: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Take positions (B, q) of a (B, H, n, D) tensor: (B, H, q, D)."""
    return tensor.gather(2, queries[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def needs_eager(module: nn.Module, kwargs: dict) -> bool:
    return hasattr(module, "sinks") or any(kwargs.get(name) is not None for name in SPECIAL_ARGUMENTS)


def eager_function(module: nn.Module):
    """The `eager_attention_forward` of the file that defines the module's class."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function that TokenSeek could use.")
