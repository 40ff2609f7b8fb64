"""Draw memory and time against ratio and length from eval/results/efficiency.json.

python eval/plots.py            writes eval/results/efficiency_ratio.svg and efficiency_length.svg
"""

import json
from pathlib import Path

from matplotlib.figure import Figure
from step_case import OTHER_RATIOS


RESULTS = Path(__file__).resolve().parent / "results"
METHODS = ("Trainer", "Trainer + checkpointing", "TokenSeek", "TokenSeek + checkpointing")


def main() -> None:
    groups = json.loads((RESULTS / "efficiency.json").read_text())["groups"]
    groups = [g for g in groups if g["model"] == "smollm2-135m" and g["blocks"] and g["adapter"] == "full"]
    against_ratio(groups).savefig(RESULTS / "efficiency_ratio.svg")
    against_length(groups).savefig(RESULTS / "efficiency_length.svg")


def two_axes(x: str):
    """A figure with memory on the left and time on the right."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(xlabel=x, ylabel="kept for the backward, MiB a thousand tokens")
    right.set(xlabel=x, ylabel="seconds a thousand tokens")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    return figure, left, right


def per_thousand(group: dict, case: dict) -> tuple[float, float]:
    """MiB kept and seconds, per thousand tokens."""
    thousands = group["rows"] * group["tokens"] / 1000
    return case["saved_bytes"] / 2**20 / thousands, case["seconds_median"] / thousands


def draw(left, right, points: list[tuple[float, tuple[float, float]]], **style) -> None:
    points = sorted(points)
    for axes, which in ((left, 0), (right, 1)):
        axes.plot([x for x, _ in points], [values[which] for _, values in points], marker="o", **style)
        axes.set_ylim(bottom=0)


def against_ratio(groups: list[dict]) -> Figure:
    figure, left, right = two_axes("ratio of tokens kept")
    (base,) = [g for g in groups if g["tokens"] == 1024]
    ratios = {"TokenSeek": base["ratio"], **{name: settings["ratio"] for name, (settings, _) in OTHER_RATIOS.items()}}
    points = [(ratio, per_thousand(base, base["cases"][name])) for name, ratio in ratios.items()]
    draw(left, right, points, label="TokenSeek")
    for name, line in (("Trainer", "--"), ("Trainer + checkpointing", ":")):
        for axes, value in zip((left, right), per_thousand(base, base["cases"][name]), strict=True):
            axes.axhline(value, linestyle=line, color="gray", label=name)
    left.legend(fontsize="small")
    return figure


def against_length(groups: list[dict]) -> Figure:
    figure, left, right = two_axes("tokens of a row")
    for name in METHODS:
        draw(left, right, [(g["tokens"], per_thousand(g, g["cases"][name])) for g in groups], label=name)
    left.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
