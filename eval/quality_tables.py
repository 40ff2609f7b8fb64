"""The README's tables of what training comes to, which tables.py puts into their places."""

import json

from measured import RESULTS, load, mean, where_measured


def quickstart() -> str:
    """Held-out loss of the quickstart under several rules."""
    result = load("quickstart.json")
    runs = result["runs"]
    full = next(run for run in runs if run["name"] == "ordinary fine-tuning")
    gain = full["held_out_loss_before"] - full["held_out_loss_after"]
    lines = [
        f"The quickstart's run ({result['conditions']['train_rows']} GSM8K rows, {full['optimizer_steps']} steps, prompt "
        f"masked, one seed), held-out loss {full['held_out_loss_before']:.3f} at the start:",
        "",
        "| | held-out loss | share of ordinary fine-tuning's gain | saved per micro-batch |",
        "|---|---:|---:|---:|",
    ]
    for run in runs:
        share = (run["held_out_loss_before"] - run["held_out_loss_after"]) / gain
        lines.append(
            f"| {run['name']} | {run['held_out_loss_after']:.3f} | {share:.0%} | {run['saved_mib']:.0f} MiB |"
        )
    lines += ["", f"(`eval/quickstart.py`; {where_measured(result)}. One seed: read only the large differences.)"]
    return "\n".join(lines)


def classification() -> str:
    """Held-out loss and metrics of the classifier's recipe under several rules, mean over seeds."""
    result = load("classification.json")
    runs = result["runs"]
    before = runs[0]
    n_seeds = len({run["seed"] for run in runs})
    lines = [
        f"MiniLM-L6, {result['conditions']['train_rows']} questions, {before['optimizer_steps']} steps of "
        f"{result['conditions']['recipe']['training']['per_device_train_batch_size']}; {n_seeds} seed{'s' * (n_seeds > 1)}; before training "
        f"accuracy {before['metrics_before']['accuracy']:.3f}:",
        "",
        "| | accuracy | macro F1 | held-out loss | kept for the backward |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(run["name"] for run in runs):
        members = [run for run in runs if run["name"] == name]
        accuracy, f1 = (mean([run["metrics_after"][key] for run in members], ".3f") for key in ("accuracy", "f1"))
        loss = mean([run["held_out_loss_after"] for run in members], ".3f")
        lines.append(f"| {name} | {accuracy} | {f1} | {loss} | {members[0]['saved_mib']:.0f} MiB |")
    lines += [
        "",
        f"(`eval/classification.py`; {where_measured(result)}. Of 240 held-out questions, so an accuracy is known to about 0.03.)",
    ]
    return "\n".join(lines)


def fidelity() -> str:
    """Held-out loss of every finished study, and the share of full tuning's gain at equal steps."""
    lines = []
    for name in (
        "masked",
        "parts",
        "time",
        "budget",
        "long",
        "unmasked",
        "examples",
        "instructions",
        "lora",
        "loha",
        "qlora",
        "importance",
        "ratios",
        "rates",
        "sink",
    ):
        path = RESULTS / f"fidelity_{name}.json"
        if path.is_file():
            lines += [*_study(json.loads(path.read_text())), ""]
    return "\n".join(lines[:-1])


def _study(result: dict) -> list[str]:
    """One study as a table. Shares are of the full tuning with the same seed, in the main study if this one has none."""
    cells = result["cells"]
    full = {cell["seed"]: cell for cell in [*load("fidelity_masked.json")["cells"], *cells] if cell["group"] == "full"}
    own = any(cell["group"] == "full" for cell in cells) or result["study"] in (
        "parts",
        "time",
        "budget",
        "sink",
        "ratios",
        "importance",
    )
    turns = any(_lowest(cell)[1] < cell["held_out_loss_after"] - 0.01 for cell in cells)  # some curve rises again
    lines = [
        f"{result['about']}; held-out loss {cells[0]['held_out_loss_before']:.3f} at the start:",
        "",
        "| | seeds | steps | held-out loss | share of full tuning's gain | kept for the backward |"
        + (" lowest on the way |" if turns else ""),
        "|---|---:|---:|---:|---:|---:|" + ("---:|" if turns else ""),
    ]
    for group in dict.fromkeys(cell["group"] for cell in cells):
        members = [cell for cell in cells if cell["group"] == group]
        shares = [_share(cell, full[cell["seed"]]) for cell in members if own and cell["seed"] in full]
        lines.append(
            f"| {group} | {len(members)} | {members[0]['optimizer_steps']} | "
            f"{mean([cell['held_out_loss_after'] for cell in members], '.3f')} | "
            f"{mean([100 * share for share in shares], '.1f') + ' %' if shares else ''} | "
            f"{members[0]['saved_mib']:.0f} MiB |"
            + (f" {_lowest(members[0])[1]:.3f} at step {_lowest(members[0])[0]} |" if turns else "")
        )
    return [*lines, *_tries(cells)]


def _tries(cells: list[dict]) -> list[str]:
    """Benchmark scores of limited runs: told, but not in a table of results."""
    tries: dict[str, list[str]] = {}
    for cell in cells:
        for task, entry in cell.get("benchmarks", {}).items():
            score = f"{cell['group']} {entry['value']:.1f} ± {entry['stderr']:.1f}"
            tries.setdefault(f"{task}, {entry['shots']}-shot, the first {entry['questions']} questions", []).append(
                score
            )
    return [
        f"\n(A try, not a result: {task}: {', '.join(scores)} %; ± is the standard error.)"
        for task, scores in tries.items()
    ]


def _lowest(cell: dict) -> tuple[int, float]:
    """Step and value of the lowest held-out loss."""
    return min(cell["curve"], key=lambda point: point[1])


def _share(cell: dict, full: dict) -> float:
    start = cell["held_out_loss_before"]
    return (start - cell["held_out_loss_after"]) / (start - full["held_out_loss_after"])


def estimators() -> str:
    """Cosine and relative error of the kept tokens' gradient, per rule."""
    result = load("estimators.json")
    lines = [
        "| | cosine, one row | relative error, one row | cosine, sum of rows | norm, sum of rows |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in result["rules"].items():
        lines.append(
            f"| {name} | {found['row_cosine']:.2f} | {found['row_relative_error']:.2f} | {found['sum_cosine']:.2f} | "
            f"{found['sum_relative_norm']:.2f} |"
        )
    rows = result["conditions"]["rows"]
    return "\n".join(
        [*lines, "", f"(`eval/estimators.py`: {rows} GSM8K rows, prompt masked; {where_measured(result)}.)"]
    )
