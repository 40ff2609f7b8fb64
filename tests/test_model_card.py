"""The card of a saved model says what the run did, and never replaces a file of another hand."""

import json
import re

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments
from workspace import make_workspace

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer, model_card, run
from tokenseek_trainer.cli import main
from tokenseek_trainer.errors import ConfigError
from tokenseek_trainer.estimate import estimate
from tokenseek_trainer.memory import MIB, SavedBytes
from tokenseek_trainer.memory_plan import plan_of_recipe
from tokenseek_trainer.model_card import MARK
from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.testing import ragged_batch, tiny_model


SHORT = ["--max_steps", "2", "--save_strategy", "no", "--data.eval", "null"]


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path)


def train(workspace, *settings):
    assert main(["train", str(workspace / "recipe.yaml"), *SHORT, *settings]) == 0
    return (workspace / "out" / "README.md").read_text()


def head_of(card):
    return yaml.safe_load(card.split("---")[1])


def code_of(card, language):
    return re.search(rf"```{language}\n(.*?)```", card, re.DOTALL)[1]


def test_a_card_says_what_the_run_did_and_its_code_loads_the_model(workspace, monkeypatch):
    monkeypatch.setattr(run, "SMALL_MODEL", 0)
    card = train(workspace)
    log = json.loads((workspace / "out" / "trainer_state.json").read_text())["log_history"]
    kept = [entry["kept_fraction"] for entry in log if "kept_fraction" in entry]
    saved = [entry["saved_mib"] for entry in log if "saved_mib" in entry][-1]
    assert "| tokens kept, asked for | 40.0% |" in card
    assert f"| tokens kept, measured | {sum(kept) / len(kept):.1%} |" in card
    assert "scorer gradient, selection sample, from supervised tokens" in card
    assert "| optimizer steps | 2 |" in card
    time = r"^\| time of an optimizer step \| ([\d.e-]+) s measured; .*: ([\d.]+) times .* about ([\d.e-]+) s, estimated \|$"
    of_step, times, of_ordinary = map(float, re.search(time, card, re.MULTILINE).groups())
    assert of_ordinary == pytest.approx(times * of_step, rel=0.02)
    assert f"torch {torch.__version__}" in card and "arxiv.org/abs/2601.19739" in card

    plan = plan_of_recipe(load_recipe(workspace / "recipe.yaml"))
    measured = re.search(r"([\d.]+) MiB measured, for a micro-batch of 4 x (\d+) tokens; .*: ([\d.]+) MiB", card)
    assert float(measured[1]) == round(saved, 1)
    model = AutoModelForCausalLM.from_pretrained(workspace / "model").train()
    ids = torch.randint(3, 60, (4, int(measured[2])))
    with SavedBytes(model) as ordinary:
        model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: B018
    assert float(measured[3]) == pytest.approx(ordinary.total / MIB, abs=0.051)
    operations = [plan.estimate(case, tokens=ids.shape[1], batch=4).operations for case in ("ordinary", "TokenSeek")]
    assert times == pytest.approx(operations[0] / operations[1], abs=0.005)

    names = {}
    exec(code_of(card, "python"), names)
    assert isinstance(names["model"], LlamaForCausalLM)
    recipe = yaml.safe_load(code_of(card, "yaml"))
    assert recipe["tokenseek"]["ratio"] == 0.4 and recipe["training"]["max_steps"] == 2
    assert recipe["data"]["prompt"] == "{q}" and "peft" not in recipe
    assert head_of(card) == {"library_name": "transformers", "tags": ["tokenseek"]}


def test_an_adapter_has_a_card_of_ours_too(workspace):
    card = train(workspace, "--peft.method", "lora", "--peft.target_modules", "[q_proj]")
    assert MARK in card and "[More Information Needed]" not in card
    assert head_of(card)["library_name"] == "peft"
    names = {}
    exec(code_of(card, "python"), names)
    assert type(names["model"]).__name__.startswith("PeftModel")
    again = train(workspace, "--peft.method", "lora", "--peft.target_modules", "[q_proj]", "--max_steps", "1")
    assert "| optimizer steps | 1 |" in again  # PEFT adds to a card that is there; ours is written anew


