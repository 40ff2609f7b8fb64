"""`TokenSeekSFTTrainer`: TRL's SFTTrainer with token ditching."""

import numbers
from typing import Any

import torch
from torch import nn

from .collator import TOKEN_COLUMNS, check_token_indices
from .errors import InputError, UnsupportedModelError
from .losses import TokenStatistics
from .structure import inspect_model
from .trainer import TokenSeekMixin


try:
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise ImportError("TokenSeekSFTTrainer needs TRL: pip install 'tokenseek-trainer[sft]'") from error


class TokenSeekSFTTrainer(TokenSeekMixin, SFTTrainer):
    """Drop-in for `trl.SFTTrainer`: its data preparation, chat templates, packing and defaults stay.

    Its activation checkpointing (on by default) applies to the ditch pass. In evaluation the loss and the metrics are its
    own. In training it logs `num_tokens` as ever; `entropy` and `mean_token_accuracy` would be those of all supervised
    tokens, which the training step does not compute, so those of the kept ones are logged as `kept_entropy` and
    `kept_mean_token_accuracy`.

    `token_indices` and `token_scores` columns go through its column handling, and are cut with the text. They count from
    the first token of the *prepared* example, so they fit data that hold `input_ids`. Packing cannot carry them.

    Args:
        tokenseek: the settings; None for the default ones. Everything else: as for `trl.SFTTrainer`.

    Raises:
        UnsupportedModelError: a combination that cannot work; the message names it.
    """

    args: SFTConfig

    def __init__(self, *args, **kwargs):
        given = kwargs.get("train_dataset", args[3] if len(args) > 3 else None)
        # Preparation with packing drops every other column, so what was given is read here.
        self._token_columns = [name for name in TOKEN_COLUMNS if name in (getattr(given, "column_names", None) or ())]
        if getattr(kwargs.get("args", args[1] if len(args) > 1 else None), "activation_offloading", False):
            raise UnsupportedModelError(
                "activation_offloading is not supported: it would move every layer's keys and values forth and back. Use "
                "TokenSeekConfig(kv_store='cpu') with gradient_checkpointing=True."
            )
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module) and not inspect_model(model).shift:
            raise UnsupportedModelError(
                f"SFTTrainer trains causal language models, which {type(model).__name__} is not. Use TokenSeekTrainer."
            )
        super().__init__(*args, **kwargs)
        if self._token_columns:
            self.data_collator = TokenColumns(self.data_collator, self.args.max_length)

    def _refuse_combinations(self) -> None:
        super()._refuse_combinations()
        args = self.args
        if args.loss_type not in ("nll", "chunked_nll"):
            raise UnsupportedModelError(
                f"loss_type={args.loss_type!r} is not supported: the kept tokens stand for all under the cross-entropy. "
                "Use loss_type='nll'."
            )
        if getattr(self, "_is_vision_dataset", False):
            raise UnsupportedModelError("Data sets with images are not supported; TokenSeek trains on tokens.")
        if self._token_columns:
            self._refuse_for_token_columns(self._token_columns[0])

    def _refuse_for_token_columns(self, name: str) -> None:
        if self.args.packing or self.args.padding_free:
            raise UnsupportedModelError(
                f"The data set has a {name} column, which packing and padding_free cannot carry. Leave the column out "
                "(tokens are then scored at every step), or turn packing and padding_free off."
            )
        if self.args.truncation_mode != "keep_start":
            raise UnsupportedModelError(
                f"The data set has a {name} column, which counts from the first token; truncation_mode="
                f"{self.args.truncation_mode!r} would cut that off. Use truncation_mode='keep_start'."
            )

    def _statistics(self) -> TokenStatistics:
        return TokenStatistics()

    def _tokenseek_loss(self, inputs: dict[str, Any], num_items_in_batch) -> torch.Tensor:
        if self.aux_loss_enabled:
            inputs = {**inputs, "output_router_logits": True}
        loss = super()._tokenseek_loss(inputs, num_items_in_batch)
        if self._part == self.tokenseek.parts - 1:
            self._fill_metrics(inputs)
        return loss

    def _router_weight(self, num_items_in_batch) -> float | None:
        """As in SFTTrainer: the mean over the micro-batches and processes of an optimizer step."""
        steps = self._accumulation if num_items_in_batch is not None else 1
        return self.router_aux_loss_coef / steps / self._process_scale(num_items_in_batch)

    def _fill_metrics(self, inputs: dict[str, Any]) -> None:
        """What SFTTrainer.compute_loss would have put into its metrics."""
        assert self._token_statistics is not None  # _statistics has made them
        kept, gather = self._token_statistics, self.accelerator.gather_for_metrics
        device = inputs["input_ids"].device
        mask = inputs.get("attention_mask")
        n_tokens = torch.tensor(inputs["input_ids"].numel(), device=device) if mask is None else mask.sum()
        sums = [kept.entropy_sum, kept.n_correct, kept.n_positions]
        sums = gather(torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in sums])[None]).sum(0)
        metrics = self._metrics["train"]
        self._total_train_tokens += gather(n_tokens).sum().item() // self._tp_size
        metrics["num_tokens"] = [self._total_train_tokens]
        if self.aux_loss_enabled:
            assert self._session is not None  # a step is under way
            metrics["aux_loss"].append(gather(self._session.router_loss).mean().item())
        if sums[2] > 0:
            metrics["kept_entropy"].append((sums[0] / sums[2]).item())
            metrics["kept_mean_token_accuracy"].append((sums[1] / sums[2]).item())


class TokenColumns:
    """Adds the token columns of the examples to the batch that another collator makes (right padding).

    Args:
        collator: makes the batch from the other columns.
        max_length: to which SFTTrainer has cut input_ids and labels, but no other column; None: to nothing.
    """

    def __init__(self, collator, max_length: int | None):
        self.collator = collator
        self.max_length = max_length

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator([{k: v for k, v in e.items() if k not in TOKEN_COLUMNS} for e in examples])
        n = batch["input_ids"].shape[1]
        for name in TOKEN_COLUMNS:
            missing = [i for i, example in enumerate(examples) if example.get(name) is None]
            if len(missing) == len(examples):
                continue
            if missing:
                raise InputError(f"Example {missing[0]} of the batch has no {name}, others have.")
            if name == "token_scores":
                scores = [self._scores(example, i) for i, example in enumerate(examples)]
                batch[name] = torch.tensor([row + [0.0] * (n - len(row)) for row in scores])
            else:
                indices = [self._indices(example, i) for i, example in enumerate(examples)]
                width = max(1, *map(len, indices))
                batch[name] = torch.tensor([row + [-1] * (width - len(row)) for row in indices])
        return batch

    def _was_cut(self, example) -> bool:
        return self.max_length is not None and len(example["input_ids"]) >= self.max_length

    def _scores(self, example, number) -> list[float]:
        scores, length = list(example["token_scores"]), len(example["input_ids"])
        if len(scores) < length or (len(scores) > length and not self._was_cut(example)):
            raise InputError(f"token_scores of example {number} has {len(scores)} entries, input_ids {length}.")
        return scores[:length]

    def _indices(self, example, number) -> list[int]:
        indices, length = list(example["token_indices"]), len(example["input_ids"])
        if self._was_cut(example):
            indices = [i for i in indices if not isinstance(i, numbers.Integral) or i < length]
        check_token_indices(indices, length, number)
        return sorted(indices)
