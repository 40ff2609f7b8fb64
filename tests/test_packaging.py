"""What is installed is what is here: a wheel, in an empty environment outside the checkout, trains, evaluates and type-checks."""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from workspace import make_workspace


ROOT = Path(__file__).parent.parent
VERSION = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def run(*command, **kwargs):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, output = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs", "dist")
    shutil.copytree(ROOT, source, ignore=ignored)
    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", output, "--quiet")
    return next(output.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel and, from this one, what it depends on; returns its folder of commands."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join({sysconfig.get_path("purelib"), *site.getsitepackages()}))
    run(
        sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index",
        "--ignore-installed", wheel,  # the dependencies' folder may hold a checkout of the same version
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture
def clean():
    """Environment variables without the checkout."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_the_wheel_holds_all_that_ships(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("tokenseek_trainer", ""), ("recipes", "recipes/"), ("eval/samples", "samples/")):
        files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted = {f"tokenseek_trainer/{inside}{file}" for file in files if "__pycache__" not in file.parts}
        assert len(wanted) > 10 and wanted - names == set()
    assert f"-{VERSION}-" in wheel.name


@pytest.mark.slow
def test_it_trains_a_shipped_recipe_and_evaluates_on_the_samples(installed, clean, tmp_path):
    make_workspace(tmp_path)
    where = run(
        installed / "python", "-c",
        "import tokenseek_trainer as t; print(t.__version__, t.__file__)", cwd=tmp_path, env=clean,
    )  # fmt: skip
    assert where.startswith(f"{VERSION} {installed.parent}")
    assert "quickstart " in run(installed / "tokenseek", "recipes", cwd=tmp_path, env=clean)
    printed = run(
        installed / "tokenseek", "train", "quickstart", "--model.name", tmp_path / "model", "--max_steps", "2",
        "--output_dir", "out", "--train_rows", "8", "--eval_rows", "4", "--max_length", "64", "--use_cpu", "true",
        cwd=tmp_path, env=clean,
    )  # fmt: skip
    assert "trained           2 steps on" in printed
    printed = run(
        installed / "tokenseek", "eval", "out", "--suite", "arc_easy", "--data", "samples", "--limit", "2",
        cwd=tmp_path, env=clean,
    )  # fmt: skip
    assert "arc_easy" in printed and "(2 questions)" in printed
    run(installed / "python", "-m", "tokenseek_trainer.recipes.fetch_smollm2", "--help", cwd=tmp_path, env=clean)


@pytest.mark.slow
def test_the_public_names_are_typed_for_others(installed, clean, tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        "from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer, nothing\n"
        "ratio: float = TokenSeekConfig(ratio=0.1).ratio\n"
        "wrong: str = TokenSeekConfig().ratio\n"
        "kept: int = TokenSeekTrainer(tokenseek=None).tokenseek\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python"), str(script)],
        cwd=tmp_path, env=clean, capture_output=True, text=True,
    )  # fmt: skip
    found = re.findall(r"user.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    assert found == [("1", "attr-defined"), ("3", "assignment"), ("4", "assignment")], done.stdout


@pytest.mark.slow
def test_the_types_of_the_package_are_right():
    run(sys.executable, "-m", "mypy", cwd=ROOT)
