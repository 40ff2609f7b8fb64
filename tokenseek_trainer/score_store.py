"""Scores of instances that were seen before, for `reuse_scores`."""

from pathlib import Path

import torch

from .instances import Instances


class ScoreStore:
    """Scores by the content of an instance: 4 bytes a token, in host memory.

    An instance is known wherever it stands: in another batch, padded otherwise, or packed.
    """

    def __init__(self):
        self._scores: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, instances: Instances) -> torch.Tensor | None:
        """(B, n) float64 scores, 0 at padding; None unless every instance is known."""
        keys = instances.keys.tolist()
        if not all(key in self._scores for key in keys):
            return None
        found = torch.zeros(instances.ids.shape, dtype=torch.float64)
        ids = instances.ids.cpu()
        for number, key in enumerate(keys):
            found[ids == number] = self._scores[key].double()
        return found.to(instances.ids.device)

    def put(self, instances: Instances, scores: torch.Tensor) -> None:
        """Remember the (B, n) scores of instances that are not known yet."""
        ids, scores = instances.ids.cpu(), scores.detach().cpu().float()
        for number, key in enumerate(instances.keys.tolist()):
            if key not in self._scores:
                self._scores[key] = scores[ids == number]

    def save(self, path: str | Path) -> None:
        torch.save(self._scores, path)

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote; nothing happens if there is no such file: the scores are then made anew."""
        if Path(path).is_file():
            self._scores = torch.load(path, weights_only=True)
