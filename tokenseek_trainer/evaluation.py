"""Evaluate a checkpoint with lm-evaluation-harness, online or on local copies of the data, and save one JSON a run.

A task is run through a small yaml of our own that includes the harness's and sets the number of shots, and the data path
where a local copy is used. So the prompts, metrics and versions are the harness's.
"""

import contextlib
import functools
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from .errors import ConfigError, InputError, closest
from .files import write_whole
from .provenance import provenance
from .quantized import cpu_packing_off


# Tasks and shots. "paper" is what TokenSeek reports, with its average; "quick" needs a fraction of the time.
SUITES = {
    "paper": {"arc_challenge": 25, "hellaswag": 10, "mmlu": 5, "truthfulqa_mc2": 0, "winogrande": 0},
    "quick": {"arc_easy": 0, "hellaswag": 0, "truthfulqa_mc2": 0, "winogrande": 0},
}
METRICS = {"arc_challenge": "acc_norm", "arc_easy": "acc_norm", "hellaswag": "acc_norm"}  # others: acc
# Where a task's data lie in a `--data` folder.
FOLDERS = {
    "arc_challenge": "ai2_arc",
    "arc_easy": "ai2_arc",
    "hellaswag": "hellaswag",
    "mmlu": "mmlu",
    "truthfulqa_mc1": "truthful_qa",
    "truthfulqa_mc2": "truthful_qa",
    "winogrande": "winogrande",
    "gsm8k": "gsm8k",
}
PREFIX = "tokenseek_"


def parse_suite(suite: str) -> dict[str, int | None]:
    """Tasks and shots of a suite's name, or of a list such as "arc_easy,hellaswag:10" (no number: the task's own)."""
    if suite in SUITES:
        return dict(SUITES[suite])
    tasks: dict[str, int | None] = {}
    for entry in suite.split(","):
        name, _, shots = entry.strip().partition(":")
        if not name or (shots and not shots.isdigit()):
            raise ConfigError(f"--suite must be {', '.join(SUITES)}, or TASK[:SHOTS],..., got {suite!r}.")
        tasks[name] = int(shots) if shots else None
    return tasks