def test_trl_writes_no_card_of_its_own(workspace):
    card = train(workspace, "--trainer", "sft", "--bf16", "false", "--save_strategy", "steps", "--save_steps", "1")
    checkpoint = (workspace / "out" / "checkpoint-1" / "README.md").read_text()
    assert MARK in card and MARK in checkpoint
    assert "| optimizer steps | 1 |" in checkpoint and "| optimizer steps | 2 |" in card


@pytest.mark.parametrize("adapter", [[], ["--peft.method", "lora", "--peft.target_modules", "[q_proj]"]])
def test_a_card_of_another_hand_is_never_replaced(workspace, adapter):
    (workspace / "out").mkdir()
    (workspace / "out" / "README.md").write_text("# Mine\n")
    card = train(workspace, *adapter)
    assert "# Mine\n" in card and MARK not in card  # PEFT puts its metadata before it, and its version after it
    if not adapter:
        assert card == "# Mine\n"


def trainer_of(folder, **settings):
    data = ragged_batch((6, 9))
    rows = [{name: data[name][row].tolist() for name in ("input_ids", "labels")} for row in range(2)]
    args = TrainingArguments(
        str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    model = tiny_model(dtype=torch.float32)
    return TokenSeekTrainer(model=model, args=args, train_dataset=rows, tokenseek=TokenSeekConfig(**settings))


def test_a_trainer_in_a_script_writes_its_settings_and_metadata(tmp_path):
    trainer = trainer_of(tmp_path / "here", ratio=0.3)
    trainer.train()
    trainer.save_model(tmp_path / "there")
    card = (tmp_path / "there" / "README.md").read_text()
    assert TokenSeekConfig(**yaml.safe_load(code_of(card, "yaml"))["tokenseek"]) == TokenSeekConfig(ratio=0.3)
    assert "\n# there\n" in card
    trainer.create_model_card(model_name="a name", license="mit", language=None)
    card = (tmp_path / "here" / "README.md").read_text()
    assert head_of(card) == {"library_name": "transformers", "tags": ["tokenseek"], "license": "mit"}
    assert "\n# a name\n" in card
    with pytest.raises(ConfigError, match="named arguments only"):
        trainer.create_model_card("en")


def test_only_the_first_process_writes_and_a_failure_leaves_the_old_card(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    trainer.create_model_card(model_name="first")
    before = (tmp_path / "README.md").read_bytes()
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card(model_name="second")
    assert (tmp_path / "README.md").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.setattr("os.replace", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.create_model_card(model_name="third")
    assert (tmp_path / "README.md").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_the_base_is_named_if_it_is_on_the_hub(tmp_path):
    model = tiny_model()
    model.config._name_or_path = "someone/something"
    card = model_card.model_card(tmp_path, model, model_card.CardFacts(TokenSeekConfig(), [], 0))
    assert head_of(card)["base_model"] == "someone/something"
    assert "[someone/something](https://huggingface.co/someone/something)" in card
    assert "measured" not in card  # nothing was


def test_the_comparison_is_with_full_fine_tuning(workspace, monkeypatch):
    """Also in a run with adapters."""
    monkeypatch.setattr(run, "SMALL_MODEL", 0)
    card = train(workspace, "--peft.method", "lora", "--peft.target_modules", "[q_proj]", "--max_steps", "1")
    rows, tokens, mib = re.search(r"of (\d+) x (\d+) tokens; .*: ([\d.]+) MiB", card).groups()
    config = AutoModelForCausalLM.from_pretrained(workspace / "model").config
    expected = estimate(config, tokens=int(tokens), batch=int(rows), dtype="fp32").saved / MIB
    assert float(mib) == pytest.approx(expected, abs=0.051)
