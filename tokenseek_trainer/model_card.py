"""The README.md of a saved model: what was kept, what it took, how to load it. Made from what the run knows, without network."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import transformers
import yaml

from .config import TokenSeekConfig
from .estimate import StepEstimate
from .files import write_whole
from .memory import MIB
from .provenance import provenance


CARD_NAME = "README.md"
MARK = "<!-- Written by tokenseek-trainer at every save. Take this line out, and the file is yours: it is not replaced any more. -->"
CITATION = """```bibtex
@inproceedings{zeng2026tokenseek,
  title = {{TokenSeek}: Memory Efficient Fine Tuning via Instance-Aware Token Ditching},
  author = {Zeng, Runjia and Wang, Qifan and Guan, Qiang and Tang, Ruixiang and Huang, Lifu and Wang, Zhenting and Zhang, Xueling
            and Han, Cheng and Liu, Dongfang},
  booktitle = {International Conference on Learning Representations},
  year = {2026},
  url = {https://arxiv.org/abs/2601.19739}
}
```"""


@dataclasses.dataclass
class CardFacts:
    """What a card says beyond the model's own config.

    Attributes:
        tokenseek: the settings of the run.
        log: the trainer's log history.
        steps: optimizer steps made.
        measured: rows and tokens of the micro-batch whose saved bytes were counted last, and these bytes; None: none was.
        ordinary: what ordinary full fine-tuning would need for that micro-batch. None: not estimated.
        own: what the run itself needs for it, by the same reckoning. None: not estimated.
        recipe: of the run, as plain data; None: there was none.
        metadata: further entries of the head, e.g. {"license": "apache-2.0"}.
    """

    tokenseek: TokenSeekConfig
    log: list[dict[str, Any]]
    steps: int
    measured: tuple[int, int, int] | None = None
    ordinary: StepEstimate | None = None
    own: StepEstimate | None = None
    recipe: dict[str, Any] | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


def may_write(folder: str | Path) -> bool:
    """Whether the folder's card is ours, or not there."""
    path = Path(folder) / CARD_NAME
    return not path.is_file() or MARK in path.read_text(encoding="utf-8", errors="replace")


def write_card(folder: str | Path, model, facts: CardFacts) -> None:
    """Write the card, also over one that another library has just made; ask `may_write` before that library saves."""
    write_whole(Path(folder) / CARD_NAME, model_card(Path(folder), model, facts))


def model_card(folder: Path, model, facts: CardFacts) -> str:
    """The card's text. `model` is a transformers model or a PeftModel."""
    is_adapter = hasattr(model, "peft_config")
    lm = model.get_base_model() if is_adapter else model
    base = lm.config._name_or_path
    on_hub = bool(base) and not Path(base).exists()
    name = facts.metadata.get("model_name") or folder.resolve().name
    head = {
        "library_name": "peft" if is_adapter else "transformers",
        **({"base_model": base} if on_hub else {}),
        "tags": ["tokenseek"],
        **{key: value for key, value in facts.metadata.items() if value is not None and key != "model_name"},
    }
    what = "An adapter of" if is_adapter else "A fine-tuned"
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        MARK,
        f"# {name}",
        f"{what} {f'[{base}](https://huggingface.co/{base})' if on_hub else f'`{base or type(lm).__name__}`'}, trained with "
        "[TokenSeek](https://arxiv.org/abs/2601.19739): in every step activations were kept for a part of the tokens only.",
        _table(_rows(facts)),
        "## How to load it",
        f"```python\n{_loading(folder, base, lm, is_adapter)}\n```",
        "## Settings" if facts.recipe is None else "## Recipe",
        f"```yaml\n{_settings(facts)}```",
        "## Citation",
        CITATION,
    ]
    return "\n\n".join(parts) + "\n"


def _rows(facts: CardFacts) -> list[tuple[str, str]]:
    config, versions = facts.tokenseek, provenance()["versions"]
    rows = [
        ("tokens kept, asked for", f"{config.ratio:.1%}" + (f" in {config.parts} parts" if config.parts > 1 else "")),
        ("tokens kept, measured", _mean(facts.log, "kept_fraction", ".1%")),
        ("of those with a loss", _mean(facts.log, "supervised_fraction", ".1%")),
        ("chosen by", f"scorer {config.scorer}, selection {config.selection}, from {config.select_from} tokens"),
        ("optimizer steps", str(facts.steps)),
        ("held-out loss", _last(facts.log, "eval_loss")),
    ]
    if facts.measured is not None:
        n_rows, tokens, saved = facts.measured
        text = f"{saved / MIB:.1f} MiB measured, for a micro-batch of {n_rows} x {tokens} tokens"
        if facts.ordinary is not None:
            text += f"; ordinary full fine-tuning: {facts.ordinary.saved / MIB:.1f} MiB estimated"
        rows.append(("kept for the backward", text))
    rows.append(("time of an optimizer step", _time(facts)))
    rows.append(("peak device memory", _last(facts.log, "peak_memory_mib", ".0f", " MiB")))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return [(name, text) for name, text in rows if text]


def _time(facts: CardFacts) -> str:
    """Measured, and that of ordinary full fine-tuning if time follows the matrix products."""
    text = _mean(facts.log, "step_seconds", ".3g", " s measured")
    if not text or facts.ordinary is None or facts.own is None:
        return text
    times = facts.ordinary.operations / facts.own.operations
    seconds = statistics.fmean(entry["step_seconds"] for entry in facts.log if "step_seconds" in entry) * times
    return f"{text}; ordinary full fine-tuning: {times:.2f} times the operations, so about {seconds:.3g} s, estimated"


def _mean(log, key, form, unit="") -> str:
    values = [entry[key] for entry in log if key in entry]
    return format(statistics.fmean(values), form) + unit if values else ""


def _last(log, key, form=".4f", unit="") -> str:
    values = [entry[key] for entry in log if key in entry]
    return format(values[-1], form) + unit if values else ""


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _loading(folder: Path, base: str, lm, is_adapter: bool) -> str:
    model_class = type(lm).__name__ if hasattr(transformers, type(lm).__name__) else "AutoModelForCausalLM"
    if not is_adapter:
        return f'from transformers import {model_class}\n\nmodel = {model_class}.from_pretrained("{folder}")'
    return (
        f"from peft import PeftModel\nfrom transformers import {model_class}\n\n"
        f'model = {model_class}.from_pretrained("{base}")\nmodel = PeftModel.from_pretrained(model, "{folder}")'
    )


def _settings(facts: CardFacts) -> str:
    if facts.recipe is None:
        return yaml.safe_dump({"tokenseek": facts.tokenseek.to_dict()}, sort_keys=False)
    sections = {
        name: {key: value for key, value in section.items() if value is not None}
        if isinstance(section, dict)
        else section
        for name, section in facts.recipe.items()
        if section
    }
    return yaml.safe_dump(sections, sort_keys=False)
