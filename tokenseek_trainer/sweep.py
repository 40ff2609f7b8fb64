"""A grid of runs from one recipe: every cell a process of its own, finished cells skipped, one table and two plots.

A folder of a sweep holds one folder per cell, with `cell.json` once it is finished, and `table.md`, `sweep.json` and the plots,
which are made anew after every cell.
"""

import functools
import itertools
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .evaluation import save_result
from .provenance import provenance
from .recipe import load_recipe, parse_overrides
from .run import SUMMARY_NAME


CELL_NAME = "cell.json"
LOG_NAME = "log.txt"
CURVE = ("step", "eval_loss", "loss", "full_loss", "step_seconds")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        group: what the cell shares with those of the other seeds, e.g. "ratio=0.1".
        seed: of training and of the token selection; None for the recipe's.
        settings: command-line settings on top of the recipe.
    """

    group: str
    seed: int | None
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the cell's folder."""
        text = self.group if self.seed is None else f"{self.group},seed={self.seed}"
        return re.sub(r"[^\w.=,+-]+", "_", text)


def grid(settings: list[str], seeds: list[int] | None = None, cases: dict[str, str] | None = None) -> list[Cell]:
    """The cells of a sweep, all settings of one seed before those of the next.

    Args:
        settings: `--key value` pairs. A value with commas and neither spaces nor brackets is an axis: `--ratio 0.1,0.2`.
        seeds: None for the recipe's own.
        cases: name to further settings ("--scorer random --selection topk"), an axis whose points set several keys.

    Raises:
        ConfigError: two cells would be the same.
    """
    fixed: list[str] = []
    axes: list[list[tuple[str, tuple[str, ...]]]] = []
    for key, text in parse_overrides(settings):
        points = text.split(",") if "," in text and not re.search(r"[\s\[\]{}]", text) else [text]
        if len(points) > 1:
            axes.append([(f"{key}={point}", (f"--{key}", point)) for point in points])
        else:
            fixed += [f"--{key}", text]
    if cases:
        axes.insert(0, [(name, tuple(shlex.split(text))) for name, text in cases.items()])
    cells = []
    for seed in seeds or (None,):
        seeding: tuple[str, ...] = (
            () if seed is None else ("--training.seed", str(seed), "--tokenseek.seed", str(seed))
        )
        for combination in itertools.product(*axes):
            group = ",".join(name for name, _ in combination) or "recipe"
            own = [argument for _, arguments in combination for argument in arguments]
            cells.append(Cell(group, seed, (*fixed, *own, *seeding)))
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"Two cells of the sweep are the same: {twice}.")
    return cells


def sweep(
    recipe: str | Path,
    cells: list[Cell],
    folder: str | Path,
    *,
    suite: str | None = None,
    evaluation: tuple[str, ...] = (),
    keep_models: bool = False,
) -> list[str]:
    """Run the cells that are not finished yet, and write the table after each.

    Args:
        recipe: path of the recipe.
        folder: where the cells go.
        suite: also run `tokenseek eval` on every trained model. None: held-out loss only.
        evaluation: further arguments of `tokenseek eval`, such as ("--limit", "100").
        keep_models: keep the trained models; they are deleted otherwise, since a grid of them fills a disk.

    Returns:
        The names of the cells that failed; their last words are printed, and all they said is in the cell's log.txt.

    Raises:
        ConfigError: the recipe or a setting is wrong (before anything runs), or the folder holds a cell of the same name
            with other settings.
    """
    folder = Path(folder)
    plans = {cell: _plan(recipe, cell, suite, evaluation) for cell in cells}  # a wrong setting is refused here
    finished = {cell: _finished(folder / cell.name, plan) for cell, plan in plans.items()}
    failed = []
    for number, (cell, plan) in enumerate(plans.items(), 1):
        progress = f"[{number}/{len(cells)}] {cell.name}"
        if finished[cell]:
            print(f"{progress}: finished before", flush=True)
            continue
        print(f"{progress}: running", flush=True)
        problem = _run_cell(recipe, cell, plan, folder / cell.name, keep_models)
        if problem:
            print(f"{progress}: failed ({folder / cell.name / LOG_NAME}): {problem}", flush=True)
            failed.append(cell.name)
            continue
        write_report(folder, cells)
    write_report(folder, cells)
    return failed


