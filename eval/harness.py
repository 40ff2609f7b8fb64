"""lm-evaluation-harness on a checkpoint or an adapter folder: the same as `tokenseek eval`.

python -m eval.harness CHECKPOINT --suite quick --data eval/samples --limit 20
"""

import sys

from tokenseek_trainer.cli import main


if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
