"""Recipes and the command-line settings that win over them."""

from pathlib import Path

import numpy as np
import pytest
from transformers import EvalPrediction

from tokenseek_trainer.adapters import adapter_config
from tokenseek_trainer.errors import ConfigError
from tokenseek_trainer.metrics import metrics_function
from tokenseek_trainer.recipe import load_recipe


RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "model: {name: m}\ndata: {train: t.jsonl}\ntokenseek: {ratio: 0.2}\ntraining: {learning_rate: 1e-5}\n"
    )
    return path


def test_numbers_in_exponent_notation_are_numbers(recipe_file):
    assert load_recipe(recipe_file).training["learning_rate"] == 1e-5
    assert load_recipe(recipe_file, ["--learning_rate", "3e-4"]).training["learning_rate"] == 3e-4
    assert load_recipe(recipe_file, ["--training.weight_decay=1E2"]).training["weight_decay"] == 100.0


def test_no_is_a_word_and_false_is_a_boolean(recipe_file):
    assert load_recipe(recipe_file, ["--save_strategy", "no"]).training["save_strategy"] == "no"
    assert load_recipe(recipe_file, ["--bf16", "False"]).training["bf16"] is False
    recipe_file.write_text(recipe_file.read_text().replace("{learning_rate: 1e-5}", "{save_strategy: no, bf16: true}"))
    assert load_recipe(recipe_file).training == {"save_strategy": "no", "bf16": True, "output_dir": "runs/my"}


def test_a_range_is_text_and_integers_are_integers(recipe_file):
    """YAML 1.1 would read 10:20 as 10 * 60 + 20."""
    recipe_file.write_text(recipe_file.read_text() + "inspection: {rows: 10:20, every: 50}\n")
    recipe = load_recipe(recipe_file, ["--training.seed", "0", "--max_steps", "1_000", "--warmup_steps", "0x10"])
    assert (recipe.inspection.rows, recipe.inspection.every) == ("10:20", 50)
    assert [recipe.training[name] for name in ("seed", "max_steps", "warmup_steps")] == [0, 1000, 16]
    assert load_recipe(recipe_file, ["--inspection.rows", "0:8"]).inspection.rows == "0:8"


def test_the_command_line_wins(recipe_file):
    recipe = load_recipe(
        recipe_file, ["--ratio", "0.5", "--data.max_length=128", "--training.seed", "3", "--bf16", "false"]
    )
    assert recipe.tokenseek.ratio == 0.5
    assert recipe.data.max_length == 128
    assert recipe.training["seed"] == 3
    assert recipe.training["bf16"] is False


def test_a_flag_without_a_value_is_true_and_dashes_are_underscores(recipe_file):
    assert (
        load_recipe(recipe_file, ["--gradient-checkpointing", "--ratio", "0.3"]).training["gradient_checkpointing"]
        is True
    )


def test_mappings_can_be_given_whole_or_by_key(recipe_file):
    whole = load_recipe(recipe_file, ["--lr_scheduler_kwargs", "{num_cycles: 2}"])
    by_key = load_recipe(recipe_file, ["--training.lr_scheduler_kwargs.num_cycles", "2"])
    assert whole.training["lr_scheduler_kwargs"] == by_key.training["lr_scheduler_kwargs"] == {"num_cycles": 2}


def test_lists_and_templates_with_braces_arrive_as_written(recipe_file):
    recipe = load_recipe(recipe_file, ["--context_layers", "[0, -1]", "--data.text", "{question}: {answer}"])
    assert recipe.tokenseek.context_layers == (0, -1)
    assert recipe.data.text == "{question}: {answer}"


