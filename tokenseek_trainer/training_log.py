"""What a training run logs about its tokens and its memory, summed between two logs."""

import contextlib
import time
from typing import Any

import torch
from transformers import TrainerCallback

from .instances import find_instances
from .memory import MIB, SavedBytes, peak_device_bytes
from .selection import TokenSelection
from .selection_log import SelectionLog


class TrainingLog:
    """Sums since the last log (the window), kept on the device so that no step waits for them."""

    def __init__(self):
        self.supervised_ever = None
        self._counts = True
        self.selection = SelectionLog()
        # Rows, tokens and saved bytes of the last micro-batch that was counted.
        self.measured: tuple[int, int, int] | None = None
        self._clear()

    def _clear(self):
        self.sums: dict[str, Any] = {}
        self.optimizer_steps = 0.0
        self.saved_bytes = None
        self.seconds, self.timed_steps = 0.0, 0

    def add_time(self, seconds: float) -> None:
        """One optimizer step took this long, without evaluation, saving and logging."""
        self.seconds += seconds
        self.timed_steps += 1

    @contextlib.contextmanager
    def counting(self, model, shape, part: int = 0):
        """Count saved bytes inside, in the first micro-batch of the window; later ones are not slowed down.

        Of the parts of a micro-batch the one that keeps most counts.

        Args:
            shape: (B, n) of the micro-batch.
        """
        if part == 0:
            self._counts = self.saved_bytes is None
        if not self._counts:
            yield None
            return
        with SavedBytes(model) as saved:
            yield saved
        self.saved_bytes = max(self.saved_bytes or 0, saved.total)
        self.measured = (*shape, self.saved_bytes)

    def add(self, instances, selection: TokenSelection, full_loss, accumulation) -> None:
        """A micro-batch of which the selection was kept; full_loss is its share of the optimizer step's."""
        self._add(
            accumulation,
            kept=selection.mask.sum(),
            real=instances.n_tokens.sum(),
            supervised_kept=selection.supervised.sum(),
            supervised=instances.n_supervised.sum(),
            full_loss=full_loss,
        )

    def add_ordinary(self, inputs, loss, num_items_in_batch, structure, accumulation) -> None:
        """A micro-batch of ordinary training."""
        labels = inputs.get("shift_labels")
        shift = structure.shift and labels is None
        labels = inputs.get("labels") if labels is None else labels
        instances = find_instances(inputs, None if structure.loss_per_row else labels, shift)
        n_supervised = len(labels) if structure.loss_per_row else instances.n_supervised.sum()
        n_tokens = instances.n_tokens.sum()
        full_loss = loss.detach() / (accumulation if num_items_in_batch is None else 1)
        self._add(
            accumulation,
            kept=n_tokens,
            real=n_tokens,
            supervised_kept=n_supervised,
            supervised=n_supervised,
            full_loss=full_loss,
        )

    def _add(self, accumulation, **values):
        kept = values["supervised_kept"]
        self.supervised_ever = kept if self.supervised_ever is None else self.supervised_ever + kept
        self.optimizer_steps += 1 / accumulation
        # The same names on every process, whichever of them scored: their sums are added up.
        scored = values["full_loss"] is not None
        values = {**values, "full_loss": values["full_loss"] if scored else 0.0, "scored": scored / accumulation}
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def flush(self, accelerator) -> dict[str, float]:
        """The means of the window over all processes; the window then starts anew."""
        if not self.sums:
            return {}
        device = accelerator.device
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=device) for v in self.sums.values()])
        sums = dict(zip(self.sums, accelerator.reduce(values, "sum").tolist(), strict=True))
        logs = {
            "kept_tokens": sums["kept"] / self.optimizer_steps,
            "kept_fraction": sums["kept"] / max(sums["real"], 1),
            "supervised_kept": sums["supervised_kept"] / self.optimizer_steps,
            "supervised_fraction": sums["supervised_kept"] / max(sums["supervised"], 1),
        }
        if sums["scored"] > 0:
            logs["full_loss"] = sums["full_loss"] / sums["scored"]
        if self.timed_steps:
            logs["step_seconds"] = self.seconds / self.timed_steps
        if self.saved_bytes is not None:
            logs["saved_mib"] = self.saved_bytes / MIB
        peak = peak_device_bytes(device)
        if peak is not None:
            logs["peak_memory_mib"] = peak / MIB
            torch.cuda.reset_peak_memory_stats(device)
        self._clear()
        logs.update(self.selection.flush(accelerator))
        return logs


class StepClock(TrainerCallback):
    """Times optimizer steps, from the first micro-batch to the end of the optimizer's work."""

    def __init__(self, add_time):
        self._add_time = add_time
        self._start = None

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self._add_time(time.perf_counter() - self._start)
