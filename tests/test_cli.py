"""The `tokenseek` command, from a recipe to a checkpoint, with a tiny model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import make_workspace

from tokenseek_trainer.cli import main


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path)


def test_train_writes_a_checkpoint_that_plain_transformers_loads(workspace, capsys):
    assert main(["train", str(workspace / "recipe.yaml")]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((workspace / "out" / "run_summary.json").read_text())
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
    assert f"{summary['held_out_loss_after']:.4f} after" in printed
    assert summary["optimizer_steps"] == 4
    assert 0.3 < summary["kept_fraction"] < 0.5
    assert summary["tokens_per_second"] > 0 and summary["saved_mib"] > 0
    assert summary["recipe"]["tokenseek"]["ratio"] == 0.4

    model = AutoModelForCausalLM.from_pretrained(workspace / "out")
    tokenizer = AutoTokenizer.from_pretrained(workspace / "out")
    loss = model(**(batch := tokenizer("w1 w2 w3", return_tensors="pt")), labels=batch["input_ids"]).loss
    assert loss.isfinite()


def test_resume_goes_on_from_the_last_checkpoint(workspace):
    assert main(["train", str(workspace / "recipe.yaml")]) == 0
    whole = AutoModelForCausalLM.from_pretrained(workspace / "out").state_dict()
    other = ["--output_dir", str(workspace / "other")]
    assert (
        main(["train", str(workspace / "recipe.yaml"), *other, "--max_steps", "2", "--lr_scheduler_type", "constant"])
        == 0
    )
    assert main(["train", str(workspace / "recipe.yaml"), *other, "--resume"]) == 0
    summary = json.loads((workspace / "other" / "run_summary.json").read_text())
    assert summary["optimizer_steps"] == 4
    assert set(AutoModelForCausalLM.from_pretrained(workspace / "other").state_dict()) == set(whole)


def test_score_writes_a_column_that_training_uses(workspace):
    recipe = str(workspace / "recipe.yaml")
    for column in ("token_scores", "token_indices"):
        output = workspace / f"{column}.jsonl"
        assert main(["score", recipe, "-o", str(output), "--column", column]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == 12
        if column == "token_scores":
            assert all(len(row[column]) == len(row["input_ids"]) for row in rows)
        else:
            assert all(len(row[column]) == round(0.4 * len(row["input_ids"])) for row in rows)
        assert main(["train", recipe, "--data.train", str(output), "--output_dir", str(workspace / column)]) == 0
        logs = json.loads((workspace / column / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
        assert "full_loss" not in logs[0]  # nothing was scored


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["train", "RECIPE", "--ratio", "0"], r"ratio must be a number in (0, 1], got 0"),
        (["train", "RECIPE", "--data.train", "gone.jsonl"], "gone.jsonl does not exist"),
        (["train", "RECIPE", "--resume", "--output_dir", "nothing_here"], "no checkpoint to resume from"),
        (["train", "RECIPE", "--model.dtype", "float31"], "model.dtype must be"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(workspace, capsys, arguments, message):
    arguments = [str(workspace / "recipe.yaml") if a == "RECIPE" else a for a in arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="does not exist"):
        main(["--debug", "train", "nowhere.yaml"])


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "train" in capsys.readouterr().out


def write_conversations(folder):
    for name, count in (("train", 12), ("heldout", 4)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"w{i} w{i + 1}"},
                    {"role": "assistant", "content": " ".join(f"w{(i + j) % 20}" for j in range(6))},
                ]
            }
            for i in range(count)
        ]
        (folder / f"chat-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SFT = ["--trainer", "sft", "--bf16", "false", "--data.train", "chat-train.jsonl", "--data.eval", "chat-heldout.jsonl"]
CHAT = [*SFT, "--data.prompt", "null", "--data.completion", "null"]
QLORA = ["--quantization.load_in_4bit", "true", "--peft.method", "lora", "--peft.r", "4"]


def test_conversations_train_through_sft(workspace):
    write_conversations(workspace)
    assert main(["train", str(workspace / "recipe.yaml"), *CHAT, "--training.packing", "false"]) == 0
    summary = json.loads((workspace / "out" / "run_summary.json").read_text())
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
    assert summary["recipe"]["trainer"] == "sft"
    AutoModelForCausalLM.from_pretrained(workspace / "out")


def test_templates_fill_prompts_for_sft_too(workspace):
    assert main(["train", str(workspace / "recipe.yaml"), "--trainer", "sft", "--bf16", "false"]) == 0


@pytest.mark.parametrize("adapter", [["--peft.method", "loha", "--peft.r", "4"], ["--peft.method", "dora"], QLORA])
@pytest.mark.parametrize("trainer", ["trainer", "sft"])
def test_adapters_train_from_a_recipe(workspace, trainer, adapter):
    from peft import PeftModel

    adapter = [*adapter, "--peft.target_modules", "[q_proj, down_proj]"]
    arguments = ["train", str(workspace / "recipe.yaml"), "--trainer", trainer, "--bf16", "false", *adapter]
    assert main(arguments) == 0
    summary = json.loads((workspace / "out" / "run_summary.json").read_text())
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
    base = AutoModelForCausalLM.from_pretrained(workspace / "model")
    assert PeftModel.from_pretrained(base, workspace / "out")(torch.tensor([[7, 8, 9]])).logits.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--peft.method", "lorra"],
            r"peft.method must be one of ('lora', 'dora', 'loha'), got 'lorra'. Did you mean 'lora'",
        ),
        (["--peft.method", "lora", "--peft.rank", "4"], "'peft' has no setting 'rank'"),
        (["--quantization.load_in_4bit", "true"], "Add a peft section"),
        ([*QLORA, "--quantization.nf4", "true"], "'quantization' has no setting 'nf4'"),
        (["--trainer", "sfft"], "trainer must be one of ('trainer', 'sft'), got 'sfft'"),
        (
            ["--trainer", "sft", "--training.paking", "true"],
            "'training' has no setting 'paking'. Did you mean 'packing'",
        ),
    ],
)
def test_wrong_adapters_and_trainers_are_explained(workspace, capsys, arguments, message):
    assert main(["train", str(workspace / "recipe.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data.train_rows", "-1"], 2, "data.train_rows must be an integer >= 1"),
        (["--data.max_length", "0"], 2, "data.max_length must be an integer >= 1"),
        (
            ["--data.text", "{foo", "--data.prompt", "null", "--data.completion", "null"],
            2,
            "template '{foo' is not valid",
        ),
        (["--model.dtype", "nn"], 2, "model.dtype must be"),
        (["--tokenseek", "3"], 2, "'tokenseek' is a section. Write --tokenseek.key value"),
        (["--optim", "foo"], 1, "ValueError: foo is not a valid OptimizerNames"),
        (["--peft.method", "lora", "--peft.target_modules", "[nothing]"], 1, "not found in the base model"),
    ],
)
def test_nothing_ends_in_a_traceback(workspace, capsys, arguments, code, message):
    assert main(["train", str(workspace / "recipe.yaml"), *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_settings_before_the_recipe_are_explained(capsys):
    assert main(["train", "--ratio", "0.2", "recipe.yaml"]) == 2
    assert "The recipe comes first" in capsys.readouterr().err


def test_debug_may_stand_after_the_command():
    with pytest.raises(Exception, match="does not exist"):
        main(["train", "nowhere.yaml", "--debug"])
