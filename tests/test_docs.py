"""docs/ says what is so: its Python runs, its commands parse, its links lead somewhere, its quotes are in the code."""

import ast
import gc
import importlib.util
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from tokenseek_trainer.cli import _parser
from tokenseek_trainer.errors import ConfigError
from tokenseek_trainer.estimate import load_config
from tokenseek_trainer.evaluation import parse_suite
from tokenseek_trainer.recipe import load_recipe, tokenseek_settings
from tokenseek_trainer.shipped import recipe_names
from tokenseek_trainer.sweep import grid
from tokenseek_trainer.testing import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAMES = [path.name for path in PAGES]
# What the examples in the docstrings go on from; the other pages say it themselves.
REFERENCE_PREAMBLE = """
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("runs/models/SmolLM2-135M-Instruct", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("runs/models/SmolLM2-135M-Instruct")
data = [{"input_ids": list(range(5, 25))}] * 8
args = TrainingArguments(output_dir="runs/reference", max_steps=1, save_strategy="no", report_to="none", use_cpu=True)
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection():
    """Every Trainer collects garbage when it starts, through all that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder as a reader has it after the quickstart, with tiny random models in the place of the real ones."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    decoder = tiny_model("llama", dtype=torch.float32, pad_token_id=0, eos_token_id=2, bos_token_id=None)
    encoder = tiny_model("bert", dtype=torch.float32)
    models = {"models/SmolLM2-135M-Instruct": decoder, "quickstart": decoder, "models/MiniLM-L6": encoder}
    for name, model in models.items():
        model.save_pretrained(folder / "runs" / name)
        tiny_tokenizer().save_pretrained(folder / "runs" / name)
    return folder


# ---- code ----


