"""Every shipped recipe runs: two steps, with a tiny model of the same family and a few rows of the same columns."""

import json
from pathlib import Path

import pytest
import torch

from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.run import train
from tokenseek_trainer.testing import tiny_model, tiny_tokenizer


RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
PLATYPUS = [
    {"instruction": f"w{i} w{i + 1}", "input": "w3" if i % 2 else "", "output": "w4 w5 w6", "data_source": source}
    for i in range(6)
    for source in ("tigerbot-kaggle", "airoboros")
]
OVERRIDES = [
    "--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--bf16", "false",
    "--use_cpu", "true", "--logging_steps", "1", "--eval_rows", "4", "--train_rows", "4", "--model.dtype", "float32",
    "--save_strategy", "no",
]  # fmt: skip


def tiny_of_family(name, folder):
    settings = {
        "dtype": torch.float32,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
    }
    if "minilm" in name.lower():
        model = tiny_model("bert", **settings, max_position_embeddings=512)
    elif "qwen2" in name.lower():
        import transformers

        config = tiny_model("llama", **settings).config
        fields = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
        qwen = transformers.Qwen2Config(**{f: getattr(config, f) for f in fields}, pad_token_id=0, eos_token_id=2)
        model = transformers.Qwen2ForCausalLM(qwen)
    else:
        model = tiny_model("llama", **settings)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_two_steps_of_every_recipe(path, tmp_path, monkeypatch):
    # From a folder with a Qwen2 model AutoTokenizer would read the tiny word-level vocabulary as byte pairs.
    monkeypatch.setattr("tokenseek_trainer.run.load_tokenizer", lambda recipe: tiny_tokenizer())
    recipe = load_recipe(path)
    tiny_of_family(recipe.model.name, tmp_path / "model")
    overrides = [*OVERRIDES, "--model.name", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    if "Platypus" in recipe.data.train:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in PLATYPUS))
        overrides += ["--data.train", str(rows)]
    if recipe.quantization:
        overrides += ["--quantization.bnb_4bit_compute_dtype", "float32"]
    summary = train(load_recipe(path, overrides))
    assert summary["optimizer_steps"] == 2
    assert summary["train_rows"] == 4
    assert 0 < summary["kept_fraction"] <= 1
    if recipe.evaluation.metrics:
        assert summary["metrics_after"].keys() == {"accuracy", "f1"}
    saved = tmp_path / "out" / ("adapter_model.safetensors" if recipe.peft else "model.safetensors")
    assert saved.is_file()
