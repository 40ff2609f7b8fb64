"""The quickstart's run under several rules, each in a process of its own; writes eval/results/quickstart.json.

make quickstart && python eval/quickstart.py --output eval/results/quickstart.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.run import SUMMARY_NAME


ROOT = Path(__file__).resolve().parent.parent
PAPER = ["--scorer", "tokenseek", "--selection", "topk", "--select_from", "all"]
RUNS = {
    "ordinary fine-tuning": ["--ratio", "1.0"],
    "default: sampled by gradient score": [],
    "random supervised tokens": ["--scorer", "random", "--selection", "topk"],
    "the paper's rule (top-k, all tokens)": PAPER,
}
KEPT = (  # times are the business of efficiency.py
    "held_out_loss_before", "held_out_loss_after", "optimizer_steps", "saved_mib", "kept_fraction", "peak_process_mib",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("settings", nargs="*", help="further settings of the recipe, after --")
    options = parser.parse_args()
    runs = []
    for name, overrides in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "tokenseek_trainer.cli",
                "train",
                str(ROOT / "recipes" / "quickstart.yaml"),
            ]
            subprocess.run([*command, *overrides, "--output_dir", folder, *options.settings], check=True, cwd=ROOT)
            summary = json.loads((Path(folder) / SUMMARY_NAME).read_text())
        runs.append({"name": name, **{key: summary[key] for key in KEPT}})
        result = {
            "benchmark": "quickstart",
            "conditions": {"train_rows": summary["train_rows"], "recipe": {**summary["recipe"], "training": None}},
            "runs": runs,
            **provenance(),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