def evaluate(
    model,
    tokenizer,
    suite: str = "paper",
    *,
    limit: int | None = None,
    data: str | Path | None = None,
    batch_size: int = 8,
    apply_chat_template: bool = False,
    seed: int = 1234,
    identity: str | None = None,
) -> dict:
    """Run a suite on a model in memory and return the result as plain data.

    Args:
        suite: "paper", "quick", or tasks as `parse_suite` reads them.
        limit: questions per task (per subject for mmlu); None for all. A limited run is marked and never enters a table of
            results.
        data: a folder with local copies (`FOLDERS`); None loads from the hub.
        identity: what the model is called in the result; None takes its name_or_path.

    Raises:
        ConfigError: lm-eval is not installed, or a task does not exist.
        InputError: `data` lacks a task's folder.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"Evaluation needs lm-eval ({error}): pip install 'tokenseek-trainer[eval]'") from None
    tasks = parse_suite(suite)
    start = time.perf_counter()
    was_training = model.training
    model.eval()
    try:
        with tempfile.TemporaryDirectory() as folder, same_random_numbers_after(), cpu_packing_off(model):
            names = write_tasks(tasks, Path(folder), data)
            result = lm_eval.simple_evaluate(
                HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=list(names.values()),
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                limit=limit,
                apply_chat_template=apply_chat_template,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                log_samples=False,
            )
    finally:
        model.train(was_training)
    entries = {task: _entry(task, name, result) for task, name in names.items()}
    return {
        "benchmark": "lm-eval",
        "suite": suite,
        "limited": limit is not None,
        "limit": limit,
        "model": identity or getattr(model.config, "name_or_path", "") or type(model).__name__,
        "chat_template": apply_chat_template,
        "seed": seed,
        "batch_size": batch_size,
        "device": str(next(model.parameters()).device),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "data": "local copies" if data is not None else "hub",
        "tasks": entries,
        "average": sum(entry["value"] for entry in entries.values()) / len(entries),
        "seconds": round(time.perf_counter() - start, 1),
        **provenance(),
    }


@contextlib.contextmanager
def same_random_numbers_after():
    """The harness seeds the global generators; a training run around it goes on with its own numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(enabled=True):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class EvaluationCallback(TrainerCallback):
    """Runs `evaluate` in training: every so many steps and at the end.

    ```python
    trainer.add_callback(EvaluationCallback(trainer, suite="quick", limit=100, every=500))
    ```

    Every run is saved as `eval_SUITE_step_N.json` in the trainer's output folder, and its scores are logged as
    `lm_eval/TASK` and `lm_eval/average`. With several processes the first one evaluates while the others wait.

    Args:
        trainer: a transformers Trainer with a processing_class (its tokenizer).
        every: optimizer steps between evaluations; None: at the end of training only.
        Everything else: as for `evaluate`.

    Raises:
        ConfigError: the suite is unknown, the trainer has no tokenizer, or its model is split over processes (evaluate the
            saved checkpoint instead).
    """

    def __init__(self, trainer, suite: str = "quick", *, every: int | None = None, **settings):
        parse_suite(suite)
        if trainer.processing_class is None:
            raise ConfigError(
                "EvaluationCallback needs the tokenizer: build the trainer with processing_class=tokenizer."
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ConfigError(
                "EvaluationCallback needs a whole copy of the model on one process, and this run splits it. Save a checkpoint "
                "and run `tokenseek eval` on it."
            )
        if every is not None and every < 1:
            raise ConfigError(f"every must be an integer >= 1, or None for the end of training only; got {every}.")
        self.trainer, self.suite, self.every, self.settings = trainer, suite, every, settings
        self.last_step = None

    def on_step_end(self, args, state, control, **kwargs):
        if self.every is not None and state.global_step % self.every == 0:
            self._run(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        if self.last_step != state.global_step:
            self._run(args, state)

    def _run(self, args, state):
        self.last_step = state.global_step
        if state.is_world_process_zero:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            result = evaluate(model, self.trainer.processing_class, self.suite, **self.settings)
            name = re.sub(r"\W+", "_", self.suite)
            save_result(
                {**result, "step": state.global_step},
                Path(args.output_dir) / f"eval_{name}_step_{state.global_step}.json",
            )
            scores = {f"lm_eval/{task}": entry["value"] for task, entry in result["tasks"].items()}
            self.trainer.log({**scores, "lm_eval/average": result["average"]})
        self.trainer.accelerator.wait_for_everyone()


def _entry(task: str, name: str, result: dict) -> dict:
    """One task's score, in percent."""
    metric = METRICS.get(task, "acc")
    scores = result["results"][name]
    if f"{metric},none" not in scores:
        raise ConfigError(f"The task {task!r} has no metric {metric!r}; it has {', '.join(scores)}.")
    stderr = scores.get(f"{metric}_stderr,none")
    members = [sub for sub in result["n-samples"] if sub == name or sub.startswith(f"{name}_")]
    shots = {result["n-shot"][sub] for sub in members if sub in result["n-shot"]}
    return {
        "metric": metric,
        "value": 100 * scores[f"{metric},none"],
        "stderr": 100 * stderr if isinstance(stderr, (int, float)) else None,
        "shots": shots.pop() if len(shots) == 1 else None,
        "questions": sum(result["n-samples"][sub]["effective"] for sub in members),
        "version": result["versions"].get(name, next((result["versions"].get(sub) for sub in members), None)),
    }


def write_tasks(tasks: dict[str, int | None], folder: Path, data: str | Path | None) -> dict[str, str]:
    """Write a yaml per task into `folder`; returns the harness's name for each task."""
    import yaml

    index = _harness_tasks()
    names = {}
    for task, shots in tasks.items():
        if task not in index:
            raise ConfigError(f"lm-eval has no task {task!r}.{closest(task, list(index))}")
        path = _data_path(task, data)
        names[task] = f"{PREFIX}{task}"
        subjects = (
            sorted(n for n in index if n.startswith("mmlu_") and _is_mmlu_subject(index[n]))
            if task == "mmlu"
            else [task]
        )
        for subject in subjects:
            settings: dict = {"include": str(index[subject].yaml_path), "task": PREFIX + subject}
            if shots is not None:
                settings["num_fewshot"] = shots
            if path is not None:
                settings["dataset_path"] = str(path)
                # `datasets` knows a folder by its last name, so its cache would answer for another copy of the same name.
                settings["dataset_kwargs"] = {"cache_dir": str(folder / "cache")}
            if task == "mmlu":
                settings["tag"] = f"{PREFIX}mmlu_subjects"
            (folder / f"{PREFIX}{subject}.yaml").write_text(yaml.safe_dump(settings))
        if task == "mmlu":
            group = {
                "group": names[task],
                "task": [PREFIX + subject for subject in subjects],
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
                "metadata": {"version": 2},
            }
            (folder / f"{PREFIX}mmlu_group.yaml").write_text(yaml.safe_dump(group))
    return names


@functools.cache
def _harness_tasks() -> dict:
    """The harness's own tasks by name; reading its thousands of files takes seconds."""
    from lm_eval.tasks import TaskManager

    return dict(TaskManager().task_index)


def _is_mmlu_subject(entry) -> bool:
    """The 57 subjects in the harness's default form, not its groups or variants."""
    path = entry.yaml_path
    return path is not None and path.parent.name == "default" and not path.name.startswith("_")


def _data_path(task: str, data: str | Path | None) -> Path | None:
    if data is None:
        return None
    if task not in FOLDERS:
        raise InputError(f"No folder is known for the local copy of {task!r}. Known tasks: {', '.join(FOLDERS)}.")
    path = Path(data).resolve() / FOLDERS[task]
    if not path.is_dir():
        raise InputError(f"The data of {task!r} are not in {path}.")
    return path


def load_checkpoint(folder: str, dtype: str = "auto"):
    """Load a model and its tokenizer from a full checkpoint, or from an adapter folder (the base is found in its config).

    The tokenizer is the folder's own if it has one; embeddings are resized if it is larger than the model's vocabulary.
    """
    from transformers import AutoModelForCausalLM

    weights: Any = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if weights != "auto" and not isinstance(weights, torch.dtype):
        raise ConfigError(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}.")
    source = _base_of(folder)
    tokenizer = checkpoint_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=weights)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    if source != folder:
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def checkpoint_tokenizer(folder: str):
    """The tokenizer of a checkpoint: its own, or that of an adapter's base."""
    from transformers import AutoTokenizer

    own = any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return AutoTokenizer.from_pretrained(folder if own else _base_of(folder))


def _base_of(folder: str) -> str:
    """The model that an adapter folder belongs to; of any other checkpoint itself."""
    adapter = Path(folder) / "adapter_config.json"
    return json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else folder


def save_result(result: dict, path: str | Path) -> None:
    """Write a result so that a reader sees all of it or nothing."""
    write_whole(path, json.dumps(result, indent=2) + "\n")


def report(paths: list[str | Path]) -> str:
    """A Markdown table over result files, with each model's difference to the first and its standard error.

    Raises:
        InputError: results with different tasks, shots, limits or chat-template flags, which must not be compared.
    """
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    _refuse_mixed(paths, results)
    first, tasks = results[0], list(results[0]["tasks"])
    shots = {task: first["tasks"][task]["shots"] for task in tasks}
    lines = [
        "| model | " + " | ".join(f"{task} ({shots[task]}-shot)" for task in tasks) + " | average |",
        "|---|" + "---:|" * (len(tasks) + 1),
    ]
    for result in results:
        cells = [_cell(result["tasks"][task], None if result is first else first["tasks"][task]) for task in tasks]
        average = f"{result['average']:.2f}"
        if result is not first:
            average += f" ({result['average'] - first['average']:+.2f})"
        lines.append(f"| {result['model']} | " + " | ".join([*cells, average]) + " |")
    note = "score in percent ± standard error; in brackets the difference to the first row ± its standard error"
    limited = f" **Limited to {first['limit']} questions a task: not a result.**" if first["limited"] else ""
    return "\n".join([*lines, "", f"({note}.{limited})"])


def _cell(entry: dict, base: dict | None) -> str:
    def with_error(value, error, sign=""):
        return f"{value:{sign}.2f}" + (f" ± {error:.2f}" if error is not None else "")

    text = with_error(entry["value"], entry["stderr"])
    if base is None:
        return text
    errors = (entry["stderr"], base["stderr"])
    error = None if None in errors else (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    return f"{text} ({with_error(entry['value'] - base['value'], error, '+')})"


def _refuse_mixed(paths, results) -> None:
    for path, result in zip(paths, results, strict=True):
        if result.get("benchmark") != "lm-eval":
            raise InputError(f"{path} is not a result of `tokenseek eval`.")
    for name, of in (
        ("tasks and shots", lambda r: {task: entry["shots"] for task, entry in r["tasks"].items()}),
        ("limit", lambda r: r["limit"]),
        ("chat template", lambda r: r["chat_template"]),
        ("task versions", lambda r: {task: entry["version"] for task, entry in r["tasks"].items()}),
    ):
        for path, result in zip(paths, results, strict=True):
            if of(result) != of(results[0]):
                raise InputError(
                    f"{paths[0]} and {path} differ in {name} ({of(results[0])} and {of(result)}), so they cannot stand in one table."
                )
