"""Token reports: their numbers, their page, the terminal, the command."""

import base64
import dataclasses
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from workspace import make_workspace

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.cli import main
from tokenseek_trainer.errors import ConfigError, InputError, UnsupportedModelError
from tokenseek_trainer.inspect_inputs import parse_rows
from tokenseek_trainer.inspect_terminal import printable
from tokenseek_trainer.inspection import TEMPLATE, TokenReport, TokenRow, inspect_tokens, token_texts
from tokenseek_trainer.instances import find_instances
from tokenseek_trainer.selection import select
from tokenseek_trainer.testing import VOCAB_SIZE, tiny_model, tiny_tokenizer


def example(length, n_prompt, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB_SIZE, (length,), generator=generator).tolist()
    return {"input_ids": ids, "labels": [-100] * n_prompt + ids[n_prompt:]}


@pytest.fixture(scope="module")
def report():
    rows = [example(20, 8), example(9, 1, seed=1), example(33, 25, seed=2)]
    return inspect_tokens(tiny_model("llama"), tiny_tokenizer(), rows, TokenSeekConfig(ratio=0.3), source="here")


def synthetic_row(n, n_prompt, context, gradient, number=0, texts=None, dtype=torch.float32):
    """A row with scores of the test's own."""
    ids = torch.arange(10, 10 + n)[None]
    labels = ids.clone()
    labels[:, :n_prompt] = -100
    return TokenRow(
        number=number,
        tokens=texts or [f" w{i}" for i in range(n)],
        input_ids=ids[0].tolist(),
        instances=find_instances({"input_ids": ids + 1000 * number}, labels, shift=True),
        causal=True,
        context=torch.as_tensor(context, dtype=dtype),
        gradient=torch.as_tensor(gradient, dtype=dtype),
        loss=1.5,
    )


def awkward_rows():
    """Ties, zeros, a budget that ends in a half, a late response, one dominating token, one token with a loss."""
    random = np.random.default_rng(0)
    rows = [
        synthetic_row(25, 10, random.lognormal(size=25), random.lognormal(size=25) * (np.arange(25) >= 9), 0),
        synthetic_row(15, 1, np.ones(15), np.ones(15), 1),
        synthetic_row(30, 22, np.r_[9.0, np.zeros(29)], np.round(random.random(30), 1), 2),
        synthetic_row(45, 5, random.random(45), np.r_[random.random(43), 1000.0, 0.5], 3),
        synthetic_row(5, 4, random.random(5), random.random(5), 4),
        synthetic_row(25, 3, random.random(25), np.zeros(25), 5, dtype=torch.float64),
    ]
    # The loss ends before the row does.
    ids = torch.arange(10, 40)[None]
    labels = torch.where((torch.arange(30) > 5) & (torch.arange(30) < 20), ids, -100)
    middle = dataclasses.replace(rows[2], number=6, instances=find_instances({"input_ids": ids}, labels, shift=True))
    return [*rows, middle]


# The numbers.


def test_the_scores_are_those_of_their_definition():
    """I1 and I2 from an ordinary forward with its attentions and hidden states, and autograd."""
    model = tiny_model("llama", attn_implementation="eager").eval()
    row = example(14, 5)
    (found,) = inspect_tokens(model, tiny_tokenizer(), [row]).rows
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    output = model(ids, output_attentions=True, output_hidden_states=True)
    z = output.hidden_states[-2]
    logits = output.logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum", ignore_index=-100)
    (gradient,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(found.gradient, gradient[0].abs().sum(-1), rtol=1e-9, atol=1e-12)
    received = output.attentions[-1][0].mean(0).sum(0)  # their softmax is in float32
    torch.testing.assert_close(found.context, received, rtol=1e-6, atol=1e-7)
    assert found.loss == pytest.approx(loss.item() / 9, rel=1e-9)
    assert found.supervised.tolist() == [4 <= i < 13 for i in range(14)]
    assert found.response.tolist() == [i >= 5 for i in range(14)]


def test_a_row_is_kept_as_training_keeps_it(report):
    """Whatever stands beside it in the batch, with either rule and at any step."""
    from tokenseek_trainer import TokenSeekCollator
    from tokenseek_trainer.session import TokenSeekSession

    rows = [example(20, 8), example(9, 1, seed=1), example(33, 25, seed=2)]
    model = tiny_model("llama")
    for config in (TokenSeekConfig(ratio=0.3), TokenSeekConfig.paper(ratio=0.2), TokenSeekConfig(scorer="random")):
        with TokenSeekSession(model, config) as session:
            batch = TokenSeekCollator()(rows)
            instances = session.instances(batch)
            scores = session.seek(batch, instances).scores(instances, config, step=3)
            chosen = select(scores, instances, config, step=3)
        for i, row in enumerate(report.rows):
            assert row.kept(config, step=3) == chosen.indices[i][chosen.mask[i]].tolist()


def test_the_model_and_the_random_numbers_stay_as_they_were():
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.lm_head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, second = (inspect_tokens(model, tiny_tokenizer(), [example(12, 4)]).rows[0] for _ in range(2))
    assert torch.equal(first.gradient, second.gradient) and torch.equal(first.context, second.context)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0]) and np.random.get_state()[1].tolist() == states[1]


