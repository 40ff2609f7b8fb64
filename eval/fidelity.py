"""Does a model trained on a tenth of its tokens come out as good? Learning curves of SmolLM2-135M under selection rules.

    python eval/fidelity.py masked rates         run what is missing of these studies (hours for all), write their results
    python eval/fidelity.py lora --cases full default --seeds 0
    python eval/fidelity.py --list               what there is

Each study is a sweep (`tokenseek sweep`) over a recipe in eval/fidelity: one process at a time, float32, finished cells skipped.
A study's results hold every cell ever finished; a cell that is run again replaces its former figures.
Needs the model of the quickstart (`make runs/models/SmolLM2-135M-Instruct/config.json`).
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.sweep import grid, read_cells, sweep


HERE = Path(__file__).resolve().parent
RANDOM = "--scorer random --selection topk --select_from all"
PAPER = "--scorer tokenseek --selection topk --select_from all"
MAIN = {"full": "--ratio 1.0", "default": "", "random": RANDOM, "paper": PAPER}
THREE_PARTS = {"ratio 0.3 in 3 parts": "--ratio 0.3 --parts 3"}
BEST = {"full": "--ratio 1.0", "default": "", **THREE_PARTS, "random": RANDOM}
LORA = "--peft.method lora --peft.r 8 --peft.lora_alpha 16 --peft.target_modules all-linear"

LOHA = "--peft.method loha --peft.r 8 --peft.alpha 16 --peft.target_modules all-linear"
QLORA = f"{LORA} --quantization.load_in_4bit true --quantization.bnb_4bit_quant_type nf4"


@dataclass(frozen=True)
class Study:
    """A sweep: `settings` for all cells, `cases` for the points, and what a reader should know."""

    about: str
    cases: dict[str, str]
    recipe: str = "gsm8k"
    settings: str = "--learning_rate 1e-4"
    seeds: tuple[int, ...] = (0, 1, 2)
    suite: str | None = None
    evaluation: tuple[str, ...] = field(default=())

    def cells(self):
        return grid(self.settings.split(), list(self.seeds), self.cases)


STUDIES = {
    "masked": Study("GSM8K, prompt masked", MAIN),
    "time": Study(
        "GSM8K, prompt masked: more steps, as many as fit into full tuning's time",
        {
            "default, twice the steps": "--num_train_epochs 2",
            "default, twice the steps, scores reused": "--num_train_epochs 2 --reuse_scores true --eval_steps 75",
            "ratio 0.3 in 3 parts, half again the steps": "--ratio 0.3 --parts 3 --num_train_epochs 1.5 --eval_steps 38",
        },
    ),
    "parts": Study("GSM8K, prompt masked: more tokens, in parts of a tenth", THREE_PARTS),
    "long": Study(
        "GSM8K, prompt masked, three epochs",
        {**MAIN, **THREE_PARTS},
        settings="--learning_rate 1e-4 --num_train_epochs 3",
        seeds=(0,),
    ),
    "rates": Study(
        "GSM8K, prompt masked: learning rates",
        {
            f"{name} {rate}": f"{settings} --learning_rate {rate}"
            for rate in ("5e-5", "1e-4", "2e-4")
            for name, settings in (("full", "--ratio 1.0"), ("default", ""))
        },
        settings="",
        seeds=(0,),
    ),
    "ratios": Study(
        "GSM8K, prompt masked: how many tokens are kept",
        {
            # 0.3 is the study "parts": parts change the memory, not the gradient
            **{f"ratio {ratio}": f"--ratio {ratio}" for ratio in (0.05, 0.2)},
            "all answers, prompts constant": "--ratio 0.999",  # what is lost by cutting the paths through the prompt
        },
        seeds=(0,),
    ),
    "budget": Study(
        "GSM8K, prompt masked: full tuning in the memory of a tenth",
        {
            "full, checkpointing, micro-batches of 2": "--ratio 1.0 --gradient_checkpointing true "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
        },
        seeds=(0,),
    ),
    "unmasked": Study(
        "GSM8K, all tokens supervised", MAIN, settings="--learning_rate 1e-4 --train_on_prompt true", seeds=(0, 1)
    ),
    "instructions": Study(
        "instructions of mixed sources, prompt masked",
        {**MAIN, **THREE_PARTS},
        recipe="instructions",
        seeds=(0, 1),
        suite="arc_easy:0",
        evaluation=("--limit", "200"),
    ),
    "examples": Study(
        "GSM8K behind six worked examples, prompt masked",
        {**MAIN, "default, twice the steps": "--num_train_epochs 1 --eval_steps 50"},
        recipe="gsm8k_examples",
        seeds=(0,),
    ),
    "importance": Study(
        "GSM8K, prompt masked: what tokens are drawn by",
        {
            "gradient, not uniform": "--uniform_share 0",
            "gradient, half uniform": "--uniform_share 0.5",
            "context": "--scorer context",
            "the paper's sum": "--scorer tokenseek",
            "uniform": "--scorer random",
            "gradient, all tokens": "--select_from all",
        },
        seeds=(0,),
    ),
    "lora": Study("GSM8K, LoRA of rank 8", BEST, settings=f"--learning_rate 4e-4 {LORA}", seeds=(0,)),
    "loha": Study("GSM8K, LoHa of rank 8", BEST, settings=f"--learning_rate 1e-3 {LOHA}", seeds=(0,)),
    "qlora": Study(
        "GSM8K, LoRA of rank 8 on 4-bit weights", BEST, settings=f"--learning_rate 4e-4 {QLORA}", seeds=(0,)
    ),
}


def compact(cell: dict) -> dict:
    """What the tables need of a cell."""
    kept = (
        "optimizer_steps",
        "held_out_loss_before",
        "held_out_loss_after",
        "saved_mib",
        "kept_fraction",
        "seconds_per_step",
    )
    curve = [point for point in cell["curve"] if "eval_loss" in point]
    evaluated = cell["evaluation"]["tasks"] if "evaluation" in cell else {}
    return {
        "group": cell["group"],
        "seed": cell["seed"],
        **{key: cell["summary"][key] for key in kept},
        "curve": [[point["step"], point["eval_loss"]] for point in curve],
        "learning_rate": cell["plan"]["recipe"]["training"]["learning_rate"],
        "threads": cell["hardware"]["threads"],
        "commit": cell["commit"],
        "benchmarks": {task: {**entry, "limit": cell["evaluation"]["limit"]} for task, entry in evaluated.items()},
    }


def collect(name: str, study: Study, cells: list[dict]) -> None:
    """Write the results of finished cells, among those that are written already."""
    path = HERE / "results" / f"fidelity_{name}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else []
    merged = {(cell["group"], cell["seed"]): cell for cell in [*known, *map(compact, cells)]}
    order = {(cell.group, cell.seed): place for place, cell in enumerate(study.cells())}
    result = {
        "benchmark": "fidelity",
        "study": name,
        "about": study.about,
        "cells": [merged[key] for key in sorted(merged.keys() & order.keys(), key=order.__getitem__)],
    }
    save_result({**result, "versions": cells[0]["versions"], "hardware": cells[0]["hardware"]}, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY", default=[])
    parser.add_argument("--folder", type=Path, default=Path("runs/fidelity"), help="where the cells go")
    parser.add_argument(
        "--data", help="local copies of the benchmarks that a study evaluates on (default: from the hub)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="only cells of these seeds")
    parser.add_argument("--cases", nargs="+", help="only cells of these cases")
    parser.add_argument("--collect", action="store_true", help="run nothing, write the results of the finished cells")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or not options.studies:
        print("\n".join(f"{name:14} {len(study.cells()):3} cells   {study.about}" for name, study in STUDIES.items()))
        return 0
    failed = []
    for name in options.studies:
        study = STUDIES[name]
        folder = options.folder / name
        chosen = [
            cell
            for cell in study.cells()
            if (not options.seeds or cell.seed in options.seeds) and (not options.cases or cell.group in options.cases)
        ]
        if not chosen:
            parser.error(f"no such cell in {name}: its cases are {', '.join(study.cases)}; seeds {study.seeds}")
        if not options.collect:
            failed += sweep(
                HERE / "fidelity" / f"{study.recipe}.yaml",
                chosen,
                folder,
                suite=study.suite,
                evaluation=(*study.evaluation, *(("--data", options.data) if study.suite and options.data else ())),
            )
        cells = read_cells(folder, study.cells())
        if cells:
            collect(name, study, cells)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
