"""Write the README's tables from result files and from the code, between their markers.

python eval/tables.py            rewrite README.md
python eval/tables.py --check    exit 1 if a table is not what the results say
"""

import argparse
import dataclasses
import inspect
import json
import re
import statistics
import sys
from pathlib import Path

from tokenseek_trainer import TokenSeekConfig


ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
MARKER = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def where_measured(result: dict) -> str:
    hardware, versions = result["hardware"], result["versions"]
    device = hardware["device"] if hardware["device"] != "cpu" else f"{hardware['cores']} CPU cores"
    return (
        f"{device}, torch {versions['torch']}, transformers {versions['transformers']}, commit {result['commit'][:7]}"
    )


def headline() -> str:
    """One step's memory and time beside ordinary training: the main group of the efficiency benchmark."""
    result = load("efficiency.json")
    group = result["groups"][0]
    base = group["cases"]["Trainer"]
    lines = [
        f"One training step of {group['model']}'s shape, {group['tokens']} tokens, {result['conditions']['dtype']}, "
        f"{group['ratio']:.0%} of the tokens kept:",
        "",
        "| | kept for the backward | | time | |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, case in group["cases"].items():
        lines.append(
            f"| {name} | {case['saved_bytes'] / 2**20:.0f} MiB | {case['saved_bytes'] / base['saved_bytes']:.0%} | "
            f"{case['seconds_median']:.1f} s | {case['seconds_median'] / base['seconds_median']:.0%} |"
        )
    steps = base["timed_steps"]
    lines += [
        "",
        f"(`eval/efficiency.py`: activations, keys and values, logits; median of {steps} steps with AdamW, each case in a process of "
        f"its own; {where_measured(result)}.)",
    ]
    return "\n".join(lines)


def efficiency() -> str:
    """Memory and time of the main group beside ordinary training, then the other groups in short."""
    result = load("efficiency.json")
    main, *others = result["groups"]
    base = main["cases"]["Trainer"]
    lines = [
        f"{_group_name(main)}, {result['conditions']['dtype']}, AdamW:",
        "",
        "| | kept for the backward | | live peak above weights, gradients, optimizer | | one step | | seek | forward | backward | optimizer | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, case in main["cases"].items():
        peaks = [_above(case), _above(base)]
        parts = [case["parts_median"].get(part) for part in ("seek", "ditch forward", "backward", "optimizer")]
        lines.append(
            f"| {name} | {case['saved_bytes'] / 2**20:.0f} MiB | {case['saved_bytes'] / base['saved_bytes']:.0%} | "
            f"{peaks[0] / 2**20:.0f} MiB | {peaks[0] / peaks[1]:.0%} | {case['seconds_median']:.2f} s | "
            f"{case['seconds_median'] / base['seconds_median']:.0%} | "
            + " | ".join("" if part is None else f"{part:.2f}" for part in parts)
            + f" | {main['rows'] * main['tokens'] / case['seconds_median']:.0f} |"
        )
    lines += ["", "The same in other settings, bytes kept / time of a step beside the Trainer's:", ""]
    lines += ["| | " + " | ".join(METHODS[1:]) + " |", "|---|" + "---:|" * (len(METHODS) - 1)]
    for group in others:
        base = group["cases"].get("Trainer")
        if base is not None:
            cells = [_beside(group["cases"].get(name), base) for name in METHODS[1:]]
            lines.append(f"| {_group_name(group)} | " + " | ".join(cells) + " |")
    lines += ["", f"(`eval/efficiency.py`; {where_measured(result)}.)"]
    return "\n".join(lines)


METHODS = (
    "Trainer",
    "Trainer + checkpointing",
    "TokenSeek",
    "TokenSeek + checkpointing",
    "TokenSeek, 30 % in 3 parts",
)


def _group_name(group: dict) -> str:
    blocks = "" if group["blocks"] is None else f", {group['blocks']} blocks"
    adapter = "" if group["adapter"] == "full" else f", {group['adapter']}"
    return f"{group['model']}{blocks}{adapter}, {group['rows']} x {group['tokens']} tokens"


def _above(case: dict) -> int:
    """Live tensors at the peak, without the gradients that stay (weights and optimizer state are not in it)."""
    return case["live_peak_bytes"] - case["gradient_bytes"]


def _beside(case: dict | None, base: dict) -> str:
    if case is None:
        return ""
    return f"{case['saved_bytes'] / base['saved_bytes']:.0%} / {case['seconds_median'] / base['seconds_median']:.0%}"


def settings() -> str:
    """The fields of TokenSeekConfig with their defaults and the first words of their docstring."""
    text = inspect.getdoc(TokenSeekConfig).partition("Args:\n")[2].partition("\n\nRaises")[0]
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
    descriptions = {name: " ".join(description.split()) for name, description in entries}
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(TokenSeekConfig):
        default = json.dumps(field.default)
        lines.append(f"| `{field.name}` | `{default}` | {descriptions[field.name].replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


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
        accuracy, f1 = (_mean([run["metrics_after"][key] for run in members], ".3f") for key in ("accuracy", "f1"))
        loss = _mean([run["held_out_loss_after"] for run in members], ".3f")
        lines.append(f"| {name} | {accuracy} | {f1} | {loss} | {members[0]['saved_mib']:.0f} MiB |")
    lines += [
        "",
        f"(`eval/classification.py`; {where_measured(result)}. Of 240 held-out questions, so an accuracy is known to about 0.03.)",
    ]
    return "\n".join(lines)


def estimates() -> str:
    """Peak memory of a step by `tokenseek estimate`."""
    result = load("estimates.json")
    cases = list(result["rows"][0]["cases"])
    full = next(row for row in result["rows"] if row["method"] == "full" and row["tokens"] == 8192)
    base = full["cases"]["ordinary"]["peak"]
    lines = ["| | " + " | ".join(cases) + " |", "|---|" + "---:|" * len(cases)]
    for row in result["rows"]:
        same = row["model"] == full["model"] and row["tokens"] == full["tokens"]
        cells = [
            f"{case['peak'] / 2**30:.1f} GiB" + (f" ({case['peak'] / base:.0%})" if same else "")
            for case in row["cases"].values()
        ]
        lines.append(
            f"| {row['model']}, {row['method']}, {row['batch']} x {row['tokens']} | " + " | ".join(cells) + " |"
        )
    lines += [
        "",
        f"(`eval/estimates.py`: peak of a step, weights and AdamW state included, bfloat16, {result['ratio']:.0%} of the tokens "
        "kept; in brackets the share of ordinary full fine-tuning of the same model and length.)",
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
            f"{_mean([cell['held_out_loss_after'] for cell in members], '.3f')} | "
            f"{_mean([100 * share for share in shares], '.1f') + ' %' if shares else ''} | "
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


def _mean(values: list[float], digits: str) -> str:
    """Mean, and standard deviation if there are several."""
    text = f"{statistics.fmean(values):{digits}}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):{digits}}"


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


def features() -> str:
    """What is tested and what is refused, as the tests' own parametrisation has it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_combinations import feature_matrix

    lines = ["| | TokenSeekTrainer | TokenSeekSFTTrainer |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {trainer} | {sft} |" for name, trainer, sft in feature_matrix()])


# By words of the sentence that the user sees, the first that is in it.
REFUSED_FOR = {
    "mix tokens outside attention": "layers of another kind than attention: state space, linear attention, convolution, indexers",
    "takes no labels": "no loss to train on",
    "takes no position_ids": "no place for positions",
    "another mask": "a mask of its own",
    "computes its loss itself": "a loss of its own",
    "twice": "blocks that run in loops",
    "shows no stack": "blocks that run in loops or in several stacks",
    "cannot be told apart": "hidden states of several streams of tokens",
    "attention interface": "attention written out, whose keys and values show nowhere",
    "attends to keys of": "tokens of its own beside the given ones",
    "part of its tokens": "attention by hand that counts on all tokens",
}


def conformance() -> str:
    """How many causal language models of transformers are exact, and why the others are not."""
    result = load("conformance.json")
    families = result["families"]
    exact = [family for family in families.values() if family["outcome"] == "exact"]
    attention_only = [
        name for name, family in families.items() if family.get("attention_only", {}).get("outcome") == "exact"
    ]
    worst = max(family["error"] for family in (*exact, *(families[name]["attention_only"] for name in attention_only)))
    groups: dict[str, list[str]] = {}
    for name, family in families.items():
        if family["outcome"] == "refused" and name not in attention_only:
            groups.setdefault(_refused_for(family["reason"]), []).append(name)
        elif family["outcome"] not in ("exact", "refused"):
            groups.setdefault(family["outcome"], []).append(name)
    lines = [
        f"The {len(families)} families of transformers' causal-LM mapping, each as a tiny random model:",
        "",
        "| | families | |",
        "|---|---:|---|",
        f"| exact | {len(exact)} | greatest relative error of any gradient {worst:.0e} |",
        f"| exact where the config has attention layers only, refused with their other layers | {len(attention_only)} | "
        f"{', '.join(attention_only)} |",
    ]
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        kind = reason if reason in ("wrong", "not built") else f"refused: {reason}"
        lines.append(f"| {kind} | {len(names)} | {', '.join(names)} |")
    lines += ["", f"(`eval/conformance.py`; {where_measured(result)}.)"]
    return "\n".join(lines)


def selfcheck() -> str:
    """What the self-check costs beside a step."""
    result = load("selfcheck.json")
    lines = [
        "| | the self-check, once a run | one step | memory of the check, of the step's |",
        "|---|---:|---:|---:|",
    ]
    for case in result["cases"]:
        lines.append(
            f"| {case['model']}, {case['rows']} x {case['tokens']} tokens | {case['check_seconds_median']:.1f} s | "
            f"{case['step_seconds_median']:.1f} s | {case['check_live_peak_bytes'] / 2**20:.0f} MiB "
            f"({case['check_live_peak_bytes'] / case['step_live_peak_bytes']:.0%}) |"
        )
    conditions = result["conditions"]
    lines += [
        "",
        f"(`eval/selfcheck_cost.py`: {conditions['dtype']}, {conditions['optimizer']}, median of {conditions['repetitions']}; processor time, memory above "
        f"weights and optimizer state; {result['hardware']['threads']} thread, {where_measured(result)}.)",
    ]
    return "\n".join(lines)


def _refused_for(sentence: str) -> str:
    return next((reason for words, reason in REFUSED_FOR.items() if words in sentence), "the self-check")


TABLES = {
    "efficiency": efficiency,
    "conformance": conformance,
    "classification": classification,
    "estimates": estimates,
    "estimators": estimators,
    "features": features,
    "fidelity": fidelity,
    "headline": headline,
    "selfcheck": selfcheck,
    "settings": settings,
    "quickstart": quickstart,
}


def render(text: str) -> str:
    return MARKER.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = render(before)
    if options.check:
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
