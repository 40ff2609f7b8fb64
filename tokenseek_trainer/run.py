"""One training run, from a recipe to a checkpoint that plain transformers loads."""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .adapters import adapter_config, check_keys, quantization_config
from .collator import TokenSeekCollator
from .data import encode_classified, encode_rows, load_rows, sft_row
from .errors import ConfigError
from .estimate import StepEstimate
from .evaluation import EvaluationCallback
from .inspect_callback import InspectCallback
from .inspect_inputs import parse_rows
from .interrupt import CheckpointOnInterrupt, Interrupted
from .memory import MIB, peak_process_bytes
from .memory_plan import case_of_recipe, plan_of_recipe
from .metrics import metrics_function
from .preflight import check_disk_space, check_output_folder, too_large
from .provenance import provenance
from .recipe import Recipe
from .trainer import TokenSeekTrainer


SUMMARY_NAME = "run_summary.json"
SMALL_MODEL = 2**26  # bytes of weights under which a comparison of memory says nothing


def load_tokenizer(recipe: Recipe):
    """The tokenizer of the recipe's model; without a padding token it pads with eos."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.name)
    except OSError as error:
        raise ConfigError(
            f"The model {recipe.model.name!r} is neither a folder with a model nor to be had from the hub "
            f"({str(error).splitlines()[0]}). Set model.name; the head of the recipe says where its model comes from."
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(recipe: Recipe):
    """The recipe's model, in its dtype, attention and quantisation; a classifier's new head is random."""
    settings = recipe.model
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype, None)
    if dtype != "auto" and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"model.dtype must be auto, float32, bfloat16 or float16, got {settings.dtype!r}.")
    kwargs: dict[str, Any] = (
        {} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}
    )
    if recipe.quantization:
        kwargs["quantization_config"] = quantization_config(recipe)
    if settings.task == "causal-lm":
        return AutoModelForCausalLM.from_pretrained(settings.name, dtype=dtype, **kwargs)
    names = dict(enumerate(map(str, recipe.data.labels or ())))
    kwargs |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    model = AutoModelForSequenceClassification.from_pretrained(settings.name, dtype=dtype, **kwargs)
    if model.config.get_text_config().pad_token_id is None:  # a decoder finds a row's last token by it
        model.config.get_text_config().pad_token_id = load_tokenizer(recipe).pad_token_id
    return model


def load_examples(recipe: Recipe, tokenizer, which: str = "train") -> Any:
    """The encoded rows of data.train or data.eval, a list of dicts; None if the recipe has no such data."""
    data = recipe.data
    source = recipe.resolve(getattr(data, which))
    if source is None:
        return None
    rows = load_rows(source, getattr(data, f"{which}_split"), getattr(data, f"{which}_rows"), data.exclude)
    if recipe.model.task == "sequence-classification":
        return encode_classified(
            rows, tokenizer, text=data.text, label=data.label, labels=data.labels or [], max_length=data.max_length
        )
    return encode_rows(
        rows,
        tokenizer,
        prompt=data.prompt,
        completion=data.completion,
        text=data.text,
        max_length=data.max_length,
        train_on_prompt=data.train_on_prompt,
    )


def train(recipe: Recipe, resume: bool = False) -> dict:
    """Train by a recipe, save the model, and return the run's summary (also written as run_summary.json).

    Args:
        resume: go on from the last checkpoint in output_dir.
    """
    checkpoint = _last_checkpoint(recipe.training["output_dir"]) if resume else None
    check_output_folder(recipe.training["output_dir"])
    adapter = adapter_config(recipe)
    build = build_sft_trainer if recipe.trainer == "sft" else _build_trainer
    code = provenance()  # as it is now: it may be another when the run ends
    trainer: Any = build(recipe, adapter)
    check_disk_space(trainer.model, recipe.training["output_dir"])
    trainer.recipe = recipe.to_dict()
    _add_benchmarks(trainer, recipe)
    _add_inspection(trainer, recipe)
    evaluates = trainer.eval_dataset is not None
    before = trainer.evaluate() if evaluates else {}
    start = time.perf_counter()
    _train(trainer, checkpoint)
    seconds = time.perf_counter() - start
    after = _last_evaluation(trainer) if evaluates else {}
    trainer.estimates = _estimates(trainer, recipe)
    trainer.save_model()
    trainer.save_state()
    return _write_summary(trainer, recipe, before, after, seconds, code)


def _train(trainer, checkpoint: str | None) -> None:
    """`trainer.train()`; Ctrl-C saves a checkpoint first, and says how to go on."""
    try:
        with CheckpointOnInterrupt() as callback:
            trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt as error:
        saved = _whole_checkpoints(trainer.args.output_dir)
        done = str(error) or f"stopped at once in step {trainer.state.global_step + 1} of {trainer.state.max_steps}."
        way = (
            f"--resume goes on from {saved[-1]}" if saved else "There is no checkpoint yet (--save_steps N makes them)"
        )
        raise Interrupted(f"{done} {way}.") from None


def _warn_if_too_large(recipe: Recipe, tokens: int | None = None) -> None:
    text = too_large(recipe, tokens)
    if text:
        print(f"tokenseek: {text}", file=sys.stderr, flush=True)


def _add_benchmarks(trainer, recipe: Recipe) -> None:
    settings = recipe.evaluation
    if settings.suite:
        trainer.add_callback(
            EvaluationCallback(
                trainer,
                settings.suite,
                every=settings.every,
                limit=settings.limit,
                data=recipe.resolve(settings.data),
                batch_size=settings.batch_size,
                apply_chat_template=settings.chat_template,
                identity=trainer.args.output_dir,
            )
        )


def _add_inspection(trainer, recipe: Recipe) -> None:
    settings = recipe.inspection
    if settings.rows:
        rows = parse_rows(settings.rows)
        trainer.add_callback(
            InspectCallback(trainer, trainer.train_dataset, rows=rows, every=settings.every, folder=settings.folder)
        )


def _build_trainer(recipe: Recipe, adapter) -> TokenSeekTrainer:
    args = TrainingArguments(**recipe.training)
    tokenizer = load_tokenizer(recipe)
    train_examples = load_examples(recipe, tokenizer, "train")
    eval_examples = load_examples(recipe, tokenizer, "eval")
    _warn_if_too_large(recipe, max(len(example["input_ids"]) for example in train_examples))
    set_seed(args.seed)  # what is new in the model, a head or an adapter, is random
    model = load_model(recipe)
    if adapter is not None:
        import peft

        if recipe.quantization:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, adapter)
    return TokenSeekTrainer(
        model=model,
        args=args,
        train_dataset=train_examples,
        eval_dataset=eval_examples,
        processing_class=tokenizer,
        data_collator=TokenSeekCollator(
            pad_token_id=tokenizer.pad_token_id,
            labels_per_row=recipe.model.task == "sequence-classification",
        ),
        compute_metrics=metrics_function(
            {str(recipe.resolve(name)): options for name, options in (recipe.evaluation.metrics or {}).items()}
        ),
        tokenseek=recipe.tokenseek,
    )


def build_sft_trainer(recipe: Recipe, adapter, given: dict[str, list[dict]] | None = None):
    """TRL's trainer for a recipe.

    Args:
        given: raw rows to take in the place of the recipe's data, by "train" and "eval". None: the recipe's.
    """
    try:
        from datasets import Dataset
        from trl import SFTConfig

        from .sft import TokenSeekSFTTrainer
    except ImportError as error:
        raise ConfigError(f"trainer: sft needs TRL ({error}): pip install 'tokenseek-trainer[sft]'") from None
    settings = {"max_length": recipe.data.max_length, **recipe.training}
    check_keys("training", settings, SFTConfig)
    data = recipe.data

    def rows(which):
        source = recipe.resolve(getattr(data, which))
        if given is None and source is not None:
            loaded = load_rows(source, getattr(data, f"{which}_split"), getattr(data, f"{which}_rows"), data.exclude)
        else:
            loaded = (given or {}).get(which)
        if loaded is None:
            return None
        return Dataset.from_list(
            [sft_row(row, prompt=data.prompt, completion=data.completion, text=data.text) for row in loaded]
        )

    train_rows = rows("train")
    _warn_if_too_large(recipe)
    return TokenSeekSFTTrainer(
        model=load_model(recipe),
        args=SFTConfig(**settings),
        train_dataset=train_rows,
        eval_dataset=rows("eval"),
        processing_class=load_tokenizer(recipe),
        peft_config=adapter,
        tokenseek=recipe.tokenseek,
    )


def _whole_checkpoints(output_dir: str) -> list[str]:
    """Folders of checkpoints by step, without those whose writing was cut short: the trainer's state is written last."""
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = sorted((int(folder.name.rsplit("-", 1)[1]), folder) for folder in folders if folder.name[-1:].isdigit())
    return [str(folder) for _, folder in numbered if _is_json(folder / "trainer_state.json")]


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _last_checkpoint(output_dir: str) -> str:
    checkpoints = _whole_checkpoints(output_dir)
    if not checkpoints:
        raise ConfigError(f"There is no checkpoint to resume from in {output_dir}.")
    return checkpoints[-1]


