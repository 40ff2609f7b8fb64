"""Weights that both embed tokens and make logits: one gradient of the vocabulary's size at a time, not three.

Autograd keeps the head's gradient until the embedding's comes, which is the last one of a backward, makes that one dense although
it has a row per kept token only, and adds the two into a third. All other gradients are there by then, so this is the peak of
full fine-tuning in few activations: two gradients of the vocabulary above what is needed. Here the embedding's rows are added to
the head's gradient where it is.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .patching import forward_replaced


class TiedGradient:
    """Adds up the gradient of a model's tied weights in a ditch pass; does nothing for weights that are not tied or not trained.

    Args:
        embedding: the module that embeds tokens; None if there is none.
        head: the module that makes logits; None if there is none.
    """

    def __init__(self, embedding: nn.Module | None, head: nn.Module | None):
        self._embedding: Any = embedding
        self._head: Any = head
        self._ditches = False
        self._embedded = False  # in this pass, so that a backward of the embedding will come after the head's
        self._gradient: torch.Tensor | None = None  # of the head

    def attach(self, stack: contextlib.ExitStack) -> None:
        """Stand in front of both modules until the stack closes."""
        if isinstance(self._embedding, nn.Embedding) and self._head is not None:
            self._embedding_forward = stack.enter_context(forward_replaced(self._embedding, self._run_embedding))
            self._head_forward = stack.enter_context(forward_replaced(self._head, self._run_head))

    def start(self, ditches: bool) -> None:
        """Begin a pass."""
        self._ditches, self._embedded, self._gradient = ditches, False, None

    def _is_tied(self) -> bool:
        weight = self._embedding._parameters.get("weight")
        return (
            isinstance(weight, nn.Parameter)
            and not is_traceable_wrapper_subclass(weight)  # sharded or quantised, with rules of its own
            and weight is self._head._parameters.get("weight")
            and weight.requires_grad
            and weight.device.type in ("cpu", "cuda")  # sparse gradients are not everywhere
            and torch.is_grad_enabled()
            and not self._embedding.scale_grad_by_freq
        )

    def _run_embedding(self, *args, **kwargs):
        embedding = self._embedding
        if not (self._ditches and self._is_tied()):
            return self._embedding_forward(*args, **kwargs)
        self._embedded, sparse = True, embedding.sparse
        try:
            embedding.sparse = True
            with _weight_replaced(embedding, _Weight.apply(embedding.weight, self.with_embedding)):
                return self._embedding_forward(*args, **kwargs)
        finally:
            embedding.sparse = sparse

    def _run_head(self, *args, **kwargs):
        if not (self._embedded and self._is_tied()):
            return self._head_forward(*args, **kwargs)
        with _weight_replaced(self._head, _Weight.apply(self._head.weight, self.of_head)):
            return self._head_forward(*args, **kwargs)

    def of_head(self, gradient: torch.Tensor) -> None:
        """Keep back the gradient (V, E) of one call of the head."""
        self._gradient = gradient if self._gradient is None else self._gradient.add_(gradient)

    def with_embedding(self, gradient: torch.Tensor) -> torch.Tensor:
        """The whole gradient, given the embedding's: sparse (V, E), with a row for each token."""
        whole, self._gradient = self._gradient, None
        if whole is None:  # nothing of the head was asked for
            whole = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        tokens, rows = _summed_by_token(gradient._indices()[0], gradient._values())
        return whole.index_add_(0, tokens, rows.to(whole.dtype))


class _Weight(torch.autograd.Function):
    """The weight; `receive` takes its gradient and returns what autograd gets in its place."""

    @staticmethod
    def forward(ctx, weight, receive):
        ctx.receive = receive
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.receive(gradient), None


def _summed_by_token(tokens: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of each token's rows, in float32 or better, so that a frequent token is rounded once.

    Args:
        tokens: (k,) int64; rows: (k, E).

    Returns:
        tokens (k,) and rows (k, E); places that are not needed hold zeros for token 0.
    """
    tokens, order = tokens.sort(stable=True)
    places = (tokens != tokens.roll(1)).long()
    places[:1] = 0
    places = places.cumsum(0)
    sums = rows.new_zeros(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
    sums.index_add_(0, places, rows[order].to(sums.dtype))
    return torch.zeros_like(tokens).scatter_(0, places, tokens), sums


@contextlib.contextmanager
def _weight_replaced(module: nn.Module, weight: torch.Tensor):
    """Let a module compute with another tensor in place of its weight, which `nn.Module` allows parameters only."""
    parameters: dict = module._parameters
    before = parameters["weight"]
    parameters["weight"] = weight
    try:
        yield
    finally:
        parameters["weight"] = before
