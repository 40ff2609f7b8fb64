"""A folder with a tiny model, data and a recipe, for tests that run commands."""

import json

import torch

from tokenseek_trainer.testing import tiny_model, tiny_tokenizer


def make_workspace(tmp_path):
    tiny_model("llama", dtype=torch.float32, pad_token_id=0, eos_token_id=2, bos_token_id=None).save_pretrained(
        tmp_path / "model"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, count in (("train", 12), ("heldout", 4)):
        rows = [
            {"q": f"w{i} w{i + 1} w{i + 2}", "a": " ".join(f"w{(i + j) % 20}" for j in range(6 + i % 3))}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(f"""
model: {{name: {tmp_path}/model}}
data: {{train: train.jsonl, eval: heldout.jsonl, prompt: "{{q}}", completion: "{{a}}"}}
tokenseek: {{ratio: 0.4}}
training:
  output_dir: {tmp_path}/out
  max_steps: 4
  learning_rate: 1e-2
  per_device_train_batch_size: 4
  logging_steps: 1
  save_steps: 2
  report_to: none
  use_cpu: true
""")
    return tmp_path
