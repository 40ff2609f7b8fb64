"""The scripts of eval/ at toy sizes: they run, and what they count is what there is."""

import json
import multiprocessing
import runpy
import sys
import time
from pathlib import Path

import efficiency
import pytest
import torch
from workspace import make_workspace

from tokenseek_trainer.estimate import load_config
from tokenseek_trainer.memory_plan import Plan
from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.sweep import CELL_NAME


EVAL = Path(__file__).parent.parent / "eval"


def script(name):
    return runpy.run_path(str(EVAL / f"{name}.py"))


def run_main(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EVAL / f"{name}.py"), run_name="__main__")


def measured(group, method, steps=1):
    case = script("step_case")["Case"](group, method, "cpu", torch.float32)
    case.count()
    for number in range(steps):
        case.step(number)
    return case.result()


@pytest.mark.parametrize("method", ["Trainer", "TokenSeek", "TokenSeek + checkpointing"])
def test_efficiency_counts_what_the_estimate_gives(method):
    benchmark = script("step_case")
    group = {"model": "smollm2-135m", "blocks": 2, "rows": 2, "tokens": 64, "ratio": 0.25, "adapter": "full"}
    result = measured(group, method, steps=2)
    settings, checkpointing = benchmark["METHODS"][method]
    tokenseek = benchmark["TokenSeekConfig"](**{"ratio": 0.25, **(settings or {})})
    plan = Plan(load_config("smollm2-135m"), tokenseek, 64, 2, dtype="fp32")
    plan.config.num_hidden_layers = 2
    case = ("ordinary" if settings is None else "TokenSeek") + (" + checkpointing" if checkpointing else "")
    expected = plan.estimate(case)
    assert result["saved_bytes"] == pytest.approx(expected.saved, rel=0.05)
    assert result["parameter_bytes"] == pytest.approx(expected.parameters, rel=1e-4)
    assert result["gradient_bytes"] == expected.gradients
    assert result["optimizer_bytes"] == pytest.approx(expected.optimizer, rel=1e-4)
    assert result["live_peak_bytes"] == pytest.approx(
        expected.peak - expected.parameters - expected.optimizer, rel=0.1
    )
    parts = set(result["seconds"])
    assert parts == {"ditch forward", "backward", "optimizer"} | ({"seek"} if settings is not None else set())
    assert all(len(values) == 2 and min(values) > 0 for values in result["seconds"].values())


def test_the_sft_baseline_holds_no_logits():
    group = {"model": "smollm2-135m", "blocks": 1, "rows": 1, "tokens": 64, "ratio": 0.25, "adapter": "full"}
    saved = {method: measured(group, method)["saved_bytes"] for method in ("SFTTrainer", "Trainer + checkpointing")}
    logits = 64 * 49152 * 4
    assert saved["Trainer + checkpointing"] - saved["SFTTrainer"] >= logits * 0.9


def test_the_plots_are_drawn_from_the_results():
    pytest.importorskip("matplotlib")
    plots, groups = script("plots"), json.loads((EVAL / "results" / "efficiency.json").read_text())["groups"]
    small = [g for g in groups if g["model"] == "smollm2-135m" and g["blocks"] and g["adapter"] == "full"]
    memory, _ = plots["against_ratio"](small).axes
    assert list(memory.lines[0].get_xdata()) == [0.05, 0.1, 0.2, 0.5, 0.999] and len(memory.lines) == 3
    kept = list(memory.lines[0].get_ydata())
    assert kept == sorted(kept) and kept[-1] > kept[0] > 0
    assert [len(line.get_xdata()) for line in plots["against_length"](small).axes[1].lines] == [3] * 4


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_efficiency_measures_adapters(adapter):
    group = {"model": "smollm2-135m", "blocks": 1, "rows": 1, "tokens": 32, "ratio": 0.25, "adapter": adapter}
    result = measured(group, "TokenSeek + checkpointing")
    e, i, kv = 576, 1536, 192
    rank = 8 * (2 * (e + e) + 2 * (e + kv) + 3 * (e + i))  # q and o, k and v, the three of the MLP
    assert result["gradient_bytes"] == 4 * rank
    assert result["saved_bytes"] > 0 and result["live_peak_bytes"] > result["gradient_bytes"]


def test_the_steps_of_a_case_become_one_record():
    found = script("efficiency")["summarized"](
        {"seconds": {"seek": [1.0, 2.0], "backward": [3.0, 3.0]}, "saved_bytes": 7}
    )
    assert found["seconds_median"] == 4.5 and found["timed_steps"] == 2 and found["saved_bytes"] == 7
    assert found["parts_median"] == {"seek": 1.5, "backward": 3.0}