def test_by_position_and_overlap():
    context = np.r_[8.0, np.zeros(18), 2.0]
    gradient = np.r_[np.zeros(18), 5.0, 5.0]
    report = TokenReport([synthetic_row(20, 1, context, gradient)], TokenSeekConfig(ratio=0.1), "m", "", 0)
    shares = report.by_position()
    assert shares["context"] == pytest.approx([0.8] + [0] * 8 + [0.2])
    assert shares["gradient"] == pytest.approx([0] * 9 + [1.0])
    # 2 of 19 supervised positions each: {0, 1} by context (a tie goes to the earlier), {18, 0} by gradient.
    assert report.overlap() == pytest.approx(1 / 3)


def test_masked_language_models_and_models_without_visible_attention(monkeypatch):
    row = example(12, 4)
    (found,) = inspect_tokens(tiny_model("bert"), tiny_tokenizer(), [row]).rows
    assert found.supervised.tolist() == found.response.tolist() == [i >= 4 for i in range(12)]

    import transformers

    config = transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)
    bloom = transformers.BloomForCausalLM(config)
    assert inspect_tokens(bloom, tiny_tokenizer(), [row]).rows[0].context is not None

    def refuse(self, weights):
        raise UnsupportedModelError("it cannot be scored")

    monkeypatch.setattr("tokenseek_trainer.recorder.AttentionRecorder._score_handwritten", refuse)
    report = inspect_tokens(bloom, tiny_tokenizer(), [row])
    assert report.rows[0].context is None and report.overlap() is None and list(report.by_position()) == ["gradient"]
    assert '"context":null' in report.to_html() and "gradient" in report.to_terminal()
    with pytest.raises(UnsupportedModelError, match="cannot be scored"):
        inspect_tokens(bloom, tiny_tokenizer(), [row], TokenSeekConfig.paper())


def test_token_texts_join_to_the_decoded_whole():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    text = "naïve 日本 🙂 \ufffd ok"
    ids = tokenizer(text).input_ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert texts[2:4] == ["", "ï"]
    broken = token_texts(tokenizer, ids[:3])  # ends in the middle of a character
    assert len(broken) == 3 and broken[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows to inspect"),
        ([{"input_ids": [7, 8, 9], "labels": [-100] * 3}], "Row 0 has no token that carries a loss"),
    ],
)
def test_rows_that_show_nothing_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        inspect_tokens(tiny_model("llama"), tiny_tokenizer(), rows)


# The page.


def page_data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def hostile_report():
    texts = ["</script><script>boom()</script>", "<!--", "<b>", "&amp;", "\u2028", "{{title}}", "'\"", "\n"]
    row = synthetic_row(8, 2, np.arange(8) + 1.0, np.arange(8.0), texts=texts)
    return TokenReport([row], TokenSeekConfig(ratio=0.5), "<i>m</i>{{data}}", "</title>", 0), texts


def test_the_page_carries_rows_as_data_only():
    report, texts = hostile_report()
    page = report.to_html()
    assert page_data(page)["rows"][0]["tokens"] == texts
    assert page_data(page)["model"] == "<i>m</i>{{data}}"
    for tag in ("<b>", "<!--", "<i>", "boom()</script>"):
        assert tag not in page
    assert page.count("</script>") == TEMPLATE.read_text().count("</script>")
    assert page.count("</title>") == 1


