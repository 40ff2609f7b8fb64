"""`InspectCallback`: pages that show how the selection of some rows changes in training."""

from pathlib import Path

from transformers import TrainerCallback

from .errors import ConfigError
from .evaluation import same_random_numbers_after
from .inspection import inspect_tokens


class InspectCallback(TrainerCallback):
    """Writes a token report before the first step, every so many steps, and at the end of training.

    ```python
    trainer.add_callback(InspectCallback(trainer, trainer.train_dataset, rows=(0, 8), every=50))
    ```

    The pages are `step_000000.html` and so on. Training goes on as if there were none: no random number is drawn. With
    several processes the first one writes while the others wait.

    Args:
        trainer: a TokenSeekTrainer or TokenSeekSFTTrainer with a processing_class (its tokenizer).
        dataset: where the rows are from, prepared as for training.
        rows: START and STOP of the rows; they stay the same for all pages.
        every: optimizer steps between pages; None: at the start and the end only.
        folder: where the pages go; None: `inspect` in the trainer's output folder.

    Raises:
        ConfigError: the data set has not that many rows, the trainer has no tokenizer, or its model is split over processes.
    """

    def __init__(self, trainer, dataset, *, rows=(0, 8), every: int | None = None, folder: str | Path | None = None):
        start, stop = rows
        if not 0 <= start < stop <= len(dataset):
            raise ConfigError(f"rows {start}:{stop} are not in the data set: it has rows 0 to {len(dataset) - 1}.")
        if every is not None and every < 1:
            raise ConfigError(f"every must be an integer >= 1, or None for start and end only; got {every}.")
        if trainer.processing_class is None:
            raise ConfigError(
                "InspectCallback needs the tokenizer: build the trainer with processing_class=tokenizer."
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ConfigError(
                "InspectCallback needs a whole copy of the model on one process, and this run splits it. Save a checkpoint and "
                "run `tokenseek inspect` on it."
            )
        self.trainer, self.numbers, self.every = trainer, list(range(start, stop)), every
        self.folder = Path(trainer.args.output_dir) / "inspect" if folder is None else Path(folder)
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="inspection")
        with same_random_numbers_after():  # a collator may mask at random; what it masked stays for all pages
            self.batches = [collate([dataset[i]]) for i in self.numbers]
        self.last_step = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._write(state)

    def on_step_end(self, args, state, control, **kwargs):
        if self.every is not None and state.global_step % self.every == 0:
            self._write(state)

    def on_train_end(self, args, state, control, **kwargs):
        if self.last_step != state.global_step:
            self._write(state)

    def _write(self, state) -> None:
        self.last_step = state.global_step
        trainer = self.trainer
        if state.is_world_process_zero:
            report = inspect_tokens(
                trainer.accelerator.unwrap_model(trainer.model),
                trainer.processing_class,
                self.batches,
                trainer.tokenseek,
                numbers=self.numbers,
                collator=lambda rows: rows[0],
                source=f"training data, after step {state.global_step}",
                step=state.global_step,
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            report.save(self.folder / f"step_{state.global_step:06d}.html")
        trainer.accelerator.wait_for_everyone()