def _plan(recipe, cell, suite, evaluation) -> dict:
    """Everything that decides a cell's result, as plain data."""
    planned = load_recipe(recipe, list(cell.settings)).to_dict()
    planned.pop("inspection")  # its pages change nothing
    planned["training"] = {k: v for k, v in planned["training"].items() if k != "output_dir"}
    return json.loads(json.dumps({"recipe": planned, "suite": suite, "evaluation": list(evaluation)}, default=str))


def _finished(folder: Path, plan: dict) -> bool:
    path = folder / CELL_NAME
    if not path.is_file():
        return False
    known = json.loads(path.read_text(encoding="utf-8"))["plan"]
    if known != plan:
        different = [key for section in plan["recipe"] for key in _differences(section, known, plan)]
        raise ConfigError(
            f"{folder} holds a finished cell with other settings ({', '.join(different) or 'evaluation'}). Give the sweep "
            "another folder, or remove that one."
        )
    return True


def _differences(section: str, known: dict, plan: dict) -> list[str]:
    old, new = known["recipe"].get(section), plan["recipe"][section]
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [section]
    return [f"{section}.{key}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _run_cell(recipe, cell: Cell, plan: dict, folder: Path, keep_models: bool) -> str | None:
    """Train, evaluate, and write cell.json. Returns what went wrong, or None."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    commands = [["train", str(recipe), *cell.settings, "--output_dir", str(run)]]
    if plan["suite"] is not None:
        commands.append(
            ["eval", str(run), "--suite", plan["suite"], *plan["evaluation"], "-o", str(run / "eval.json")]
        )
    with open(folder / LOG_NAME, "w", encoding="utf-8") as log:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenseek_trainer.cli", *command], stdout=log, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            if code:
                log.flush()
                return _last_words(folder / LOG_NAME) or f"exit code {code}"
    save_result(_record(cell, plan, run), folder / CELL_NAME)
    if not keep_models:
        shutil.rmtree(run)
    return None


def _last_words(path: Path) -> str:
    """The command's own message, or whatever it said last."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("tokenseek: ")), lines[-1] if lines else "")


def _record(cell: Cell, plan: dict, run: Path) -> dict:
    summary = json.loads((run / SUMMARY_NAME).read_text(encoding="utf-8"))
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    curve = [{key: entry[key] for key in CURVE if key in entry} for entry in history]
    curve = [point for point in curve if "loss" in point or "eval_loss" in point]
    if summary["held_out_loss_before"] is not None:
        curve.insert(0, {"step": 0, "eval_loss": summary["held_out_loss_before"]})
    record = {
        "group": cell.group,
        "seed": cell.seed,
        "plan": plan,
        "summary": {k: v for k, v in summary.items() if k not in ("recipe", "checkpoint", "provenance")},
        "curve": curve,
        **summary["provenance"],  # of the run's process, as it started
    }
    if (run / "eval.json").is_file():
        record["evaluation"] = json.loads((run / "eval.json").read_text(encoding="utf-8"))
    return record


# ---- what a sweep shows ----


def read_cells(folder: Path, cells: list[Cell]) -> list[dict]:
    """The records of the cells that are finished."""
    paths = [folder / cell.name / CELL_NAME for cell in cells]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def write_report(folder: Path, cells: list[Cell]) -> None:
    """Write table.md, sweep.json and, with matplotlib installed, loss.svg and memory.svg."""
    records = read_cells(folder, cells)
    if records:
        save_result({"benchmark": "sweep", "cells": records, **provenance()}, folder / "sweep.json")
        (folder / "table.md").write_text(table(records) + "\n", encoding="utf-8")
        plots(records, folder)


def groups(records: list[dict]) -> dict[str, list[dict]]:
    """Cells that differ in the seed only, by their common name, in order."""
    found: dict[str, list[dict]] = {}
    for record in records:
        found.setdefault(record["group"], []).append(record)
    return found


def spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; None for the latter if there is one value only."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def table(records: list[dict]) -> str:
    """Mean ± standard deviation over seeds, one row per group of settings."""
    columns: list[tuple[str, Callable[[dict], Any], int]] = [
        ("held-out loss", lambda r: r["summary"]["held_out_loss_after"], 4),
        ("saved MiB", lambda r: r["summary"]["saved_mib"], 0),
        ("peak process MiB", lambda r: r["summary"]["peak_process_mib"], 0),
        ("peak device MiB", lambda r: r["summary"]["peak_device_mib"], 0),
        ("seconds per step", lambda r: r["summary"]["seconds_per_step"], 2),
    ]
    evaluated = [record["evaluation"] for record in records if "evaluation" in record]
    for task in evaluated[0]["tasks"] if evaluated else ():
        columns.append((f"{task} %", functools.partial(_score, task), 2))
    if evaluated:
        columns.append(("average %", lambda r: r.get("evaluation", {}).get("average"), 2))
    columns = [column for column in columns if any(column[1](record) is not None for record in records)]
    lines = [
        "| settings | seeds | " + " | ".join(name for name, _, _ in columns) + " |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for name, members in groups(records).items():
        cells = [_cell([of(member) for member in members], digits) for _, of, digits in columns]
        lines.append(f"| {name} | {len(members)} | " + " | ".join(cells) + " |")
    if any(evaluation["limited"] for evaluation in evaluated):
        lines += ["", f"**Evaluation limited to {evaluated[0]['limit']} questions a task: not a result.**"]
    return "\n".join(lines)


def _score(task: str, record: dict) -> float | None:
    return record.get("evaluation", {"tasks": {}})["tasks"].get(task, {}).get("value")


def _cell(values: list, digits: int) -> str:
    values = [value for value in values if value is not None]
    if not values:
        return ""
    mean, deviation = spread(values)
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def plots(records: list[dict], folder: Path) -> bool:
    """Draw loss.svg (held-out loss against step, with a band of one standard deviation) and memory.svg (score against memory).

    Returns False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    _plot(Figure, folder / "loss.svg", "optimizer step", "held-out loss", lambda axes: _draw_curves(axes, records))
    score = "average score, %" if any("evaluation" in record for record in records) else "held-out loss"
    _plot(
        Figure, folder / "memory.svg", "saved for the backward, MiB", score, lambda axes: _draw_memory(axes, records)
    )
    return True


def _plot(figure_class, path: Path, x: str, y: str, draw) -> None:
    figure = figure_class(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")
    figure.savefig(path)


def held_out_curve(members: list[dict]) -> tuple[list[int], list[list[float]]]:
    """Steps at which all members evaluated, and the losses there, one list per step."""
    curves = [{p["step"]: p["eval_loss"] for p in member["curve"] if "eval_loss" in p} for member in members]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [[curve[step] for curve in curves] for step in steps]


def _draw_curves(axes, records) -> None:
    for name, members in groups(records).items():
        steps, losses = held_out_curve(members)
        if not steps:
            continue
        spreads = [spread(values) for values in losses]
        (line,) = axes.plot(steps, [mean for mean, _ in spreads], marker=".", label=name)
        if len(members) > 1:
            low, high = ([mean + sign * (deviation or 0) for mean, deviation in spreads] for sign in (-1, 1))
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())


def _draw_memory(axes, records) -> None:
    for name, members in groups(records).items():
        memory = [member["summary"]["saved_mib"] for member in members]
        scores = [
            member["evaluation"]["average"] if "evaluation" in member else member["summary"]["held_out_loss_after"]
            for member in members
        ]
        if None in memory or None in scores:
            continue
        mean, deviation = spread(scores)
        axes.errorbar(spread(memory)[0], mean, yerr=deviation, fmt="o", capsize=3, label=name)
