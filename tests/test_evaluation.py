"""Evaluation through lm-evaluation-harness on local copies, its result files and the report."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainingArguments
from workspace import make_workspace

from tokenseek_trainer import TokenSeekTrainer
from tokenseek_trainer.cli import main
from tokenseek_trainer.errors import ConfigError, InputError
from tokenseek_trainer.evaluation import (
    SUITES,
    EvaluationCallback,
    evaluate,
    load_checkpoint,
    parse_suite,
    report,
    save_result,
)
from tokenseek_trainer.testing import tiny_model, tiny_tokenizer


SAMPLES = Path(__file__).parent.parent / "eval" / "samples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("llama", dtype=torch.float32, pad_token_id=0, eos_token_id=2, max_position_embeddings=4096)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def paper_result(checkpoint):
    return evaluate(*load_checkpoint(checkpoint), "paper", limit=2, data=SAMPLES, identity="tiny")


def test_the_papers_suite_runs_on_the_shipped_samples(paper_result):
    tasks = paper_result["tasks"]
    assert {task: entry["shots"] for task, entry in tasks.items()} == SUITES["paper"]
    assert {task: entry["metric"] for task, entry in tasks.items()} == {
        "arc_challenge": "acc_norm",
        "hellaswag": "acc_norm",
        "mmlu": "acc",
        "truthfulqa_mc2": "acc",
        "winogrande": "acc",
    }
    assert tasks["mmlu"]["questions"] == 2 * 57  # a limit counts per subject
    assert tasks["winogrande"]["questions"] == 2
    assert all(0 <= entry["value"] <= 100 and entry["version"] is not None for entry in tasks.values())
    assert all(entry["stderr"] is not None for entry in tasks.values())
    assert paper_result["average"] == pytest.approx(sum(e["value"] for e in tasks.values()) / 5)
    assert paper_result["limited"] and paper_result["limit"] == 2
    assert {"versions", "commit", "hardware", "seconds", "dtype", "device", "seed"} <= set(paper_result)


def test_a_score_is_the_one_that_the_likelihoods_give(checkpoint):
    """WinoGrande by hand: the sentence's end is likelier after the right option."""
    model, tokenizer = load_checkpoint(checkpoint)
    rows = [json.loads(line) for line in (SAMPLES / "winogrande" / "validation.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        start, end = row["sentence"].split("_")
        scores = []
        for option in (row["option1"], row["option2"]):
            context = tokenizer(start + option).input_ids
            whole = tokenizer(start + option + " " + end.strip()).input_ids
            with torch.no_grad():
                log_probabilities = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            scores.append(sum(log_probabilities[i - 1, whole[i]].item() for i in range(len(context), len(whole))))
        right += int(scores[1] > scores[0]) == int(row["answer"]) - 1
    result = evaluate(model, tokenizer, "winogrande:0", data=SAMPLES)
    assert not result["limited"]
    assert result["tasks"]["winogrande"]["questions"] == len(rows)
    share = right / len(rows)
    assert result["tasks"]["winogrande"]["value"] == pytest.approx(100 * share)
    expected = 100 * (share * (1 - share) / (len(rows) - 1)) ** 0.5
    assert result["tasks"]["winogrande"]["stderr"] == pytest.approx(expected)


def test_two_local_copies_of_a_data_set_are_not_taken_for_each_other(checkpoint, tmp_path):
    counts = []
    for n_rows in (7, 3):
        copy = tmp_path / str(n_rows) / "ai2_arc"
        shutil.copytree(SAMPLES / "ai2_arc", copy)
        test = copy / "ARC-Easy" / "test.jsonl"
        test.write_text("".join(test.read_text().splitlines(keepends=True)[:n_rows]))
        result = evaluate(*load_checkpoint(checkpoint), "arc_easy:0", data=copy.parent)
        counts.append(result["tasks"]["arc_easy"]["questions"])
    assert counts == [7, 3]


def test_the_model_comes_back_in_its_mode(checkpoint):
    model, tokenizer = load_checkpoint(checkpoint)
    model.train()
    evaluate(model, tokenizer, "winogrande:0", limit=2, data=SAMPLES)
    assert model.training


def test_no_random_number_of_the_run_is_drawn(checkpoint):
    model, tokenizer = load_checkpoint(checkpoint)

    def next_numbers():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seeded():
        random.seed(7), np.random.seed(7), torch.manual_seed(7)

    seeded()
    expected = next_numbers()
    seeded()
    evaluate(model, tokenizer, "winogrande:0", limit=2, data=SAMPLES)
    assert next_numbers() == expected


def test_an_adapter_folder_finds_its_base_and_its_tokenizer(checkpoint, tmp_path):
    import peft

    base, tokenizer = load_checkpoint(checkpoint)
    tokenizer.add_tokens(["w99"])
    base.resize_token_embeddings(len(tokenizer))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = checkpoint
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))

    loaded, own = load_checkpoint(str(tmp_path))
    assert len(own) == len(tokenizer) == loaded.get_input_embeddings().num_embeddings
    tokens = torch.tensor([[7, 8, 9]])
    torch.testing.assert_close(loaded(tokens).logits[..., :64], model.eval()(tokens).logits[..., :64])


