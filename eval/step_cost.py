"""What one training step costs: bytes kept for the backward and seconds, TokenSeek beside ordinary training.

    python eval/step_cost.py --output eval/results/step_cost.json

The model has the shape of SmolLM2-135M with random weights (cost does not depend on their values), float32, one row of
--tokens tokens, all supervised. The cases take turns, so that a slow moment of the machine hits all of them.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.memory import SavedBytes
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession


SMOLLM2_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "Trainer": (None, False),
    "Trainer + checkpointing": (None, True),
    "TokenSeek": (TokenSeekConfig(), False),
    "TokenSeek + checkpointing": (TokenSeekConfig(), True),
    "TokenSeek, the paper's scores": (TokenSeekConfig.paper(), False),
    "random tokens": (TokenSeekConfig(scorer="random"), False),
}


def ordinary_step(model, batch) -> int:
    with SavedBytes(model) as saved:
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return saved.total


def tokenseek_step(model, batch, config, step) -> int:
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        selection = select(found.scores(instances, config, step), instances, config, step=step)
        with SavedBytes(model) as saved:
            saved.add(*session.recorded())
            loss = session.ditch(batch, instances, selection)
        loss.backward()
    return saved.total


def run_case(model, batch, name, step) -> tuple[int, float]:
    config, checkpointing = CASES[name]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    model.zero_grad()
    start = time.perf_counter()
    saved = ordinary_step(model, batch) if config is None else tokenseek_step(model, batch, config, step)
    return saved, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="measured steps per case, after one to warm up")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M, max_position_embeddings=max(options.tokens, 2048))).train()
    tokens = torch.randint(0, SMOLLM2_135M["vocab_size"], (1, options.tokens))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    saved = {}
    for step in range(options.steps + 1):
        for name in CASES:
            saved[name], elapsed = run_case(model, batch, name, step)
            if step > 0:
                seconds[name].append(elapsed)
            print(f"step {step}  {name:32} {saved[name] / 2**20:8.1f} MiB  {elapsed:6.2f} s", flush=True)
    result = {
        "benchmark": "step_cost",
        "conditions": {
            "model": SMOLLM2_135M, "dtype": "float32", "rows": 1, "tokens": options.tokens, "supervised": "all tokens",
            "ratio": 0.1, "seed": 0, "measured_steps": options.steps, "includes": "forward and backward, no optimizer",
        },
        "cases": {
            name: {"saved_bytes": saved[name], "seconds_median": statistics.median(seconds[name]), "seconds": seconds[name]}
            for name in CASES
        },
        **provenance(),
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