@pytest.mark.parametrize("page", [path for path in PAGES if blocks(path, "python")], ids=lambda path: path.name)
def test_the_python_of_a_page_runs(page, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    namespace = {"__name__": page.stem}
    if page.name == "reference.md":
        exec(REFERENCE_PREAMBLE, namespace)
        # What `TokenSeekSession`'s example takes from elsewhere.
        exec(
            "import torch\nfrom tokenseek_trainer import TokenSeekConfig\nfrom tokenseek_trainer.selection import select",
            namespace,
        )
        exec("config, step, num_items_in_batch = TokenSeekConfig(), 0, None", namespace)
        exec("ids = torch.arange(5, 25)[None]\nbatch = {'input_ids': ids, 'labels': ids}", namespace)
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize(
    ("page", "words"),
    [pytest.param(page, words, id=f"{page.name}: {shlex.join(words)}") for page in PAGES for words in commands(page)],
)
def test_a_command_of_a_page_is_one(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_command(words)


def check_command(words: list[str]) -> None:
    """Fails unless the command's program is known here, its files exist, and its settings are settings."""
    if words[0] == "tokenseek":
        check_tokenseek(words[1:])
    elif words[:3] == ["accelerate", "launch", "--config_file"]:
        assert Path(words[3]).is_file()
        assert words[4:6] == ["-m", "tokenseek_trainer.cli"]
        check_tokenseek(words[6:])
    elif words[0] == "make":
        assert re.search(rf"^(\S+ )*{words[1]}( \S+)*:", Path("Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "python":
        assert Path(words[1]).is_file(), words
    else:
        assert words[:2] == ["pip", "install"], words


def check_tokenseek(arguments: list[str]) -> None:
    options, settings = _parser().parse_known_args(arguments)
    command, given = arguments[0], vars(options)
    source = given.get("recipe") or given.get("model")
    if command in ("train", "score", "sweep") or (source and source.endswith(".yaml")):
        for cell in grid(settings) if command == "sweep" else [None]:
            load_recipe(source, settings if cell is None else cell.settings)
    elif command == "inspect":
        tokenseek_settings(settings)
    else:
        assert settings == []
    if command == "estimate" and not source.endswith(".yaml"):
        load_config(source)
    if command == "eval":
        parse_suite(options.suite)
    if command == "recipes":
        assert options.name is None or options.name in recipe_names()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("tokenseek train recipes/quickstart.yaml --ratoi 0.2", ConfigError),
        ("tokenseek train recipes/nowhere.yaml", ConfigError),
        ("tokenseek sweep recipes/quickstart.yaml --ratio 0.1,0.2 --scorr gradient", ConfigError),
        ("tokenseek inspect folder --text x --ratoi 0.3", ConfigError),
        ("tokenseek estimate llama-9 --seq 8", ConfigError),
        ("tokenseek eval folder --lmit 20", AssertionError),
        ("tokenseek trian recipes/quickstart.yaml", SystemExit),
        ("accelerate launch --config_file recipes/accelerate/none.yaml -m tokenseek_trainer.cli train quickstart", AssertionError),
        ("make quikstart", AssertionError),
        ("python recipes/none.py", AssertionError),
        ("rm -r runs", AssertionError),
    ],
)  # fmt: skip
def test_a_wrong_command_would_be_seen(line, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(error):
        check_command(shlex.split(line))


def test_the_tutorial_runs_and_keeps_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutorial.py", "--tiny"])
    runpy.run_path(str(ROOT / "recipes" / "tutorial.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "greatest gradient score" in printed and "«" in printed
    rows = re.findall(
        r"^ +(1\.0|0\.3|0\.1) +([\d.]+)% +([\d.]+), ([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE
    )
    ratio, kept, before, after, saved, _ = (list(map(float, column)) for column in zip(*rows, strict=True))
    assert ratio == [1.0, 0.3, 0.1]
    assert kept == pytest.approx([100, 30, 10], abs=3)
    assert len(set(before)) == 1 and max(after) < before[0]
    assert saved[0] > saved[1] > saved[2] > 0


# ---- what is said ----


def slug(heading: str, taken: list[str]) -> str:
    """A heading's anchor as code hosts make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    text = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
    return text if text not in taken else f"{text}-{taken.count(text)}"


def anchors(page: Path) -> set[str]:
    plain: list[str] = []
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        found.add(slug(heading, plain))
        plain.append(slug(heading, []))
    return found


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def is_broken(page: Path, link: str) -> bool:
    if link.startswith(("http://", "https://")):
        return False
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    assert [link for link in links(page) if is_broken(page, link)] == []


def test_a_broken_link_would_be_seen():
    index = ROOT / "docs" / "index.md"
    assert is_broken(index, "nowhere.md") and is_broken(index, "faq.md#nowhere") and is_broken(index, "#nowhere")
    assert not is_broken(index, "../README.md#in-a-script")
    assert slug("Which *tokens*? `ratio`, [and](x.md) more", []) == "which-tokens-ratio-and-more"
    assert slug("Again", ["again"]) == "again-1"


def test_every_page_is_in_the_index_and_short():
    named = {link for link in links(ROOT / "docs" / "index.md") if not link.startswith("..")}
    assert named == {*NAMES} - {"index.md"}
    assert "docs/index.md" in links(ROOT / "README.md")
    long = {path.name: lines for path in PAGES if (lines := len(path.read_text().splitlines())) > 150}
    assert not {*long} - {"reference.md"}, long


def messages() -> list[str]:
    """Every string of the package that is no docstring; the values in it as …."""
    found = []
    for path in (ROOT / "tokenseek_trainer").glob("*.py"):
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                found.append(node.value)
    return found


def quotes() -> list[str]:
    """The messages at the head of each point of the troubleshooting page."""
    points = re.split(r"^- ", prose(ROOT / "docs" / "troubleshooting.md"), flags=re.MULTILINE)[1:]
    heads = [re.match(r"(`[^`]+`,?\s+)*`[^`]+`(?=:)", point) for point in points]
    assert all(heads), [point for point, head in zip(points, heads, strict=True) if not head]
    return [quote for head in heads for quote in re.findall(r"`([^`]+)`", head[0])]


def test_quoted_messages_are_in_the_code():
    known = messages()
    assert len(quotes()) > 60
    assert [quote for quote in quotes() if not any(quote in message for message in known)] == []
    assert not any("The batch has no lables" in message for message in known)


def test_cited_numbers_are_those_of_the_results():
    """Of results that are cited outside the generated tables."""
    results = {
        name: json.loads((ROOT / "eval" / "results" / f"{name}.json").read_text())
        for name in ("estimators", "quickstart")
    }
    rules = results["estimators"]["rules"]
    names = (
        "sampled by gradient, ratio 0.05",
        "sampled by gradient",
        "sampled by gradient, ratio 0.2",
        "sampled by gradient, ratio 0.3",
    )
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    values = [f"{rules[name]['row_cosine']:.2f}" for name in names]
    assert "is {} at 0.05, {} at 0.1, {} at 0.2 and {} at 0.3".format(*values) in choosing
    ordinary, default = results["quickstart"]["runs"][:2]
    quickstart = (ROOT / "docs" / "quickstart.md").read_text()
    assert f"ends at {ordinary['held_out_loss_after']:.3f}, and keeps {ordinary['saved_mib']:.0f} MiB" in quickstart
    assert f"{default['held_out_loss_before']:.4f} before, {default['held_out_loss_after']:.4f} after" in quickstart
    assert f"saved for backward {default['saved_mib']:.1f} MiB" in quickstart


# ---- the reference ----


def test_the_reference_is_what_the_docstrings_say(reference, monkeypatch, tmp_path):
    assert reference.render_page() == reference.PAGE.read_text(), "run python docs/reference.py"
    monkeypatch.setattr(reference, "PAGE", tmp_path / "reference.md")
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1  # there is none
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0
    reference.PAGE.write_text(reference.PAGE.read_text() + "more\n")
    assert reference.main() == 1


def no_docstring(x): ...


class NoDocstringBelow:
    """Has one."""

    def told(self, x: int = 1):
        """Has one: and an argument list.

        Args:
            x: a number,
                on two lines.
        """

    def untold(self): ...


def test_a_public_name_without_docstring_fails(reference):
    with pytest.raises(SystemExit, match="no_docstring is public and has no docstring"):
        reference.render_entry(no_docstring, "tests")
    with pytest.raises(SystemExit, match=r"NoDocstringBelow\.untold is public"):
        reference.render_entry(NoDocstringBelow, "tests")


def test_a_docstring_becomes_markdown(reference):
    text = reference.to_markdown(reference.docstring(NoDocstringBelow.told, "told"))
    assert text == "Has one: and an argument list.\n\n**Args:**\n\n- `x`: a number, on two lines.\n"
    assert reference.signature(NoDocstringBelow.told) == "x: int=1"