def _last_evaluation(trainer) -> dict:
    """Of the trained model: from the last evaluation in training if that came after the last step."""
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry and entry["step"] == trainer.state.global_step:
            return entry
    return trainer.evaluate()


def _metrics(evaluation: dict) -> dict:
    """Without the loss and the times."""
    other = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    names = {name: name.removeprefix("eval_") for name in evaluation if name.startswith("eval_")}
    return {name: evaluation[key] for key, name in names.items() if name not in other}


def _estimates(trainer, recipe: Recipe) -> tuple[StepEstimate | None, StepEstimate | None]:
    """What ordinary full fine-tuning, and the run itself, need for the micro-batch that was measured.

    None for a toy, or if not to be had.
    """
    measured = trainer._training_log.measured
    if measured is None or not trainer.is_world_process_zero():
        return None, None
    if sum(p.nbytes for p in trainer.model.parameters()) < SMALL_MODEL:
        return None, None
    try:
        own = dataclasses.replace(plan_of_recipe(recipe, tokens=measured[1]), batch=measured[0], optim="sgd")
        ordinary = dataclasses.replace(own, method="full", adapter=None)
        return ordinary.estimate("ordinary"), own.estimate(case_of_recipe(recipe))
    except Exception:  # the model is trained: nothing about its card may stop it from being saved
        return None, None