def test_the_page_loads_nothing():
    page = TEMPLATE.read_text()
    assert "default-src 'none'" in page
    assert re.findall(r"https?://[^\"' ]+", page) == ["http://www.w3.org/2000/svg"]  # a namespace, not an address
    assert not re.search(r"<link|<img|@import|url\(|src=|fetch\(|XMLHttp|WebSocket|innerHTML|eval\(", page)


def test_scores_travel_exactly(report):
    for raw, row in zip(page_data(report.to_html())["rows"], report.rows, strict=True):
        for name in ("context", "gradient"):
            sent = np.frombuffer(base64.b64decode(raw[name]), "<f8")
            assert np.array_equal(sent, getattr(row, name).numpy())
        assert raw["kept"] == row.kept(report.config)


def test_twenty_long_rows_stay_below_two_megabytes():
    rows = [synthetic_row(2048, 500, np.random.rand(2048), np.random.rand(2048), i) for i in range(20)]
    assert len(TokenReport(rows, TokenSeekConfig(), "m", "", 0).to_html().encode()) < 2e6


def test_every_level_of_the_palette_is_legible_and_lighter_or_darker_than_the_one_before():
    def luminance(color):
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    themes = re.findall(r"--c0:.*", TEMPLATE.read_text())
    assert len(themes) == 2
    for theme, direction in zip(themes, (-1, 1), strict=True):
        back = [luminance(c) for c in re.findall(r"--c\d+:(#\w{6})", theme)]
        ink = [luminance(c) for c in re.findall(r"--t\d+:(#\w{6})", theme)]
        assert len(back) == len(ink) == 16
        assert all(direction * (b - a) > 0 for a, b in itertools.pairwise(back))
        for a, b in zip(back, ink, strict=True):
            assert (max(a, b) + 0.05) / (min(a, b) + 0.05) >= 4.5