def test_a_template_of_one_column_is_not_taken_for_a_mapping(recipe_file):
    assert load_recipe(recipe_file, ["--data.text", "{question}"]).data.text == "{question}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--ratoi", "0.1"], r"no setting 'ratoi'\. Did you mean 'ratio'"),
        (["--tokenseek.ratoi", "0.1"], r"'tokenseek' has no setting 'ratoi'\. Did you mean 'ratio'"),
        (["--seed", "1"], r"'seed' is ambiguous\. Write --tokenseek\.seed or --training\.seed"),
        (["--learning_rate", "fast"], r"training\.learning_rate must be float, got 'fast' \(str\)"),
        (["--max_length", "1.5"], r"data\.max_length must be int or null, got 1\.5"),
        (["--ratio", "10%"], r"ratio must be a number in \(0, 1\], got '10%'\. Write 0\.1"),
        (["ratio", "0.1"], r"Expected --key value, got 'ratio'"),
    ],
)
def test_wrong_settings_are_explained(recipe_file, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_file, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {name: m}", r"unknown section 'models'\. Did you mean 'model'"),
        ("model: {nmae: m}", r"'model' has no setting 'nmae'\. Did you mean 'name'"),
        ("model: m", r"section 'model' .* must hold keys and values"),
        ("model: {name: m}", r"needs data\.train"),
        ("data: {train: t}", r"needs model\.name"),
        ("model: {name: [", "not valid YAML"),
        ("- 1", "must hold the sections"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_missing_recipe_lists_those_nearby(tmp_path):
    (tmp_path / "there.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"does not exist\. .* holds: there\.yaml"):
        load_recipe(tmp_path / "their.yaml")


def test_data_are_looked_for_beside_the_recipe_first(recipe_file):
    recipe = load_recipe(recipe_file)
    assert recipe.resolve("t.jsonl") == "t.jsonl"
    (recipe_file.parent / "t.jsonl").write_text("{}")
    assert recipe.resolve("t.jsonl") == str(recipe_file.parent / "t.jsonl")


def test_recipes_exist():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_parses_and_says_what_it_is_for(path):
    recipe = load_recipe(path)
    assert recipe.model.name
    head = path.read_text().split("\n\n")[0]
    assert head.startswith("# ") and "tokenseek train" in head.replace("\n", " ") + path.read_text()[:400]


LAUNCH = sorted((Path(__file__).parent.parent / "recipes" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", LAUNCH, ids=lambda p: p.stem)
def test_every_launch_config_is_one_that_accelerate_reads(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert f"--config_file recipes/accelerate/{path.name}" in path.read_text()


CLASSES = ["--task", "sequence-classification", "--labels", "[no, yes]"]


def test_a_classifiers_recipe(recipe_file):
    recipe = load_recipe(
        recipe_file, [*CLASSES, "--peft.method", "lora", "--data.eval", "e", "--metrics", "{m: {average: macro}}"]
    )
    assert recipe.model.task == "sequence-classification"
    assert recipe.data.labels == ["no", "yes"]
    assert recipe.evaluation.metrics == {"m": {"average": "macro"}}
    assert adapter_config(recipe).task_type == "SEQ_CLS"
    assert adapter_config(load_recipe(recipe_file, ["--peft.method", "lora"])).task_type == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (CLASSES[:2], "data.labels must name the classes"),
        ([*CLASSES, "--trainer", "sft"], "trainer: sft trains language models"),
        ([*CLASSES, "--suite", "quick"], "evaluation.suite asks a language model"),
        (["--task", "sequence_classification"], "model.task must be one of .* Did you mean 'sequence-classification'"),
        ([*CLASSES, "--metrics", "{accuracy: {}}"], "held-out rows in data.eval"),
        (["--data.eval", "e", "--metrics", "{accuracy: {}}"], "need model.task: sequence-classification"),
    ],
)
def test_settings_of_another_task_are_refused(recipe_file, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_file, overrides)


def test_metrics_of_the_evaluate_library_load_from_a_folder():
    pytest.importorskip("evaluate")
    folder = Path(__file__).parent.parent / "recipes" / "metrics"
    compute = metrics_function({str(folder / "accuracy"): None, str(folder / "f1"): {"average": "macro"}})
    logits = np.array([[2.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]])
    found = compute(EvalPrediction(logits, np.array([0, 1, 1, 2])))
    assert found == {"accuracy": 0.75, "f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3)}
    assert metrics_function({}) is None
    with pytest.raises(ConfigError, match=r"metric 'nowhere' cannot be loaded.*Give a folder"):
        metrics_function({"nowhere": None})
