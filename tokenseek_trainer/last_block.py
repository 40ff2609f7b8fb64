"""The graph of the seek pass: it begins at the last block, inside a forward without grad.

So one forward records keys and values of all blocks and yields the gradient at the last block's input, and no block runs twice.
"""

import contextlib

import torch

from .errors import UnsupportedModelError
from .scoring import gradient_magnitude, tokens_first
from .structure import ModelStructure


class LastBlock:
    """Turns grad on at the last block of a model."""

    def __init__(self, structure: ModelStructure):
        self._block = structure.blocks[-1]
        self._model_type = structure.model_type
        self._input: torch.Tensor | None = None

    @property
    def has_graph_from_input(self) -> bool:
        return self._input is not None

    @contextlib.contextmanager
    def graph_from_input(self):
        """Make the last block's input a leaf, and keep a graph from there to whatever the forward returns."""
        hook = self._block.register_forward_pre_hook(self._before, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._input = None

    @contextlib.contextmanager
    def graph_from_output(self):
        """Keep a graph from the last block's output on, in which a classifier's head shows what it reads."""
        hook = self._block.register_forward_hook(self._after)
        try:
            yield
        finally:
            hook.remove()

    def gradient_score(self, output: torch.Tensor, at_output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Magnitude (B, n) at the last block's input of the gradient `at_output` at `output`, a result of that graph.

        Args:
            shape: (B, n).

        Raises:
            UnsupportedModelError: hidden states of blocks in which tokens cannot be told apart.
        """
        assert self._input is not None
        (at_input,) = torch.autograd.grad(output, self._input, at_output)
        at_tokens = tokens_first(at_input, shape)
        if at_tokens is None:
            raise UnsupportedModelError(
                f"The blocks of the {self._model_type!r} model pass on hidden states of shape "
                f"{tuple(at_input.shape)}, in which tokens cannot be told apart. Use scorer='context' or 'random'."
            )
        return gradient_magnitude(at_tokens)

    def _before(self, block, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self._input = hidden.detach().requires_grad_()
        torch.set_grad_enabled(True)
        if args:
            return (self._input, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._input}

    def _after(self, block, args, output):
        torch.set_grad_enabled(True)
        if isinstance(output, torch.Tensor):
            return output.detach().requires_grad_()
        return type(output)([output[0].detach().requires_grad_(), *output[1:]])
