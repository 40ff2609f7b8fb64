"""`TokenSeekTrainer`: transformers' Trainer whose training steps keep activations for a few tokens only.

Evaluation, prediction, saving and everything between two training steps are the stock Trainer's.
"""

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

from .collator import TOKEN_COLUMNS, TokenSeekCollator
from .config import CONFIG_NAME, TokenSeekConfig
from .errors import ConfigError, InputError, UnsupportedModelError
from .instances import Instances
from .losses import TokenStatistics
from .model_card import CardFacts, may_write, write_card
from .objective import refuse_copying
from .packing import warn_of_mixed_documents
from .pass_inputs import shape_of, with_position_ids
from .quantized import cpu_packing_off, undo_cpu_packing
from .refusals import refuse_combinations, refuse_other_objectives
from .score_store import ScoreStore
from .scoring import importance
from .selection import TokenSelection, check_given, check_scores, select, select_given
from .selfcheck import self_check
from .session import TokenSeekSession
from .structure import context_blocks, inspect_model
from .training_log import StepClock, TrainingLog


class TokenSeekMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]  # mixed into Trainer or a subclass of it
    """Gives a transformers Trainer (or a subclass of it) training steps with token ditching.

    Args:
        tokenseek: the settings; None for the default ones. Everything else is the Trainer's own.

    It logs beside `loss`, averaged over the optimizer steps since the last log:
        full_loss: the loss over all supervised tokens, from the seek passes that scored (absent with `scorer="random"`).
        kept_tokens, supervised_kept: tokens kept per optimizer step over all processes, and those that carry a loss.
        kept_fraction, supervised_fraction: kept tokens / real tokens, and the same of those that carry a loss.
        saved_mib: MiB that this process keeps for the backward of one micro-batch: by autograd, and the recorded keys and
            values.
        step_seconds: seconds of one optimizer step, without evaluation and saving.
        peak_memory_mib: greatest device memory since the last log (absent on devices that do not count it).
        kept/...: where the kept tokens lie, see `SelectionLog`; the shares by decile go to `state.log_history` only.
    """

    # What the model card shows of a run by a recipe; see `CardFacts`.
    recipe: dict[str, Any] | None = None
    estimates: tuple[Any, Any] = (None, None)  # of ordinary full fine-tuning, of the run

    def __init__(self, *args, tokenseek: TokenSeekConfig | None = None, **kwargs):
        self.tokenseek = TokenSeekConfig() if tokenseek is None else tokenseek
        if not isinstance(self.tokenseek, TokenSeekConfig):
            raise ConfigError(
                f"tokenseek must be a TokenSeekConfig, got {type(tokenseek).__name__}. "
                "Write tokenseek=TokenSeekConfig(ratio=0.1), or TokenSeekConfig.from_dict(...) for a mapping."
            )
        self._session: TokenSeekSession | None = None
        self._checked = self._packing_checked = False
        self._part = 0
        self._parts: list[TokenSelection] = []
        self._instances: Any = None
        self._token_statistics: TokenStatistics | None = None
        self._training_log = TrainingLog()
        self._score_store = ScoreStore()
        refuse_other_objectives(type(self))
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module):
            inspect_model(model)  # refused before the Trainer moves it to a device
        super().__init__(*args, **kwargs)
        self.add_callback(StepClock(lambda seconds: self._training_log.add_time(seconds)))
        self._structure = inspect_model(self.model)
        self._loss_shifts_labels = self._structure.shift  # by which the Trainer counts num_items_in_batch
        context_blocks(self.tokenseek, self._structure)  # refuses blocks that the model has not
        self._refuse_combinations()

    def _refuse_combinations(self) -> None:
        refuse_combinations(self, self._structure)

    # ---- one training step ----

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        """The stock step inside a session, which stays open until the backward is over; once for each of `parts`."""
        if self._keeps_all(inputs):
            undo_cpu_packing(self.model)
            return super().training_step(model, inputs, *args, **kwargs)
        losses, last = [], self.tokenseek.parts - 1
        with self._open_session(model) as self._session:
            try:
                for self._part in range(last + 1):
                    # Gradients are exchanged between processes once, when they are complete.
                    with contextlib.nullcontext() if self._part == last else self.accelerator.no_sync(model):
                        losses.append(super().training_step(model, inputs, *args, **kwargs))
                return torch.stack(losses).sum()
            finally:
                self._session, self._instances, self._parts = None, None, []

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ):
        """In training: the loss of the selected tokens that stands for all. In evaluation: the stock loss.

        With `return_outputs=True` in training the outputs hold the loss and no logits.

        Raises:
            InputError: the batch has no labels, or token columns that do not fit it.
        """
        if model.training:
            inputs = with_position_ids(inputs)
        if not model.training or self._keeps_all(inputs):
            stock = self._structure.with_own_positions({k: v for k, v in inputs.items() if k not in TOKEN_COLUMNS})
            if model.training and self._structure.forward_accepts("use_cache"):
                stock.setdefault("use_cache", False)  # a cache would switch packed-document masks off
            shape = shape_of(inputs) if model.training else None
            with self._training_log.counting(self.model, shape) if model.training else contextlib.nullcontext():
                result = super().compute_loss(model, stock, return_outputs, num_items_in_batch, **kwargs)
            if model.training:
                loss = result[0] if return_outputs else result
                self._training_log.add_ordinary(inputs, loss, num_items_in_batch, self._structure, self._accumulation)
            return result
        if self._session is None:
            raise UnsupportedModelError(
                "In training mode compute_loss works inside training_step only: the model stays prepared until the backward is "
                "over. Call trainer.training_step, or model.eval() for the stock loss."
            )
        loss = self._tokenseek_loss(inputs, num_items_in_batch) * self._process_scale(num_items_in_batch)
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def _tokenseek_loss(self, inputs: dict[str, Any], num_items_in_batch) -> torch.Tensor:
        """The loss of the part of the selection whose turn it is; the first part seeks."""
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            raise InputError(
                f"The batch has no labels (it has: {', '.join(sorted(inputs))}). Give the data set a 'labels' column, or use "
                "TokenSeekCollator, which makes them from input_ids."
            )
        assert self._session is not None  # compute_loss has seen to that
        session, smoothing = self._session, self.args.label_smoothing_factor
        if self._part == 0:
            self._instances, selection = self._seek(inputs, num_items_in_batch)
            self._parts = selection.parts(self.tokenseek.parts)
            self._token_statistics = self._statistics()
        with self._training_log.counting(self.model, self._instances.ids.shape, self._part) as saved:
            if saved is not None:
                saved.add(*session.recorded())
            return session.ditch(
                inputs,
                self._instances,
                self._parts[self._part],
                self._items_of_loss(num_items_in_batch),
                label_smoothing=smoothing,
                statistics=self._token_statistics,
                to_come=self._parts[self._part + 1 :],
                router_weight=self._router_weight(num_items_in_batch),
            )

    def _seek(self, inputs: dict[str, Any], num_items_in_batch) -> tuple[Instances, TokenSelection]:
        """Run the seek pass and select."""
        assert self._session is not None
        session, config = self._session, self.tokenseek
        instances = session.instances(inputs)
        if not (self._structure.shift or self._structure.loss_per_row) and self.state.global_step == 0:
            refuse_copying(inputs, instances, self._structure.lm)
        if config.self_check and not self._checked:
            self._checked = self_check(session, inputs, instances) is not None
        given = inputs.get("token_indices")
        scores = inputs.get("token_scores")
        if scores is not None:
            check_scores(scores, instances, config)
        elif given is None and config.ratio == 1.0:
            scores = torch.zeros(instances.ids.shape, device=instances.ids.device)  # all are kept
        elif given is None and config.reuse_scores:
            scores = self._score_store.get(instances)
        found = session.seek(
            inputs,
            instances,
            scoring=given is None and scores is None,
            label_smoothing=self.args.label_smoothing_factor,
        )
        assert found.instances is not None  # of a seek pass
        instances = found.instances
        if not self._packing_checked and instances.count > len(instances.ids):
            self._packing_checked = True
            if session.attention.mixes_documents():
                warn_of_mixed_documents(self._structure.model_type)
        if given is not None:
            selection = select_given(given, instances, config)
            check_given(selection, instances)
        else:
            if scores is None:
                scores = found.scores(instances, config, self.state.global_step)
                if config.reuse_scores:
                    self._score_store.put(instances, scores)
            # A token after the last supervised one can influence no loss but a router's.
            causal = self._structure.shift and not session.routers.recorded
            selection = select(scores, instances, config, causal=causal, step=self.state.global_step)
        full_loss = found.loss_sum
        if full_loss is not None:
            n_items = self._items_of_loss(num_items_in_batch)
            if n_items is None:
                n_items = len(instances.ids) if instances.per_row else instances.n_supervised.sum().clamp(min=1)
            full_loss = full_loss / n_items * self._process_scale(num_items_in_batch)
            full_loss = full_loss / (self._accumulation if num_items_in_batch is None else 1)
        self._training_log.add(instances, selection, full_loss, self._accumulation)
        self._log_selection(instances, selection, scores, inputs.get("token_scores") is not None)
        return instances, selection

    def _items_of_loss(self, num_items_in_batch):
        """What the stock loss is divided by; None: the supervised positions, or rows, of the micro-batch.

        Heads that ignore num_items_in_batch take the mean of each micro-batch; label smoothing is the Trainer's own.
        """
        counts = self._structure.loss_counts_items or self.args.label_smoothing_factor
        return num_items_in_batch if counts else None

    def _log_selection(self, instances, selection, scores, given: bool) -> None:
        """`scores` are what was ranked or drawn by, None if token indices were given; `given`: the data set's own."""
        config = self.tokenseek
        ranked = config.selection == "topk"
        if config.scorer == "random" or config.ratio == 1.0 or (ranked and given):
            scores = None  # chance, not scored, or of unknown scale
        if scores is not None and ranked:
            scores = importance(scores, instances, config)
        choose_from = instances.supervised if config.select_from == "supervised" else instances.ids >= 0
        self._training_log.selection.add(instances, selection, scores, choose_from, self._structure.shift)

    def _process_scale(self, num_items_in_batch) -> int:
        """As in the stock Trainer: DDP averages over processes, while N may count the tokens of all of them."""
        if num_items_in_batch is None or not self.args.average_tokens_across_devices:
            return 1
        return self.accelerator.num_processes // self.get_tp_size()

    def _keeps_all(self, inputs: dict[str, Any]) -> bool:
        """Whether this step is ordinary training: nothing is ditched, so nothing needs to be sought."""
        config = self.tokenseek
        return config.ratio == 1.0 and config.parts == 1 and inputs.get("token_indices") is None

    def _router_weight(self, num_items_in_batch) -> float | None:
        """Weight of a mixture's auxiliary loss as in the stock Trainer: the model's own, none with label smoothing."""
        return 0.0 if self.args.label_smoothing_factor else None

    def _statistics(self) -> TokenStatistics | None:
        """What to fill with statistics of the kept tokens; None: nothing is computed."""
        return None

    @property
    def _accumulation(self) -> int:
        return getattr(self, "current_gradient_accumulation_steps", 1)

    def _open_session(self, model: nn.Module) -> TokenSeekSession:
        if extract_model_from_parallel(model, keep_fp32_wrapper=True) is not self._structure.outer:
            self._structure, self._checked = inspect_model(model), False  # model_init made a new one
            self._loss_shifts_labels = self._structure.shift
        return TokenSeekSession(model, self.tokenseek, self._structure)

    # ---- columns, logs, checkpoints ----

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        own = isinstance(self.data_collator, TokenSeekCollator)
        keep = (*TOKEN_COLUMNS, "position_ids", "completion_mask") if own else TOKEN_COLUMNS
        self._signature_columns += [name for name in keep if name not in self._signature_columns]

    def prediction_step(self, model, inputs, *args, **kwargs):
        inputs = self._structure.with_own_positions({k: v for k, v in inputs.items() if k not in TOKEN_COLUMNS})
        return super().prediction_step(model, inputs, *args, **kwargs)

    def train(self, *args, **kwargs):
        """Train, then warn if no kept token of the whole run carried a loss.

        Activation checkpointing of the training arguments applies to the ditch pass.
        """
        self._training_log = TrainingLog()
        with cpu_packing_off(self.model):
            output = super().train(*args, **kwargs)
        if self._training_log.supervised_ever is not None and int(self._training_log.supervised_ever) == 0:
            warnings.warn(
                "No token that was kept carried a loss, so nothing was learned: every label was -100, or token_indices name "
                "unsupervised positions only. Check the prompt masking, the maximum length and the token columns.",
                stacklevel=2,
            )
        return output

    def evaluation_loop(self, *args, **kwargs):
        """The stock loop; 4-bit weights on a CPU stay as training needs them."""
        with cpu_packing_off(self.model):
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        deciles = {}
        if "loss" in logs:
            logs.update(self._training_log.flush(self.accelerator))
            deciles = {name: logs.pop(name) for name in list(logs) if name.startswith("kept/decile_")}
        super().log(logs, *args, **kwargs)
        if deciles:  # ten more curves would bury the others
            self.state.log_history[-1].update(deciles)

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.tokenseek.reuse_scores:
            self._score_store.save(self._score_file(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.tokenseek.reuse_scores:
            self._score_store.load(self._score_file(checkpoint))

    def _score_file(self, folder: str) -> str:
        """Every process has seen rows of its own."""
        return os.path.join(folder, f"tokenseek_scores_{self.args.process_index}.pt")

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        folder = output_dir or self.args.output_dir
        own_card = may_write(folder)  # asked first: PEFT writes a card of its own
        super()._save(output_dir, state_dict=state_dict)
        with open(os.path.join(folder, CONFIG_NAME), "w") as file:
            file.write(self.tokenseek.to_json())
        if own_card:
            self._write_card(folder, {})

    def create_model_card(self, *args: Any, **metadata: Any) -> None:
        """Write the card of output_dir, unless there is one of another hand.

        Args:
            metadata: of the stock `create_model_card`: model_name, license, language, tags and others, for the card's head. By
                name: the Trainers that this is mixed into have them in different orders.
        """
        if args:
            raise ConfigError("create_model_card takes named arguments only, such as model_name='...'.")
        if may_write(self.args.output_dir):
            self._write_card(self.args.output_dir, metadata)

    def _write_card(self, folder: str, metadata: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            facts = CardFacts(
                self.tokenseek,
                self.state.log_history,
                self.state.global_step,
                self._training_log.measured,
                *self.estimates,
                self.recipe,
                metadata,
            )
            write_card(folder, self._structure.outer, facts)


class TokenSeekTrainer(TokenSeekMixin, Trainer):
    """Drop-in for `transformers.Trainer`.

    ```python
    config = TokenSeekConfig(ratio=0.1)
    trainer = TokenSeekTrainer(model, args, train_dataset=data, processing_class=tokenizer, tokenseek=config)
    trainer.train()
    ```

    Args:
        tokenseek: the settings; None for the default ones.
        data_collator: default `TokenSeekCollator` with the tokenizer's padding token.
        Everything else: as for `transformers.Trainer`.

    Raises:
        ConfigError, UnsupportedModelError: at construction, before any compute, for a setting, model or combination
            that cannot work.
    """

    def __init__(
        self, model=None, args=None, data_collator=None, *rest, tokenseek: TokenSeekConfig | None = None, **kwargs
    ):
        if isinstance(model, str):
            raise ConfigError(
                f"model must be a loaded model, got {model!r}. Load it with AutoModelForCausalLM.from_pretrained."
            )
        super().__init__(model, args, data_collator, *rest, tokenseek=tokenseek, **kwargs)
        if data_collator is None:
            self.data_collator = TokenSeekCollator(
                pad_token_id=getattr(self.processing_class, "pad_token_id", None),
                padding_side=getattr(self.processing_class, "padding_side", None) or "right",
                causal=self._structure.shift,
                labels_per_row=self._structure.loss_per_row,
            )
        elif type(data_collator).__module__.startswith("transformers."):
            named = [n for n in TOKEN_COLUMNS if n in (getattr(self.train_dataset, "column_names", None) or ())]
            if named:
                raise InputError(
                    f"The data set has a {named[0]} column, which {type(data_collator).__name__} does not pad. Use "
                    "TokenSeekCollator, or leave data_collator out."
                )
