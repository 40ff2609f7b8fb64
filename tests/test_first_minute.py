"""What a new user meets: help at once, mistakes explained before any compute, Ctrl-C, a full disk, too little memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from workspace import make_workspace

from tokenseek_trainer import doctor, preflight
from tokenseek_trainer.adapters import adapter_config
from tokenseek_trainer.cli import main
from tokenseek_trainer.config import TokenSeekConfig
from tokenseek_trainer.estimate import least_bytes, load_config
from tokenseek_trainer.memory_plan import plan_of_recipe
from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.run import _whole_checkpoints
from tokenseek_trainer.shipped import recipe_names, recipes_folder, samples_folder
from tokenseek_trainer.trainer import TokenSeekTrainer


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path)


def train(workspace, *settings):
    return main(["train", str(workspace / "recipe.yaml"), *settings])


def test_help_and_a_wrong_path_need_no_torch():
    code = (
        "import sys; from tokenseek_trainer.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert main(['train', 'nowhere.yaml']) == 2; assert main(['recipes']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "A recipe is missing: a YAML file, or one that ships: llama3.2-1b-full"),
        (["train", "quikstart"], "The recipe quikstart does not exist. Did you mean 'quickstart'?"),
        (["train", "nowhere/quick.yaml"], "`tokenseek recipes` lists those that ship"),
        (["score", "-o", "x"], "A recipe is missing"),
        (["sweep"], "A recipe is missing"),
        (["recipes", "quickstrat"], "No recipe 'quickstrat' ships. Did you mean 'quickstart'?"),
    ],
)
def test_a_recipe_that_is_not_there_is_explained(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_shipped_recipes_are_listed_found_by_name_and_copied_with_their_data(tmp_path, capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{listed}" for name in recipe_names())
    assert load_recipe("quickstart").path == recipes_folder() / "quickstart.yaml"
    assert main(["recipes", "quickstart", "--to", str(tmp_path)]) == 0
    copy = load_recipe(tmp_path / "quickstart.yaml")
    assert copy.resolve(copy.data.train) == str(tmp_path / "data" / "gsm8k-train.jsonl")
    assert copy.resolve(copy.data.eval) == str(tmp_path / "data" / "gsm8k-heldout.jsonl")
    (tmp_path / "quickstart.yaml").write_text("mine")
    assert main(["recipes", "quickstart", "--to", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"
    assert (samples_folder() / "winogrande" / "validation.jsonl").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--model.name", "runs/models/nothing"], "neither a folder with a model nor to be had from the hub"),
        (["--data.train", "table.csv"], "table.csv must be a .jsonl or .json file, or a data set of the hub"),
        (["--data.train", "nobody/nothing"], "could not be loaded from the hub"),
        (
            ["--trainer", "sft", "--bf16", "false", "--data.prompt", "null", "--data.completion", "null"],
            "The rows have the columns a, q. Expected messages, or prompt and completion, or text",
        ),
        (
            ["--data.prompt", "null", "--data.completion", "null"],
            "The rows have the columns a, q. Expected prompt and",
        ),
        (["--output_dir", "RECIPE/out"], "recipe.yaml/out: Not a directory. Free some space, or give another folder"),
    ],
)
def test_mistakes_are_explained_before_the_model_is_loaded(workspace, capsys, monkeypatch, settings, message):
    monkeypatch.setattr("tokenseek_trainer.run.load_model", lambda recipe: pytest.fail("a model was loaded"))
    settings = [text.replace("RECIPE", str(workspace / "recipe.yaml")) for text in settings]
    assert train(workspace, *settings) == 2
    assert message in capsys.readouterr().err


# ---- disk ----


def test_a_disk_too_small_for_the_weights_is_told_before_training(workspace, capsys, monkeypatch):
    weights = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(workspace / "model").parameters())
    monkeypatch.setattr(TokenSeekTrainer, "train", lambda *args, **kwargs: pytest.fail("it trained"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=weights - 1))
    assert train(workspace) == 2
    assert "The trained weights need 0.00 GiB, and the disk of output_dir" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=weights))
    model = AutoModelForCausalLM.from_pretrained(workspace / "model")
    preflight.check_disk_space(model, workspace)


def test_weights_that_will_be_replaced_count_as_free(workspace, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(workspace / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(preflight.ConfigError):
        preflight.check_disk_space(model, workspace)
    preflight.check_disk_space(model, workspace / "model")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["checkpoint-2/optimizer.pt", "run_summary.json"])
def test_a_disk_that_fills_up_in_the_run_is_one_message(workspace, capsys, file):
    (workspace / "out" / file).parent.mkdir(parents=True)
    (workspace / "out" / file).symlink_to("/dev/full")
    assert train(workspace) == 2
    error = capsys.readouterr().err
    assert "No space left on the disk while a file was written. Free some" in error
    assert "Traceback" not in error


def test_a_checkpoint_cut_short_is_not_resumed_from(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert [path.rsplit("-", 1)[1] for path in _whole_checkpoints(str(tmp_path))] == ["2", "9", "10"]
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epoch": 1.')
    (tmp_path / "checkpoint-11").mkdir()
    assert _whole_checkpoints(str(tmp_path))[-1].endswith("checkpoint-9")


# ---- Ctrl-C ----


def interrupting(monkeypatch, step, times):
    """Ctrl-C in the middle of a step."""
    training_step = TokenSeekTrainer.training_step

    def with_signals(self, *args, **kwargs):
        if self.state.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(TokenSeekTrainer, "training_step", with_signals)


def test_interrupt_saves_a_checkpoint_and_resume_gives_the_same_weights(workspace, capsys):
    settings = ["--save_strategy", "no", "--data.eval", "null"]
    assert train(workspace, *settings, "--output_dir", str(workspace / "whole")) == 0
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        interrupting(patch, step=2, times=1)
        assert train(workspace, *settings) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    error = capsys.readouterr().err
    assert "Ctrl-C again stops at once" in error
    assert (
        f"stopped after step 3 of 4, with a checkpoint. --resume goes on from {workspace / 'out/checkpoint-3'}"
        in error
    )
    assert not (workspace / "out" / "run_summary.json").exists()
    assert train(workspace, *settings, "--resume") == 0
    whole, resumed = (AutoModelForCausalLM.from_pretrained(workspace / name).state_dict() for name in ("whole", "out"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("step", "hint"), [(1, "There is no checkpoint yet (--save_steps N makes them)"), (3, "--resume goes on from")]
)
def test_a_second_interrupt_stops_at_once(workspace, capsys, monkeypatch, step, hint):
    interrupting(monkeypatch, step, times=2)
    assert train(workspace, "--data.eval", "null") == 130
    error = capsys.readouterr().err
    assert f"stopped at once in step {step + 1} of 4. {hint}" in error
    assert "Traceback" not in error


# ---- memory ----


def test_a_step_too_large_is_told_before_it_and_the_run_goes_on(workspace, capsys, monkeypatch):
    plan = plan_of_recipe(load_recipe(workspace / "recipe.yaml"), tokens=12)
    least = least_bytes(plan.config, plan.method, plan.dtype, plan.optim)
    peak = plan.estimate("TokenSeek").peak
    assert least < peak < 2 * least
    rows = []
    monkeypatch.setattr(preflight, "available_memory", lambda use_cpu: (peak, "the toy"))
    from tokenseek_trainer import run

    monkeypatch.setattr(run, "too_large", lambda *args: rows.append(args[1]) or preflight.too_large(*args))
    short = ["--max_steps", "1", "--save_strategy", "no", "--data.eval", "null"]
    assert train(workspace, *short) == 0
    assert "likely not to fit" not in capsys.readouterr().err
    assert rows == [12]  # three words of the prompt, eight of the longest answer, and the end
    monkeypatch.setattr(preflight, "available_memory", lambda use_cpu: (peak - 1, "the toy"))
    assert train(workspace, *short) == 0
    assert "likely not to fit: a step needs about 0.0 GiB, and the toy has 0.0 GiB free" in capsys.readouterr().err


def test_the_whole_step_is_estimated_only_when_it_may_matter(workspace, monkeypatch):
    recipe = load_recipe(workspace / "recipe.yaml")
    plan = plan_of_recipe(recipe)
    least = least_bytes(plan.config, plan.method, plan.dtype, plan.optim)
    monkeypatch.setattr("tokenseek_trainer.memory_plan.estimate", lambda *args, **kwargs: pytest.fail("estimated"))
    for free, said in ((8 * least, False), (least - 1, True)):
        monkeypatch.setattr(preflight, "available_memory", lambda use_cpu, free=free: (free, "the toy"))
        assert (preflight.too_large(recipe) is not None) == said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert preflight.too_large(recipe) is None


@pytest.mark.parametrize("settings", [[], ["--peft.method", "lora", "--peft.target_modules", "[q_proj, down_proj]"]])
def test_the_least_is_weights_gradients_and_optimizer_of_the_real_model(workspace, settings):
    recipe = load_recipe(workspace / "recipe.yaml", [*settings, "--model.dtype", "float32"])
    model = AutoModelForCausalLM.from_pretrained(workspace / "model")
    if settings:
        import peft

        model = peft.get_peft_model(model, adapter_config(recipe))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    plan = plan_of_recipe(recipe)
    assert least_bytes(plan.config, plan.method, plan.dtype, plan.optim, plan.adapter) == weights + 3 * trained


def test_counting_a_large_model_takes_no_memory(monkeypatch):
    config = load_config("llama-3.1-8b")
    config.hidden_size = config.intermediate_size = 2**18
    assert least_bytes(config, "full", "bf16", "sgd") > 2**44


def test_memory_that_is_free_is_found():
    free, name = preflight.available_memory(use_cpu=True)
    assert 0 <= free < 2**50 and name == "the CPU's memory"


# ---- doctor and completion ----


def test_the_doctor_reports_versions_device_and_what_is_missing(capsys, monkeypatch):
    optional = [row for row in doctor.OPTIONAL if row[0] in ("peft", "flash-attn")]
    broken = ("datasets", "tokenseek_trainer.nothing", "sft", "data sets of the hub")
    monkeypatch.setattr(doctor, "OPTIONAL", [*optional, broken])
    assert main(["doctor"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line)
    import peft

    assert lines["torch"] == torch.__version__ and lines["peft"].startswith(peft.__version__)
    assert "works on the" in lines["training"] and lines["Training"] == "works here."
    assert "not usable: ModuleNotFoundError: No module named 'tokenseek_trainer.nothing'" in lines["datasets"]


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"transformers": "4.57.0"}, "transformers: version 4.57.0, needed is <6,>=5.17"),
        ({"torch": None}, "torch: not installed"),
    ],
)
def test_the_doctor_fails_where_the_core_cannot_work(capsys, monkeypatch, versions, said):
    version = doctor._version
    monkeypatch.setattr(doctor, "OPTIONAL", ())
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, version(name)))
    monkeypatch.setattr(
        doctor.importlib.metadata,
        "requires",
        lambda name: ["torch>=2.11", "transformers<6,>=5.17", 'trl; extra == "sft"'],
    )
    assert main(["doctor"]) == 1
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_the_doctor_fails_where_a_step_fails(capsys, monkeypatch):
    from tokenseek_trainer.session import TokenSeekSession

    monkeypatch.setattr(doctor, "OPTIONAL", ())
    monkeypatch.setattr(TokenSeekSession, "ditch", lambda *args: 1 / 0)
    assert main(["doctor"]) == 1
    assert "A training step of a tiny model fails: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_setting(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    names = [*TokenSeekConfig().to_dict(), "per_device_train_batch_size", "max_length", "doctor"]
    assert [name for name in names if name not in script] == []
    if shell == "bash" and shutil.which("bash"):
        (tmp_path / "script").write_text(script)
        done = subprocess.run(["bash", "-c", BASH, "bash", str(tmp_path / "script")], capture_output=True, text=True)
        assert json.loads(done.stdout) == {
            "tokenseek do": "doctor",
            "tokenseek train --tokenseek.sc": "--tokenseek.scorer",
            "tokenseek train --scorer ra": "random",
            "tokenseek sweep --eval_st": "--eval_steps --eval_strategy",
        }, done.stderr


BASH = r"""
source "$1"
function complete_line {
    COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _shtab_tokenseek
    echo "\"$1\": \"$(printf '%s\n' "${COMPREPLY[@]}" | sort | xargs)\"$2"
}
echo "{"
complete_line "tokenseek do" ","
complete_line "tokenseek train --tokenseek.sc" ","
complete_line "tokenseek train --scorer ra" ","
complete_line "tokenseek sweep --eval_st" ""
echo "}"
"""
