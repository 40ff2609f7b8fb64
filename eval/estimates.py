"""Write what `tokenseek estimate` gives: into the headers of the recipes whose models need a GPU, and for the README's table.

python eval/estimates.py            rewrite headers and eval/results/estimates.json (minutes)
python eval/estimates.py --check    exit 1 if a header is not what the estimate gives
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.estimate import load_config
from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.memory_plan import CASES, Plan, plan_of_recipe
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.recipe import load_recipe


ROOT = Path(__file__).resolve().parent.parent
RECIPES, RESULT = ROOT / "recipes", ROOT / "eval" / "results" / "estimates.json"
SHOWN = [  # model, method, rows, tokens, autocast
    ("llama-3.2-1b", "full", 1, 2048, False),
    ("llama-3.2-1b", "full", 1, 8192, False),
    ("llama-3.2-1b", "lora", 1, 8192, False),
    ("llama-3.2-1b", "qlora", 1, 8192, True),
    ("llama-3.1-8b", "qlora", 1, 8192, True),
]
LINE = re.compile(r"^# Peak memory by `tokenseek estimate`.*\n(# .*GiB.*\n)?", re.MULTILINE)
AFTER = re.compile(r"^# Not run yet:.*\n", re.MULTILINE)


def memory_lines(path: Path) -> str:
    """The header's lines about memory."""
    plan = plan_of_recipe(load_recipe(path))
    peaks = ", ".join(f"{case} {plan.estimate(case).peak / 2**30:.1f}" for case in CASES)
    return f"# Peak memory by `tokenseek estimate`, {plan.batch} x {plan.tokens} tokens:\n# {peaks} GiB.\n"


def with_memory(text: str, lines: str) -> str:
    """The recipe's text with its lines about memory in place."""
    text = LINE.sub("", text)
    return AFTER.sub(lambda match: match[0] + lines, text, count=1)


def table() -> list[dict]:
    """Every case of every line in `SHOWN`, in bytes."""
    rows = []
    for model, method, batch, tokens, autocast in SHOWN:
        plan = Plan(load_config(model), TokenSeekConfig(), tokens, batch, method, "bf16", autocast=autocast)
        cases = {case: dataclasses.asdict(plan.estimate(case)) for case in CASES}
        rows.append(
            {"model": model, "method": method, "batch": batch, "tokens": tokens, "autocast": autocast, "cases": cases}
        )
        print(model, method, batch, "x", tokens, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("recipes", nargs="*", type=Path, help="default: all that were not run")
    options = parser.parse_args()
    stale = 0
    for path in options.recipes or sorted(RECIPES.glob("*.yaml")):
        before = path.read_text(encoding="utf-8")
        if not AFTER.search(before):
            continue
        after = with_memory(before, memory_lines(path))
        stale += after != before
        print(path.name, "stale" if after != before else "as estimated", flush=True)
        if not options.check:
            path.write_text(after, encoding="utf-8")
    if not options.check and not options.recipes:
        ratio = TokenSeekConfig().ratio
        save_result(
            {"benchmark": "estimates", "dtype": "bfloat16", "ratio": ratio, "rows": table(), **provenance()}, RESULT
        )
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
