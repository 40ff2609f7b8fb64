"""The README says what is so: its example runs as written, its tables are what the results and the tests say."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from tokenseek_trainer.testing import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_written(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (folder,) = re.findall(r'folder = "(.*?)"', example)
    tiny_model("llama", dtype=torch.float32, pad_token_id=0, eos_token_id=2).save_pretrained(tmp_path / folder)
    tiny_tokenizer().save_pretrained(tmp_path / folder)
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'kept_fraction': 0." in done.stdout
    assert (tmp_path / "runs" / "example" / "tokenseek_config.json").is_file()


def test_the_tables_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval" / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, "run python eval/tables.py" + done.stderr[-2000:]


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`((?:tests|eval|recipes)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
    modules = {path.stem for path in (ROOT / "tokenseek_trainer").glob("*.py") if not path.stem.startswith("_")}
    file_map = README.partition("## Files")[2]
    assert not {module for module in modules if not re.search(rf"\b{module}\b", file_map)}