def _write_summary(trainer, recipe, before, after, seconds, code) -> dict:
    logs = [entry for entry in trainer.state.log_history if "kept_fraction" in entry]
    tokens = sum(entry["kept_tokens"] / max(entry["kept_fraction"], 1e-12) for entry in logs)
    tokens *= trainer.state.global_step / max(len(logs), 1)
    peaks = [entry["peak_memory_mib"] for entry in logs if "peak_memory_mib" in entry]
    timed = [entry["step_seconds"] for entry in logs if "step_seconds" in entry]
    summary = {
        "model": recipe.model.name,
        "train_rows": len(trainer.train_dataset),
        "optimizer_steps": trainer.state.global_step,
        "held_out_loss_before": before.get("eval_loss"),
        "held_out_loss_after": after.get("eval_loss"),
        "metrics_before": _metrics(before),
        "metrics_after": _metrics(after),
        "seconds": round(seconds, 1),
        "seconds_per_step": round(statistics.median(timed), 4) if timed else None,
        "tokens_per_second": round(tokens / seconds, 1),
        "kept_fraction": logs[-1]["kept_fraction"] if logs else None,
        "supervised_fraction": logs[-1]["supervised_fraction"] if logs else None,
        "saved_mib": max((entry["saved_mib"] for entry in logs if "saved_mib" in entry), default=None),
        "peak_device_mib": max(peaks, default=None),
        "peak_process_mib": round(peak_process_bytes() / MIB, 1),
        "checkpoint": trainer.args.output_dir,
        "recipe": recipe.to_dict(),
        "provenance": code,
    }
    if trainer.is_world_process_zero():
        path = Path(trainer.args.output_dir) / SUMMARY_NAME
        path.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    return summary


def format_summary(summary: dict) -> str:
    """The summary as a few lines for a person."""

    def show(value, digits):
        return "not measured" if value is None else f"{value:.{digits}f}"

    peak = summary["peak_device_mib"]
    device = "" if peak is None else f"device {peak:.0f} MiB, "
    lines = [
        f"held-out loss     {show(summary['held_out_loss_before'], 4)} before, {show(summary['held_out_loss_after'], 4)} after",
        *(
            f"{name:17} {summary['metrics_before'][name]:.4f} before, {value:.4f} after"
            for name, value in summary["metrics_after"].items()
        ),
        f"trained           {summary['optimizer_steps']} steps on {summary['train_rows']} rows in {summary['seconds']} s, "
        f"{summary['tokens_per_second']} tokens/s",
        f"kept              {show(summary['kept_fraction'], 3)} of the tokens, "
        f"{show(summary['supervised_fraction'], 3)} of those with a loss",
        f"saved for backward {show(summary['saved_mib'], 1)} MiB per micro-batch (activations, keys and values)",
        f"peak memory       {device}process {summary['peak_process_mib']} MiB",
        f"checkpoint        {summary['checkpoint']}",
    ]
    return "\n".join(lines)
