"""`tokenseek sweep`: the grid, cells that are skipped, the table and the plots."""

import json
import statistics

import pytest
from workspace import make_workspace

from tokenseek_trainer.cli import main
from tokenseek_trainer.errors import ConfigError
from tokenseek_trainer.sweep import grid, held_out_curve, table


def test_a_value_with_commas_is_an_axis_and_seeds_come_last():
    cells = grid(["--ratio", "0.1,0.2", "--max_steps", "3", "--scorer=random,gradient"], [0, 1])
    assert [cell.name for cell in cells[:4]] == [
        "ratio=0.1,scorer=random,seed=0",
        "ratio=0.1,scorer=gradient,seed=0",
        "ratio=0.2,scorer=random,seed=0",
        "ratio=0.2,scorer=gradient,seed=0",
    ]
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert cells[1].settings == (
        "--max_steps", "3", "--ratio", "0.1", "--scorer", "gradient", "--training.seed", "0", "--tokenseek.seed", "0",
    )  # fmt: skip


def test_lists_templates_and_text_with_spaces_are_no_axes():
    settings = ["--context_layers", "[0,-1]", "--prompt", "Dear {name}, hello", "--lr_scheduler_kwargs", "{a: 1,b: 2}"]
    (cell,) = grid(settings)
    assert cell.name == "recipe"
    assert list(cell.settings) == settings


def test_cases_set_several_keys_at_once():
    cells = grid(["--ratio", "0.1,0.2"], None, {"paper": "--scorer tokenseek --selection topk", "default": ""})
    assert [cell.name for cell in cells] == [
        "paper,ratio=0.1",
        "paper,ratio=0.2",
        "default,ratio=0.1",
        "default,ratio=0.2",
    ]
    assert cells[1].settings == ("--scorer", "tokenseek", "--selection", "topk", "--ratio", "0.2")


def test_the_same_cell_twice_is_refused():
    with pytest.raises(ConfigError, match=r"the same: ratio=0\.1,seed=3"):
        grid(["--ratio", "0.1,0.1"], [3])


def record(group, seed, loss, curve, saved=10.0):
    summary = {
        "held_out_loss_after": loss, "saved_mib": saved, "peak_process_mib": 100.0, "peak_device_mib": None,
        "seconds_per_step": 0.5,
    }  # fmt: skip
    return {"group": group, "seed": seed, "summary": summary, "curve": curve}


def test_the_table_has_mean_and_standard_deviation_over_seeds():
    losses = [1.0, 1.1, 1.4]
    text = table([record("a", seed, loss, []) for seed, loss in enumerate(losses)] + [record("b", 0, 2.0, [])])
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    assert f"| a | 3 | {mean:.4f} ± {deviation:.4f} | 10 ± 0 | 100 ± 0 | 0.50 ± 0.00 |" in text
    assert "| b | 1 | 2.0000 | 10 | 100 | 0.50 |" in text
    assert "device" not in text  # nothing measured there


def test_curves_hold_the_steps_that_all_seeds_share():
    first = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 5, "loss": 2.0},
        {"step": 5, "eval_loss": 2.5},
        {"step": 9, "eval_loss": 2.0},
    ]
    second = [{"step": 0, "eval_loss": 3.5}, {"step": 9, "eval_loss": 1.0}]
    assert held_out_curve([record("a", 0, 2.0, first), record("a", 1, 1.0, second)]) == (
        [0, 9],
        [[3.0, 3.5], [2.0, 1.0]],
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep of two cells."""
    tiny_workspace = make_workspace(tmp_path_factory.mktemp("workspace"))
    arguments = [
        "sweep", str(tiny_workspace / "recipe.yaml"), "-o", str(tiny_workspace / "sweep"), "--seeds", "0,1",
        "--case", "default=", "--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    return tiny_workspace / "sweep", arguments


def test_every_cell_leaves_its_numbers_and_no_model(finished):
    folder, _ = finished
    for seed in (0, 1):
        cell = json.loads((folder / f"default,seed={seed}" / "cell.json").read_text())
        assert cell["plan"]["recipe"]["training"]["seed"] == cell["plan"]["recipe"]["tokenseek"]["seed"] == seed
        assert [point["step"] for point in cell["curve"] if "eval_loss" in point] == [0, 1, 2]
        assert cell["curve"][-1]["eval_loss"] == cell["summary"]["held_out_loss_after"]
        assert cell["summary"]["seconds_per_step"] > 0
        assert {"versions", "commit", "hardware"} <= set(cell)
        assert not (folder / f"default,seed={seed}" / "run").exists()
    assert len(json.loads((folder / "sweep.json").read_text())["cells"]) == 2
    assert "| default | 2 |" in (folder / "table.md").read_text()
    for name in ("loss.svg", "memory.svg"):
        assert "<svg" in (folder / name).read_text()


def test_finished_cells_are_skipped_and_others_are_never_mixed_in(finished, capsys):
    folder, arguments = finished
    before = (folder / "default,seed=0" / "cell.json").read_bytes()
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert (folder / "default,seed=0" / "cell.json").read_bytes() == before
    assert main([*arguments, "--learning_rate", "1e-3"]) == 2
    assert "other settings (training.learning_rate)" in capsys.readouterr().err


def test_a_failed_cell_is_named_and_the_others_run(finished, capsys):
    folder, arguments = finished
    one_seed = [text if text != "0,1" else "0" for text in arguments]
    wrong = [*one_seed, "--case", "wrong=--scorer context --context_layers [7]"]
    assert main(wrong) == 1
    printed = capsys.readouterr().out
    assert "wrong,seed=0: failed" in printed and "context_layers" in printed
    assert "default,seed=0: finished before" in printed
    assert not (folder / "wrong,seed=0" / "cell.json").exists()


def test_a_wrong_setting_is_refused_before_anything_runs(finished, capsys):
    folder, arguments = finished
    assert main([*arguments, "--case", "typo=--scoer random"]) == 2
    assert "scorer" in capsys.readouterr().err
    assert not (folder / "typo,seed=0").exists()
