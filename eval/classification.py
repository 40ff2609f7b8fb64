"""The recipe of the classifier under several rules, each run in a process of its own; writes eval/results/classification.json.

make classification && python eval/classification.py --output eval/results/classification.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.run import SUMMARY_NAME


ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "minilm-classification.yaml"
RUNS = {
    "all tokens": ["--ratio", "1.0"],
    "TokenSeek (default), 30 %": ["--ratio", "0.3"],
    "random tokens, 30 %": ["--ratio", "0.3", "--scorer", "random"],
    "the paper's rule, 30 %": ["--ratio", "0.3", "--scorer", "tokenseek", "--selection", "topk"],
    "the classifying token alone": ["--ratio", "0.001"],
}
KEPT = (
    "held_out_loss_before", "held_out_loss_after", "metrics_before", "metrics_after", "optimizer_steps", "saved_mib",
    "kept_fraction",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="further settings of the recipe, after --")
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        for name, overrides in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "tokenseek_trainer.cli", "train", str(RECIPE), *overrides]
                command += ["--training.seed", str(seed), "--tokenseek.seed", str(seed), "--output_dir", folder]
                subprocess.run([*command, *options.settings], check=True, cwd=ROOT)
                summary = json.loads((Path(folder) / SUMMARY_NAME).read_text())
            runs.append({"name": name, "seed": seed, **{key: summary[key] for key in KEPT}})
            conditions = {"train_rows": summary["train_rows"], "recipe": {**summary["recipe"], "tokenseek": None}}
            conditions["recipe"]["training"].pop("output_dir")
            save_result(
                {"benchmark": "classification", "conditions": conditions, "runs": runs, **provenance()}, options.output
            )


if __name__ == "__main__":
    main()
