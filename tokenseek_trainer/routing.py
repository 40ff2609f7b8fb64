"""The auxiliary loss of a mixture of experts, which keeps its experts evenly used, over kept tokens.

The model's own function makes it from the router logits of all tokens: those of the ordinary forward, over which the kept
tokens' fresh ones are written. So its value is the stock one, ditched tokens are constants in it, and what a kept token sends
back counts for the n / k tokens of its instance that it stands for. With every token kept that is the stock gradient. (An
instance without any label keeps no token, so it adds to the value only.)

Letters: B batch rows, n tokens of a row, k selected ones, M instances, X experts.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .instances import Instances
from .selection import TokenSelection


COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def router_coefficient(lm: nn.Module) -> float:
    """What the model multiplies its auxiliary loss by; 0 if it has none."""
    for owner in (lm, lm.config.get_text_config()):  # type: ignore[operator, union-attr]
        for name in COEFFICIENTS:
            if isinstance(value := getattr(owner, name, None), (int, float)):
                return float(value)
    return 0.0


class RouterLogits:
    """Router logits of every layer, from the seek pass to the ditch pass."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []

    def record(self, output) -> None:
        """Keep what a decoder's output shows of its routers, in the seek pass; nothing if it was not asked for."""
        self.recorded = [logits.detach() for logits in getattr(output, "router_logits", None) or ()]
        self._tokens_per_slot: torch.Tensor | None = None

    def clear(self) -> None:
        """Let go of everything."""
        self.recorded = []

    def spliced(
        self,
        logits: Sequence[torch.Tensor],
        instances: Instances,
        selection: TokenSelection,
        to_come: Sequence[TokenSelection],
    ) -> tuple[torch.Tensor, ...]:
        """(B * n, X) for every layer: `logits` (B * k, X) of the selected tokens, written over the recorded ones."""
        if self._tokens_per_slot is None:  # the first part: all of the selection
            self._tokens_per_slot = _tokens_per_slot(instances, [selection, *to_come])
        rows, slots = selection.mask.nonzero(as_tuple=True)
        positions = selection.indices[rows, slots]
        flat = rows * instances.ids.shape[1] + positions
        scale = self._tokens_per_slot[instances.ids[rows, positions]][:, None]
        found = []
        for fresh, recorded in zip(logits, self.recorded, strict=True):
            fresh = fresh.unflatten(0, selection.mask.shape)[rows, slots]
            fresh = fresh.detach() + (fresh - fresh.detach()) * scale.to(fresh)
            found.append(recorded.index_put((flat,), fresh.to(recorded.dtype)))
        return tuple(found)


def _tokens_per_slot(instances: Instances, parts: Sequence[TokenSelection]) -> torch.Tensor:
    """(M,) float64: how many of its tokens each kept token of an instance stands for."""
    kept = [instances.ids.gather(1, part.indices)[part.mask] for part in parts]
    return instances.n_tokens / torch.bincount(torch.cat(kept), minlength=instances.count).double().clamp(min=1)
