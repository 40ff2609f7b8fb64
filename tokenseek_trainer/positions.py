"""Models that number their tokens themselves: they take no position_ids, and a module of theirs counts what it is given.

In the ditch pass that module must see all tokens, and its output is taken at the selected ones.

Letters: B batch rows, n tokens of a row, k selected ones, E hidden width.
"""

import torch
from torch import nn

from .selection import TokenSelection


def position_modules(decoder: nn.Module, blocks: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The outermost modules before the blocks that are position embeddings by the name of their class.

    A name proves nothing; the self-check does.
    """
    within = {module for block in blocks for module in block.modules()}
    found: list[nn.Module] = []
    for module in decoder.modules():
        inside = any(module in set(outer.modules()) for outer in found)
        if module not in within and not inside and "position" in type(module).__name__.lower():
            found.append(module)
    return tuple(found)


class OwnPositions:
    """Stands for a position module's forward: remembers its call on all tokens, and repeats it for the selected ones.

    Args:
        forward: the module's own.
    """

    def __init__(self, forward):
        self._forward = forward
        self._call = ((), {})

    def of_all(self, *args, **kwargs) -> torch.Tensor:
        self._call = (args, kwargs)
        return self._forward(*args, **kwargs)

    def of_selected(self, selection: TokenSelection) -> torch.Tensor:
        """(B, k, E), differentiable. At ditched positions no gradient arrives."""
        args, kwargs = self._call
        embedded = self._forward(*args, **kwargs)  # (n, E), (1, n, E) or (B, n, E)
        embedded = embedded.expand(len(selection.indices), *embedded.shape[-2:])
        rows = torch.arange(len(selection.indices), device=embedded.device)[:, None]
        return embedded[rows, selection.indices]
