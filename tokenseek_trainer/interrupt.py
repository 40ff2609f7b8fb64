"""Ctrl-C in training: the step is finished, a checkpoint is written, and the run stops; a second Ctrl-C stops at once."""

import os
import signal
import sys
import threading

from transformers import TrainerCallback


class Interrupted(KeyboardInterrupt):
    """A run was stopped by Ctrl-C; the text says how to go on."""


class CheckpointOnInterrupt(TrainerCallback):
    """A context manager around `trainer.train()`, and a callback of the trainer.

    With several processes Ctrl-C does what it always does: they could not agree on the step to save.
    """

    def __init__(self):
        self.asked = False
        self.step = 0

    def __enter__(self):
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._on_signal) if alone else None
        return self

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(
            "\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr, flush=True
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step
        if self.asked:
            control.should_save = True
            control.should_evaluate = False

    def on_save(self, args, state, control, **kwargs):
        if self.asked:
            raise Interrupted(f"stopped after step {state.global_step} of {state.max_steps}, with a checkpoint.")
