"""Where the kept tokens of a training run lie, and how much the selection changes from one epoch to the next.

Letters: B batch rows, n positions of a row, k kept positions of the fullest row, M instances.
"""

import numpy as np
import torch

from .instances import Instances
from .selection import TokenSelection


DECILES = 10
AGREEMENT_INSTANCES = 10_000  # that are remembered, a bit per token: 3 MB if they have 2048 tokens
MAX_PENDING = 64  # micro-batches that wait on the device to be compared with earlier epochs


class SelectionLog:
    """Sums since the last log, kept on the device; no step waits for them.

    `kept/prompt`, `kept/response`: shares of the kept tokens that are of the prompt (tokens that nothing learns to predict)
        and of the response.
    `kept/position`: their mean place in the instance, from 0 (start) to 1 (end).
    `kept/decile_0` to `kept/decile_9`: their shares by tenth of the instance, from its start.
    `kept/score_entropy`: how evenly the scores are spread over the positions to choose from, mean over instances: 1 if all
        have the same, 0 if one has it all. Absent without scores.
    `kept/agreement`: share of an instance's kept tokens that were kept at its last visit too, mean over the instances seen
        before. The first 10 000 instances of a run are followed, by their content. Absent in the first epoch.
    """

    def __init__(self):
        self._sums = None
        self._pending: list[tuple[torch.Tensor, ...]] = []
        self._kept_before: dict[int, np.ndarray] = {}  # packed bits by instance key
        self._agreement = np.zeros(2)  # sum, instances

    def add(
        self,
        instances: Instances,
        selection: TokenSelection,
        importance: torch.Tensor | None,
        choose_from,
        shift: bool,
    ) -> None:
        """A micro-batch of which the selection was kept.

        Args:
            importance: (B, n) >= 0; None if there is none.
            choose_from: (B, n) bool, the positions over which its entropy is taken.
            shift: whether position j predicts token j + 1.
        """
        ids, place = selection.gather(instances.ids), selection.gather(instances.place)
        learned = selection.gather(instances.learned(shift)) & selection.mask
        n_tokens = instances.n_tokens[ids.clamp(min=0)]
        decile = place * DECILES // n_tokens.clamp(min=1)
        in_decile = (decile[..., None] == torch.arange(DECILES, device=ids.device)) & selection.mask[..., None]
        position = ((place + 0.5) / n_tokens.clamp(min=1)).masked_fill(~selection.mask, 0)
        evenness, scored = (
            entropy(importance, instances, choose_from) if importance is not None else (place.new_zeros(()),) * 2
        )
        parts = [learned.sum(), selection.mask.sum(), position.sum(), evenness, scored]
        sums = torch.cat([torch.stack([part.double() for part in parts]), in_decile.sum((0, 1)).double()])
        self._sums = sums if self._sums is None else self._sums + sums
        self._pending.append(
            (instances.keys, instances.n_tokens, ids.masked_fill(~selection.mask, -1).int(), place.int())
        )
        if len(self._pending) >= MAX_PENDING:
            self._compare()

    def flush(self, accelerator) -> dict[str, float]:
        """The means since the last log over all processes, rounded; empty if nothing was kept by selection."""
        self._compare()
        # Every process takes part, also one that has selected nothing.
        sums = (
            torch.zeros(5 + DECILES, dtype=torch.float64, device=accelerator.device)
            if self._sums is None
            else self._sums
        )
        sums = torch.cat([sums, torch.from_numpy(self._agreement).to(sums.device)])
        learned, kept, position, evenness, scored, *rest = accelerator.reduce(sums, "sum").tolist()
        self._sums, self._agreement = None, np.zeros(2)
        if not kept:
            return {}
        logs = {"kept/prompt": 1 - learned / kept, "kept/response": learned / kept, "kept/position": position / kept}
        logs.update({f"kept/decile_{i}": count / kept for i, count in enumerate(rest[:DECILES])})
        if scored:
            logs["kept/score_entropy"] = evenness / scored
        if rest[-1]:
            logs["kept/agreement"] = rest[-2] / rest[-1]
        return {name: round(value, 4) for name, value in logs.items()}

    def _compare(self) -> None:
        """Compare the pending selections with those of the same instances before, on the host."""
        for pending in self._pending:
            keys, lengths, ids, places = (tensor.cpu().numpy() for tensor in pending)
            for number, (key, length) in enumerate(zip(keys.tolist(), lengths.tolist(), strict=True)):
                kept = np.zeros(length, dtype=bool)
                kept[places[ids == number]] = True
                before = self._kept_before.get(key)
                if before is not None and kept.any():
                    both = np.unpackbits(before, count=length).astype(bool) & kept
                    self._agreement += both.sum() / kept.sum(), 1
                if before is not None or len(self._kept_before) < AGREEMENT_INSTANCES:
                    self._kept_before[key] = np.packbits(kept)
        self._pending.clear()


def entropy(importance: torch.Tensor, instances: Instances, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over instances of the entropy of their importances / log(number of positions), and how many instances count.

    Instances with a single position, or without any importance, do not.

    Args:
        importance: (B, n) >= 0.
        where: (B, n) bool, the positions that take part.
    """
    slot = torch.where(where, instances.ids + 1, 0).flatten()  # slot 0 is of no instance

    def per_instance(values):
        values = values.double().masked_fill(~where, 0).flatten()
        return torch.zeros(instances.count + 1, dtype=torch.float64, device=slot.device).index_add(0, slot, values)

    total, count = per_instance(importance), per_instance(where)
    share = importance.double() / total[slot].view_as(importance).clamp(min=1e-300)
    spread = per_instance(torch.special.entr(share.masked_fill(~where, 0))) / count.clamp(min=2).log()
    counts = (count > 1) & (total > 0) & total.isfinite()
    return spread.masked_fill(~counts, 0).sum(), counts.sum()
