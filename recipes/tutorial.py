"""A tour in one script: score a few rows, see what is kept, train at three ratios from the same start, compare.

    python recipes/tutorial.py            SmolLM2-135M on GSM8K; the model folder is made by recipes/fetch_smollm2.py
    python recipes/tutorial.py --tiny     a random model of 3 small blocks, in seconds: to see that it runs

It writes into runs/tutorial only. A few steps are too few to judge a ratio by: the README has measurements.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.data import encode_rows, load_rows
from tokenseek_trainer.inspection import inspect_tokens
from tokenseek_trainer.testing import tiny_model, tiny_tokenizer
from tokenseek_trainer.token_columns import add_token_columns


DATA = Path(__file__).parent / "data"
MODEL = "runs/models/SmolLM2-135M-Instruct"
TEMPLATES = {"prompt": "Question: {question}\nAnswer:", "completion": " {answer}"}
STEPS, BATCH = 8, 2


def load_model(tiny: bool) -> torch.nn.Module:
    """The same weights at every call."""
    if tiny:
        return tiny_model(dtype=torch.float32, pad_token_id=0, eos_token_id=2)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def load_data(tiny: bool):
    """A tokenizer, and encoded rows to train on and to hold out."""
    if tiny:
        tokenizer = tiny_tokenizer()
        texts = [
            {"question": f"w{i} w{i + 1}", "answer": " ".join(f"w{(i + j) % 20}" for j in range(25))}
            for i in range(16)
        ]
        train, heldout = texts[:12], texts[12:]
    else:
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        train = load_rows(str(DATA / "gsm8k-train.jsonl"), limit=STEPS * BATCH)
        heldout = load_rows(str(DATA / "gsm8k-heldout.jsonl"), limit=4)
    return tokenizer, *(encode_rows(rows, tokenizer, **TEMPLATES, max_length=160) for rows in (train, heldout))


def show_scores(model, tokenizer, rows, config: TokenSeekConfig) -> None:
    """Step 1: the tokens of a row with the greatest scores. A position's score is for learning the token after it."""
    scored = add_token_columns(model, rows[:1], config)[0]
    ids, scores = scored["input_ids"], torch.tensor(scored["token_scores"])
    print("1. The five positions with the greatest gradient score in the first row:")
    for position in scores.topk(5).indices.tolist():
        pair = [tokenizer.decode([token]) for token in ids[position : position + 2]]
        print(f"   {scores[position]:8.3g}  position {position:3}  {pair[0]!r}, which learns to predict {pair[-1]!r}")


def show_kept(model, tokenizer, rows, config: TokenSeekConfig) -> None:
    """Step 2: what a step would keep, in «guillemets»."""
    print("\n2. What the first training step would keep:")
    print(inspect_tokens(model, tokenizer, rows[:1], config, source="the first row").to_terminal(color=False))


def train(ratio: float, tiny: bool, tokenizer, rows, heldout) -> dict:
    """Step 3: train from the same start at this ratio, and return what is to be compared."""
    args = TrainingArguments(
        output_dir="runs/tutorial",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=1e-2 if tiny else 5e-5,
        logging_steps=STEPS,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = TokenSeekTrainer(
        model=load_model(tiny),
        args=args,
        train_dataset=rows,
        eval_dataset=heldout,
        processing_class=tokenizer,
        tokenseek=TokenSeekConfig(ratio=ratio),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "kept_fraction" in entry)
    return {**logged, "before": before, "after": trainer.evaluate()["eval_loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of 3 small blocks")
    tiny = parser.parse_args().tiny
    tokenizer, rows, heldout = load_data(tiny)
    model, config = load_model(tiny), TokenSeekConfig(ratio=0.1)
    show_scores(model, tokenizer, rows, config)
    show_kept(model, tokenizer, rows, config)

    results = {ratio: train(ratio, tiny, tokenizer, rows, heldout) for ratio in (1.0, 0.3, 0.1)}
    print(f"\n3. {STEPS} steps of {BATCH} rows, from the same start:")
    print("   ratio   kept   held-out loss before, after   MiB for the backward   seconds a step")
    for ratio, run in results.items():
        print(
            f"   {ratio:5}  {run['kept_fraction']:6.1%}   {run['before']:20.3f}, {run['after']:.3f}"
            f"   {run['saved_mib']:20.2f}   {run['step_seconds']:14.2f}"
        )


if __name__ == "__main__":
    main()
