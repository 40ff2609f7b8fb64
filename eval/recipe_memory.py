"""Write what `tokenseek estimate` gives into the headers of the recipes whose models need a GPU.

python eval/recipe_memory.py            rewrite the headers (minutes)
python eval/recipe_memory.py --check    exit 1 if a header is not what the estimate gives
"""

import argparse
import re
import sys
from pathlib import Path

from tokenseek_trainer.estimate import CASES, plan_of_recipe
from tokenseek_trainer.recipe import load_recipe


RECIPES = Path(__file__).resolve().parent.parent / "recipes"
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
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