def test_saving_is_whole_or_nothing(report, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    report.save(path)
    assert path.read_text(encoding="utf-8") == report.to_html()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    path.write_text("old")

    def fail(source, target):
        raise OSError("disk")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk"):
        report.save(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    for wrong, message in ((tmp_path / "no" / "r.html", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=message):
            report.save(wrong)


def test_notebooks_get_the_page_in_a_frame(report):
    import html

    shown = report._repr_html_()
    (inner,) = re.findall(r'srcdoc="(.*?)"', shown, re.DOTALL)
    assert html.unescape(inner) == report.to_html()
    assert 'sandbox="allow-scripts"' in shown and "<script" not in shown


RULES = [
    {"scorer": "gradient"},
    {"scorer": "gradient", "uniform_share": 0.0, "select_from": "all"},
    {"scorer": "context", "select_from": "all", "min_tokens": 3},
    {"scorer": "tokenseek", "select_from": "all", "selection": "topk"},
    {"scorer": "tokenseek", "alpha": 0.7, "beta": 0.3, "selection": "topk"},
    {"scorer": "tokenseek", "alpha": 0.0, "beta": 2.0, "select_from": "all", "selection": "topk"},
    {"scorer": "tokenseek", "alpha": 0.3, "beta": 0.0, "selection": "topk"},
    {"scorer": "tokenseek", "alpha": 1.3, "beta": 2.1, "select_from": "all"},
    {"scorer": "random", "seed": 5},
    {"scorer": "random", "selection": "topk", "seed": 5},
    {"scorer": "gradient", "selection": "topk"},
]
RATIOS, STEPS = (0.01, 0.1, 0.22, 0.5, 0.77, 1.0), (0, 0, 3, 1000, 7, 2)


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed; the slow browser test covers the same"
)
def test_the_script_of_the_page_selects_as_the_library_does(tmp_path, report):
    """Every rule, ratio and step: the same tokens, and the chances that the loss weights of the kept ones are made of."""
    rows = [*awkward_rows(), *report.rows]
    page = TokenReport(rows, TokenSeekConfig(), "m", "", 0).to_html()
    (tmp_path / "data.json").write_text(json.dumps(page_data(page)))
    script = page[page.index("// ---- selection") : page.index("// ---- state")]
    cases = [
        (dataclasses.replace(TokenSeekConfig(), ratio=ratio, **rule), step)
        for rule in RULES
        for ratio, step in zip(RATIOS, STEPS, strict=True)
    ]
    (tmp_path / "cases.json").write_text(json.dumps([[config.to_dict(), step] for config, step in cases]))
    (tmp_path / "run.js").write_text(
        'const fs = require("fs");\n'
        'const document = {getElementById: () => ({textContent: fs.readFileSync("data.json", "utf8")})};\n'
        + script
        + 'const cases = JSON.parse(fs.readFileSync("cases.json", "utf8"));\n'
        "console.log(JSON.stringify(cases.map(([rule, step]) => rows.map(row => {\n"
        "  const {kept, probability} = Selection.select(row, rule, step);\n"
        "  return [kept, Array.from(probability)];\n"
        "}))));\n"
    )
    done = subprocess.run(["node", "run.js"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    compared = 0
    for (config, step), of_rows in zip(cases, found, strict=True):
        for row, (kept, probability) in zip(rows, of_rows, strict=True):
            chosen = select(row.scores(config, step)[None], row.instances, config, step=step)
            assert kept == chosen.indices[chosen.mask].tolist(), (config, step, row.number)
            if config.selection == "sample":
                keep = chosen.supervised[0]
                where = chosen.indices[0][keep].tolist()
                assert [probability[i] for i in where] == pytest.approx(
                    (1 / chosen.weights[0][keep]).tolist(), rel=1e-9
                )
                assert sum(probability) == pytest.approx(len(kept), abs=1e-9)
                compared += len(where)
    assert compared > 500


# The terminal.


def test_the_terminal_shows_kept_tokens_without_colour(report, monkeypatch):
    plain = report.to_terminal(color=False)
    assert "\x1b" not in plain
    row = report.rows[0]
    kept = row.kept(report.config)
    assert plain.count("«") == sum(len(row.kept(report.config)) for row in report.rows)
    assert all(f"«{row.tokens[i].strip()}»" in plain for i in kept)
    assert "row 0: 20 tokens, 12 with a loss" in plain and "\nprompt: " in plain and "\nresponse: " in plain
    assert "keeps 30 % of a row, drawn among tokens that carry a loss" in plain


def test_colours_follow_the_terminal(report, monkeypatch):
    monkeypatch.setenv("COLORTERM", "truecolor")
    full = report.to_terminal(color=True)
    assert "\x1b[48;2;" in full and ";1;4m" in full and "«" not in full
    monkeypatch.delenv("COLORTERM")
    assert "\x1b[48;5;" in report.to_terminal(color=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", full)
    assert plain == report.to_terminal(color=False).replace("«", "").replace("»", "")
    assert "\x1b" not in report.to_terminal()  # pytest's output is no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" in report.to_terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in report.to_terminal()


def test_no_row_steers_the_terminal():
    assert printable("a\x1b[2J\x07\x7f\x9b\tb\n") == "a␛[2J␇␡␡␉b↵\n"
    texts = ["\x1b]0;owned\x07"] * 8
    row = synthetic_row(8, 2, np.arange(8) + 1.0, np.arange(8.0), texts=texts)
    shown = TokenReport([row], TokenSeekConfig(ratio=0.5), "m", "", 0).to_terminal(color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", shown).isprintable() is False  # line breaks are left
    assert "\x1b]" not in shown and "\x07" not in shown


# The command.


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("inspect"))


def test_inspect_prints_or_writes(workspace, capsys):
    recipe, model, page = str(workspace / "recipe.yaml"), str(workspace / "model"), workspace / "r.html"
    assert main(["inspect", recipe, "--rows", "2:5", "-o", str(page)]) == 0
    assert "wrote 3 rows" in capsys.readouterr().out
    data = page_data(page.read_text(encoding="utf-8"))
    assert [row["number"] for row in data["rows"]] == [2, 3, 4]
    assert data["rule"]["ratio"] == 0.4 and data["source"] == "train.jsonl"
    assert "".join(data["rows"][0]["tokens"]) == "w2 w3 w4 w2 w3 w4 w5 w6 w7 w8 w9 <eos>"
    assert data["rows"][0]["flags"][:3] == "445"  # a prompt of three tokens, of which the last predicts the response

    heldout = ["--data", str(workspace / "heldout.jsonl")]
    assert main(["inspect", model, "--recipe", recipe, *heldout, "--ratio", "0.6"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^row (\d+):", printed, re.MULTILINE) == ["0", "1", "2", "3"]
    assert "keeps 60 % of a row" in printed
    assert main(["inspect", model, "--text", "w1 w2 w3 w4", "--selection", "topk", "--ratio", "0.5"]) == 0
    assert "the best by the gradient score" in capsys.readouterr().out


def test_rows_that_training_leaves_out_are_left_out_by_number(workspace, capsys):
    rows = [{"q": "w1 " * n, "a": "w2 w3"} for n in (2, 30, 3)]
    path = workspace / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = workspace / "long.html"
    settings = ["--data", str(path), "--max_length", "10", "-o", str(page)]
    assert main(["inspect", str(workspace / "recipe.yaml"), *settings]) == 0
    assert [row["number"] for row in page_data(page.read_text())["rows"]] == [0, 2]


def test_conversations_are_prepared_by_trl(workspace, capsys):
    pytest.importorskip("trl")
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]
    path = workspace / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    page = workspace / "chat.html"
    settings = ["--trainer", "sft", "--data", str(path), "--training.assistant_only_loss", "true", "-o", str(page)]
    settings += ["--prompt", "null", "--completion", "null", "--rows", "0"]
    assert main(["inspect", str(workspace / "recipe.yaml"), *settings]) == 0
    (row,) = page_data(page.read_text())["rows"]
    response = "".join(t for t, flag in zip(row["tokens"], row["flags"], strict=True) if int(flag) & 2)
    assert response.split() == ["w3", "w4", "w5", "<eos>"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--text", "w1 w2"], "The model 'nowhere' is not a folder here"),
        (["MODEL"], "Say what to look at"),
        (["MODEL", "--text", "w1 w2", "--data", "DATA"], "Say what to look at"),
        (["MODEL", "--text", "w1 w2", "--rows", "0:1"], "--rows chooses rows of a data file"),
        (["MODEL", "--text", "w1"], None),
        (["MODEL", "--text", ""], "has a supervised token left"),
        (["MODEL", "--text", "w1 w2", "-o", "no/such/r.html"], "The folder no/such does not exist"),
        (["MODEL", "--text", "w1 w2", "--ratio", "0"], "ratio must be a number in (0, 1]"),
        (["MODEL", "--text", "w1 w2", "--ratoi", "0.1"], "Did you mean 'ratio'"),
        (["MODEL", "--text", "w1 w2", "--dtype", "float31"], "--dtype must be auto"),
        (["RECIPE", "--data", "gone.jsonl"], "gone.jsonl does not exist"),
        (["RECIPE", "--rows", "12:14"], "--rows 12:14 is out of range: "),
        (["RECIPE", "--rows", "4:13"], "has rows 0 to 11"),
        (["RECIPE", "--rows", "5:5"], "rows must be START:STOP"),
        (["RECIPE", "--recipe", "RECIPE"], "Give one recipe"),
        (["RECIPE", "--prompt", "x {gone}"], "names the column 'gone'"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(workspace, capsys, arguments, message, monkeypatch):
    names = {"MODEL": "model", "RECIPE": "recipe.yaml", "DATA": "train.jsonl"}
    arguments = [str(workspace / names[a]) if a in names else a for a in arguments]
    if message is None:
        assert main(["inspect", *arguments]) == 0
        return
    import transformers

    if "--dtype" not in arguments:
        monkeypatch.setattr(
            transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded")
        )
    assert main(["inspect", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_are_written_start_stop():
    assert parse_rows("0:20") == (0, 20) and parse_rows(" 7 ") == (7, 8)
    for wrong in ("", "3:3", "-1:2", "a:b", "1:2:3", ":4"):
        with pytest.raises(ConfigError, match="START:STOP"):
            parse_rows(wrong)