def test_from_the_command_line(checkpoint, tmp_path, capsys):
    output = tmp_path / "out" / "result.json"
    arguments = [
        "eval",
        checkpoint,
        "--suite",
        "winogrande:0,arc_easy:2",
        "--limit",
        "3",
        "--data",
        str(SAMPLES),
        "-o",
        str(output),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["tasks"]["arc_easy"]["shots"] == 2
    assert f"{result['average']:.2f}  (limited: not a result)" in printed
    assert list(output.parent.iterdir()) == [output]  # no half-written file is left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "arc_chalenge", "--data", str(SAMPLES)], "no task 'arc_chalenge'. Did you mean 'arc_challenge'"),
        (["--suite", "papr:x"], "--suite must be paper, quick, or TASK"),
        (["--suite", "piqa", "--data", str(SAMPLES)], "No folder is known for the local copy of 'piqa'"),
        (["--suite", "gsm8k", "--data", str(SAMPLES)], "The data of 'gsm8k' are not in"),
        (["--sweet", "paper"], "Unknown argument '--sweet'"),
    ],
)
def test_mistakes_are_explained(checkpoint, capsys, arguments, message):
    assert main(["eval", checkpoint, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_result_that_cannot_be_saved_is_an_error(checkpoint, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    arguments = ["eval", checkpoint, "--suite", "winogrande:0", "--limit", "1", "--data", str(SAMPLES)]
    assert main([*arguments, "-o", str(blocked / "result.json")]) == 2
    assert "file" in capsys.readouterr().err


def test_parsing_of_suites():
    assert parse_suite("paper") == SUITES["paper"]
    assert parse_suite("arc_easy,hellaswag:10") == {"arc_easy": None, "hellaswag": 10}
    with pytest.raises(ConfigError):
        parse_suite("arc_easy:ten")


def write(tmp_path, name, result, **changes):
    save_result({**result, "model": name, **changes}, tmp_path / f"{name}.json")
    return tmp_path / f"{name}.json"


def test_a_report_shows_differences_with_their_errors(tmp_path, paper_result):
    entry = {"metric": "acc", "value": 40.0, "stderr": 3.0, "shots": 0, "questions": 100, "version": 1.0}
    first = write(tmp_path, "base", paper_result, tasks={"winogrande": entry}, average=40.0, limit=None, limited=False)
    better = {**entry, "value": 46.5, "stderr": 4.0}
    second = write(
        tmp_path, "tuned", paper_result, tasks={"winogrande": better}, average=46.5, limit=None, limited=False
    )
    table = report([first, second])
    assert "| base | 40.00 ± 3.00 | 40.00 |" in table
    assert "| tuned | 46.50 ± 4.00 (+6.50 ± 5.00) | 46.50 (+6.50) |" in table
    assert "not a result" not in table
    assert "Limited to 2 questions" in report([write(tmp_path, "limited", paper_result)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 5}, "differ in limit"),
        ({"chat_template": True}, "differ in chat template"),
        ({"tasks": {}}, "differ in tasks and shots"),
    ],
)
def test_a_report_refuses_to_mix(tmp_path, paper_result, changes, message):
    with pytest.raises(InputError, match=message):
        report([write(tmp_path, "a", paper_result), write(tmp_path, "b", paper_result, **changes)])


def test_a_report_reads_results_only(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(InputError, match="not a result of `tokenseek eval`"):
        report([other])


# In training.


def dropout_trainer(folder, tokenizer, **settings):
    model = tiny_model("llama", dtype=torch.float32, pad_token_id=0, eos_token_id=2, attention_dropout=0.5)
    rows = [{"input_ids": [7 + i, 8, 9, 10 + i, 11], "labels": [-100, 8, 9, 10 + i, 11]} for i in range(8)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, **settings,
    )  # fmt: skip
    return TokenSeekTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)


def test_evaluation_in_training_is_logged_and_saved_and_changes_nothing(tmp_path):
    tokenizer = tiny_tokenizer()
    plain = dropout_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    trainer = dropout_trainer(tmp_path / "evaluated", tokenizer)
    trainer.add_callback(EvaluationCallback(trainer, "winogrande:0", every=2, limit=3, data=SAMPLES))
    trainer.train()
    logged = {e["step"]: e["lm_eval/average"] for e in trainer.state.log_history if "lm_eval/average" in e}
    assert set(logged) == {2, 4}
    for step, average in logged.items():
        saved = json.loads((tmp_path / "evaluated" / f"eval_winogrande_0_step_{step}.json").read_text())
        assert saved["step"] == step and saved["average"] == average and saved["limited"]
    direct = evaluate(trainer.model, tokenizer, "winogrande:0", limit=3, data=SAMPLES)
    assert direct["average"] == logged[4]
    for name, weight in plain.model.state_dict().items():  # dropout drew the same numbers with and without evaluation
        assert torch.equal(weight, trainer.model.state_dict()[name])


def test_a_recipe_evaluates_at_the_end(tmp_path, capsys):
    workspace = make_workspace(tmp_path)
    settings = ["--suite", "winogrande:0", "--limit", "2", "--evaluation.data", str(SAMPLES)]
    assert main(["train", str(workspace / "recipe.yaml"), *settings]) == 0
    found = sorted(path.name for path in (workspace / "out").glob("eval_*.json"))
    assert found == ["eval_winogrande_0_step_4.json"]


def test_a_callback_that_cannot_work_is_refused_before_training(tmp_path):
    trainer = dropout_trainer(tmp_path, None)
    with pytest.raises(ConfigError, match="processing_class=tokenizer"):
        EvaluationCallback(trainer)
    trainer.processing_class = tiny_tokenizer()
    with pytest.raises(ConfigError, match="every must be an integer >= 1"):
        EvaluationCallback(trainer, every=0)
    with pytest.raises(ConfigError, match="--suite must be"):
        EvaluationCallback(trainer, "")
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="whole copy of the model"):
        EvaluationCallback(trainer)


def test_it_runs_as_a_module(checkpoint, tmp_path):
    output = tmp_path / "result.json"
    arguments = [checkpoint, "--suite", "winogrande:0", "--limit", "2", "--data", str(SAMPLES), "-o", str(output)]
    done = as_module("eval.harness", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(output.read_text())["limited"]


def test_the_command_runs_as_a_module():
    done = as_module("tokenseek_trainer", "eval", "--help")
    assert done.returncode == 0 and "--suite" in done.stdout


def as_module(*arguments):
    root = SAMPLES.parent.parent
    return subprocess.run([sys.executable, "-m", *arguments], cwd=root, capture_output=True, text=True)
