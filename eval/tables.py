"""Write the README's tables from result files and from the code, between their markers.

python eval/tables.py            rewrite README.md
python eval/tables.py --check    exit 1 if a table is not what the results say
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

from measured import load, where_measured
from quality_tables import classification, estimators, fidelity, quickstart

from tokenseek_trainer import TokenSeekConfig


ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
        "| | kept for the backward | | one step | | operations | seek | forward | backward | optimizer | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, case in main["cases"].items():
        operations = f"{case['operations'] / base['operations']:.0%}" if "operations" in case else ""
        parts = [case["parts_median"].get(part) for part in ("seek", "ditch forward", "backward", "optimizer")]
        lines.append(
            f"| {name} | {case['saved_bytes'] / 2**20:.0f} MiB | {case['saved_bytes'] / base['saved_bytes']:.0%} | "
            f"{case['seconds_median']:.2f} s | {case['seconds_median'] / base['seconds_median']:.0%} | {operations} | "
            + " | ".join("" if part is None else f"{part:.2f}" for part in parts)
            + f" | {main['rows'] * main['tokens'] / case['seconds_median']:.0f} |"
        )
    lines += ["", *_live_peaks(main)]
    lines += ["", "The same in other settings, bytes kept / time of a step beside the Trainer's:", ""]
    lines += ["| | " + " | ".join(METHODS[1:]) + " |", "|---|" + "---:|" * (len(METHODS) - 1)]
    for group in others:
        base = group["cases"].get("Trainer")
        if base is not None:
            cells = [_beside(group["cases"].get(name), base) for name in METHODS[1:]]
            lines.append(f"| {_group_name(group)} | " + " | ".join(cells) + " |")
    lines += ["", _distance_to_the_floor(main["cases"])]
    lines += ["", f"(`eval/efficiency.py`; {where_measured(result)}.)"]
    return "\n".join(lines)


METHODS = ("Trainer", "Trainer + checkpointing", "TokenSeek", "TokenSeek + checkpointing")


def _group_name(group: dict) -> str:
    blocks = "" if group["blocks"] is None else f", {group['blocks']} blocks"
    adapter = "" if group["adapter"] == "full" else f", {group['adapter']}"
    return f"{group['model']}{blocks}{adapter}, {group['rows']} x {group['tokens']} tokens"


def _distance_to_the_floor(cases: dict[str, dict]) -> str:
    """The measured time beside the matrix products, and where a step's time goes."""

    def share(what: str, method: str, base: str = "Trainer") -> str:
        return f"{cases[method][what] / cases[base][what]:.0%}"

    time, products, stock, both = "seconds_median", "operations", "Trainer + checkpointing", "TokenSeek"
    parts, all_parts = "TokenSeek, 30 % in 3 parts", "all tokens in 8 parts"
    spent, forward = cases[both]["parts_median"], cases["random tokens"]["parts_median"]["seek"]
    return (
        "How far from the floor: counted in matrix products (a forward of the body over all tokens, the head's forward and input "
        "gradient, everything once more for the kept tokens) a step of TokenSeek needs "
        f"{share(products, both)} of the Trainer's, one of random tokens {share(products, 'random tokens')}; "
        f"{share(time, both)} and {share(time, 'random tokens')} of its time were measured. Beside activation checkpointing it is "
        f"{share(products, both, stock)} of the products and {share(time, both, stock)} of the time. Of the {cases[both][time]:.1f} s "
        f"the forward over all tokens takes {forward:.1f}, scoring {spent['seek'] - forward:.1f} (nearly all of it the head), the kept "
        f"tokens' forward {spent['ditch forward']:.1f} and backward {spent['backward']:.1f}, the optimizer {spent['optimizer']:.1f}. "
        f"In parts more is left ({share(products, parts)} and {share(time, parts)}, with all tokens {share(products, all_parts)} and "
        f"{share(time, all_parts)}): every part writes a gradient of every weight."
    )


KINDS = ("gradients of weights", "saved", "recorded keys and values", "logits", "other")


def _live_peaks(group: dict) -> list[str]:
    """What is alive at the peak, by kind, and how much that is above the gradients, which stay."""
    lines = [
        f"Live tensors at the peak beside weights and optimizer state, MiB; above the gradients ({_gradients(group):.0f} MiB), which stay; "
        "and the same in a micro-batch after others, when all gradients are there from the start:",
        "",
        f"| | {' | '.join(KINDS)} | above the gradients | | in later micro-batches | |",
        "|---|" + "---:|" * (len(KINDS) + 4),
    ]
    base = group["cases"]["Trainer"]
    for name, case in group["cases"].items():
        kinds = [f"{case['live_peak_by_kind'].get(kind, 0) / 2**20:.0f}" for kind in KINDS]
        cells = []
        for value in (_above, lambda case: case["later_live_peak_bytes"]):
            cells += [f"{value(case) / 2**20:.0f}", f"{value(case) / value(base):.0%}"]
        lines.append(f"| {name} | {' | '.join([*kinds, *cells])} |")
    return lines


def _gradients(group: dict) -> float:
    return group["cases"]["Trainer"]["gradient_bytes"] / 2**20


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


def features() -> str:
    """What is tested and what is refused, as the tests' own parametrisation has it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_combinations import feature_matrix

    lines = ["| | TokenSeekTrainer | TokenSeekSFTTrainer |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {trainer} | {sft} |" for name, trainer, sft in feature_matrix()])


# By words of the sentence that the user sees, the first that is in it.
REFUSED_FOR = {
    "mix tokens outside attention": "layers of another kind than attention: state space, linear attention, convolution, compressed keys",
    "takes no labels": "no loss to train on",
    "takes no position_ids": "no place for positions",
    "another mask": "a mask of its own",
    "computes its loss itself": "a loss of its own",
    "twice": "blocks that run in loops",
    "shows no stack": "blocks that run in loops or in several stacks",
    "cannot be told apart": "hidden states of several streams of tokens",
    "attention interface": "attention written out, whose keys and values show nowhere",
    "attends to keys of": "tokens of its own beside the given ones",
    "The indexer of": "an indexer that chooses groups of tokens, not tokens",
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
    routed = [name for name, family in families.items() if "router loss" in family.get("errors", {})]
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
        f"| of them with the auxiliary loss of their experts' router, exact too | {len(routed)} | {', '.join(routed)} |",
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