class ACase:
    """In place of a model that trains."""

    def __init__(self, group, method, device, dtype):
        self.method, self.numbers = method, []

    def count(self, counts):
        if self.method == "too large":
            sys.exit(137)

    def step(self, number):
        self.numbers.append((time.perf_counter(), number))

    def result(self):
        return self.numbers


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_cases_in_processes_take_turns_and_one_that_dies_leaves_the_others(monkeypatch):
    monkeypatch.setattr(efficiency, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(efficiency, "Case", ACase)
    group = {"model": "m", "adapter": "full", "rows": 1, "tokens": 16, "ratio": 0.25}
    found = efficiency.measure_together(group, ["first", "too large", "last"], "cpu", "all", steps=2)
    assert found.pop("too large") is None
    turns = sorted((when, method, number) for method, numbers in found.items() for when, number in numbers)
    assert [turn[1:] for turn in turns] == [("first", 1), ("last", 1), ("first", 2), ("last", 2)]


def test_the_plan_of_a_gpu_machine_and_its_toy_run_the_same_methods():
    plan = script("efficiency")["plan"]
    toy, gpu = plan(False, "cpu", toy=True), plan(False, "cuda", toy=False)
    assert {m for group in toy for m in group["methods"]} == {m for group in gpu for m in group["methods"]}
    assert {group["adapter"] for group in toy} == {group["adapter"] for group in gpu}


def test_estimators_measure_bias_and_noise(monkeypatch, tmp_path):
    workspace = make_workspace(tmp_path)
    run_main(
        "estimators",
        monkeypatch,
        "--rows",
        2,
        "--output",
        tmp_path / "out.json",
        "--",
        "--model.name",
        workspace / "model",
    )
    rules = json.loads((tmp_path / "out.json").read_text())["rules"]
    assert {"the paper's rule", "random tokens"} <= set(rules)
    for found in rules.values():
        assert -1 <= found["row_cosine"] <= 1 + 1e-6 and -1 <= found["sum_cosine"] <= 1 + 1e-6
        assert found["row_relative_error"] > 0
    assert (
        rules["sampled by gradient, ratio 0.3"]["row_cosine"] > rules["sampled by gradient, ratio 0.05"]["row_cosine"]
    )


def test_estimators_compare_by_the_formulas():
    cosine, error = script("estimators")["compare"](torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert cosine == pytest.approx(24 / 25) and error == pytest.approx(2**0.5 / 5)


def test_estimators_compare_in_float64():
    _, error = script("estimators")["compare"](torch.tensor([2e-30]), torch.tensor([1e-30]))  # float32 has no 1e-60
    assert error == pytest.approx(1)


def test_every_study_is_a_valid_grid_of_its_recipe():
    fidelity = script("fidelity")
    for study in fidelity["STUDIES"].values():
        assert (EVAL / "fidelity" / f"{study.recipe}.yaml").is_file()
        names = [cell.name for cell in study.cells()]
        assert len(set(names)) == len(names) == len(study.cases) * len(study.seeds)
        for cell in study.cells():
            load_recipe(EVAL / "fidelity" / f"{study.recipe}.yaml", list(cell.settings))


def test_fidelity_collects_finished_cells_only(monkeypatch, tmp_path):
    fidelity = script("fidelity")
    study = fidelity["STUDIES"]["masked"]
    cell = {
        "group": "full", "seed": 0, "commit": "abc", "versions": {}, "hardware": {"threads": 1},
        "summary": dict.fromkeys(
            ("optimizer_steps", "held_out_loss_before", "held_out_loss_after", "saved_mib", "kept_fraction", "seconds_per_step"), 1.0
        ),
        "curve": [{"step": 0, "eval_loss": 2.0}, {"step": 5, "loss": 1.5}, {"step": 9, "eval_loss": 1.0}],
        "plan": {"recipe": {"tokenseek": {}, "training": {"learning_rate": 1e-4}}},
    }  # fmt: skip
    (tmp_path / study.cells()[0].name).mkdir()
    (tmp_path / study.cells()[0].name / CELL_NAME).write_text(json.dumps(cell))
    (found,) = fidelity["read_cells"](tmp_path, study.cells())
    assert fidelity["compact"](found)["curve"] == [[0, 2.0], [9, 1.0]]

    (tmp_path / "results").mkdir()
    monkeypatch.setitem(fidelity["collect"].__globals__, "HERE", tmp_path)
    later = {**found, "group": "random", "seed": 2}
    again = {**found, "commit": "def"}
    for cells in ([later], [found], [again]):  # what ran before stays; what runs again is replaced
        fidelity["collect"]("masked", study, cells)
    kept = json.loads((tmp_path / "results" / "fidelity_masked.json").read_text())["cells"]
    assert [(cell["group"], cell["seed"], cell["commit"]) for cell in kept] == [
        ("full", 0, "def"),
        ("random", 2, "abc"),
    ]


def test_the_cost_of_the_self_check_is_measured_beside_a_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EVAL))
    output = tmp_path / "selfcheck.json"
    run_main("selfcheck_cost", monkeypatch, "--output", output, "--repetitions", 1, "--tokens", 16, "--blocks", 1)
    (case,) = json.loads(output.read_text())["cases"]
    assert case["tokens"] == 16
    assert 0 <= case["greatest_difference"] < 1e-4
    assert len(case["check_seconds"]) == len(case["step_seconds"]) == 1
    assert 0 < case["check_live_peak_bytes"] < case["step_live_peak_bytes"]
