"""Run the real code on tensors that have a shape and no data: what stands in where values would be asked for."""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from . import session
from .losses import chunk_size
from .operations import Operations


FOUR_BIT_BLOCK, SCALE_BLOCK = 64, 256  # NF4 with double quantisation


@contextlib.contextmanager
def masks_as_in_a_run():
    """transformers builds masks that a run would not need when it sees a fake tensor, in case values would ask for them."""
    before, masking_utils.is_tracing = masking_utils.is_tracing, lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = before


@contextlib.contextmanager
def few_chunks(operations: Operations):
    """Let the head see two chunks of positions: the others would need the same memory after them, and much time.

    Their operations are counted for the others, too.
    """
    calls: Any = session
    exact = calls.losses_and_gradient, calls.weighted_loss

    def losses_and_gradient(head, hidden, targets, vocab_size, smoothing, need_gradient):
        n = min(len(hidden), 2 * chunk_size(vocab_size))
        rest = hidden.new_empty(len(hidden) - n, hidden.shape[1] if need_gradient else 0)
        with operations.standing_for(len(hidden) / n):
            losses, gradient = exact[0](head, hidden[:n], targets[:n], vocab_size, smoothing, need_gradient)
        losses = torch.cat([losses, losses.new_empty(len(hidden) - n)])
        return losses, torch.cat([gradient, rest]) if need_gradient else None

    def weighted_loss(head, hidden, targets, weights, vocab_size, *options):
        n = min(len(hidden), 2 * chunk_size(vocab_size))
        times, first = len(hidden) / n, hidden[:n]
        with operations.standing_for(times):
            loss = exact[1](head, first, targets[:n], weights[:n], vocab_size, *options)
        operations.backward_standing_for(times, loss, first)
        return loss

    calls.losses_and_gradient, calls.weighted_loss = losses_and_gradient, weighted_loss
    try:
        yield
    finally:
        calls.losses_and_gradient, calls.weighted_loss = exact


def on_cpu(model: nn.Module) -> nn.Module:
    """Turn weights on the meta device into fake ones on the CPU, where the fused kernels are. Tied weights stay tied."""
    made = {}
    for module in model.modules():
        kinds: tuple[dict, ...] = (module._parameters, module._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                tensors[name] = made[id(tensor)]
    return model


class AnswersWithoutData(TorchDispatchMode):
    """Answers what depends on values: a flag is true, and a mask selects everything.

    So `hidden[mask]` has as many rows as `mask` has elements: every position is supervised, every slot is used.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        if function is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        if function in (
            aten.index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
        ):
            args = (args[0], _all_of(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


def _all_of(indices) -> list:
    found = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            found += [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


class _FourBit(torch.autograd.Function):
    """As bitsandbytes multiplies: the weight is unpacked for the product, in both directions, and nothing is kept."""

    @staticmethod
    def forward(ctx, x, shape, dtype):
        ctx.shape, ctx.dtype = shape, dtype
        return linear(x.to(dtype), torch.empty(shape, dtype=dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.to(ctx.dtype) @ torch.empty(ctx.shape, dtype=ctx.dtype)).to(gradient.dtype), None, None


class _FourBitLinear(nn.Linear):
    """Stands for bitsandbytes.nn.Linear4bit, which cannot be built without data."""

    def forward(self, x):
        out = _FourBit.apply(x, (self.out_features, self.in_features), self.compute_dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What loading in 4 bits and `prepare_model_for_kbit_training` make of a model."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            count = module.weight.numel()
            module.__class__, module.compute_dtype = _FourBitLinear, dtype  # type: ignore[assignment]
            module.weight = nn.Parameter(torch.empty((count + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
            module.register_buffer("absmax", torch.empty(count // FOUR_BIT_BLOCK, dtype=torch.uint8))
            module.register_buffer("nested_absmax", torch.empty(-(-count // FOUR_BIT_BLOCK // SCALE_BLOCK)))
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
