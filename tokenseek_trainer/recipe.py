"""Recipes: one YAML file that describes a run, and command-line settings that win over it."""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from .config import TokenSeekConfig
from .errors import ConfigError, closest
from .shipped import find_recipe


class _Loader(yaml.SafeLoader):
    """YAML as in version 1.2: 1e-5 is a number, and no, yes, on, off ("save_strategy: no") and 10:20 ("rows: 10:20") are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:int")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+.0123456789")
)


TASKS = ("causal-lm", "sequence-classification")


@dataclass(frozen=True)
class ModelSettings:
    """The model to fine-tune.

    Args:
        name: a local folder or a hub name.
        task: causal-lm, or sequence-classification: one label of data.labels for each row.
        dtype: dtype of the weights: float32, bfloat16, float16, or auto (as saved).
        attn_implementation: sdpa, eager, flash_attention_2, ... None: transformers' choice.
    """

    name: str = ""
    task: str = "causal-lm"
    dtype: str = "auto"
    attn_implementation: str | None = None

    def __post_init__(self):
        if self.task not in TASKS:
            raise ConfigError(f"model.task must be one of {TASKS}, got {self.task!r}.{closest(self.task, TASKS)}")


@dataclass(frozen=True)
class DataSettings:
    """What to train on. See `encode_rows` for the templates.

    Args:
        train: a .jsonl or .json file, relative to the recipe or to the working directory, or a hub name.
        eval: held-out rows, likewise. None: no evaluation.
        train_split, eval_split: splits of a hub data set.
        train_rows, eval_rows: use only the first rows. None: all.
        prompt, completion, text: templates. None: the columns of these names. A list of prompts: the first whose columns are
            all filled.
        label: of sequence classification: the column that holds a row's class.
        labels: of sequence classification: the classes as they stand in that column, in the order of their numbers.
        exclude: drop rows whose column has one of some values: {data_source: [airoboros]}. None: keep all.
        max_length: cut rows to this many tokens. None: no limit.
        train_on_prompt: whether prompt tokens carry a loss.
    """

    train: str = ""
    eval: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    train_rows: int | None = None
    eval_rows: int | None = None
    prompt: str | list | None = None
    completion: str | None = None
    text: str | None = None
    label: str = "label"
    labels: list | None = None
    exclude: dict | None = None
    max_length: int | None = 2048
    train_on_prompt: bool = False

    def __post_init__(self):
        for name in ("train_rows", "eval_rows", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} must be an integer >= 1, or null for no limit; got {value}.")


@dataclass(frozen=True)
class EvaluationSettings:
    """Benchmarks and metrics that a run is scored on (extra `eval`). An empty section: none.

    Args:
        suite: paper, quick, or TASK[:SHOTS],...
        every: optimizer steps between evaluations. None: at the end of training only.
        limit: questions per task. None: all; a limited result is marked as such.
        data: folder with local copies of the data, relative to the recipe or to the working directory. None: the hub.
        batch_size: sequences scored at once.
        chat_template: ask through the model's chat template.
        metrics: of sequence classification, on data.eval: what `evaluate.load` takes, a hub name or a folder relative to the
            recipe, with the arguments of its `compute`. None: the loss alone.
    """

    suite: str = ""
    every: int | None = None
    limit: int | None = None
    data: str | None = None
    batch_size: int = 8
    chat_template: bool = False
    metrics: dict | None = None


@dataclass(frozen=True)
class InspectionSettings:
    """Pages that show which tokens of some training rows are kept. An empty section: none.

    Args:
        rows: START:STOP of the training rows.
        every: optimizer steps between pages. None: at the start and the end of training only.
        folder: where the pages go. None: `inspect` in output_dir.
    """

    rows: str = ""
    every: int | None = None
    folder: str | None = None


TRAINERS = ("trainer", "sft")
# Settings of optional packages have no class here: their own classes check them when the run is built.
SECTIONS: dict[str, Any] = {
    "model": ModelSettings,
    "data": DataSettings,
    "tokenseek": TokenSeekConfig,
    "training": TrainingArguments,
    "peft": None,
    "quantization": None,
    "evaluation": EvaluationSettings,
    "inspection": InspectionSettings,
}


@dataclass(frozen=True)
class Recipe:
    """A run: model, data, method and training arguments.

    Attributes:
        training: keyword arguments of `transformers.TrainingArguments`, or of `trl.SFTConfig` with `trainer="sft"`.
        peft: `method` ("lora", "dora" or "loha") and keyword arguments of its PEFT config. Empty: full fine-tuning.
        quantization: keyword arguments of `transformers.BitsAndBytesConfig`. Empty: none.
        evaluation: benchmarks that the run is scored on.
        inspection: rows of which the run writes token reports.
        trainer: "trainer" (TokenSeekTrainer), or "sft" (TokenSeekSFTTrainer, which also takes conversations).
        path: the file it was read from, None if it was built in code.
    """

    model: ModelSettings
    data: DataSettings
    tokenseek: TokenSeekConfig = field(default_factory=TokenSeekConfig)
    training: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    inspection: InspectionSettings = field(default_factory=InspectionSettings)
    trainer: str = "trainer"
    path: Path | None = None

    def resolve(self, source: str | None) -> str | None:
        """A path as seen from the recipe's folder if it is there, else unchanged."""
        if source is None or self.path is None:
            return source
        beside = self.path.parent / source
        return str(beside) if beside.exists() else source

    def to_dict(self) -> dict:
        return {
            "model": dataclasses.asdict(self.model),
            "data": dataclasses.asdict(self.data),
            "tokenseek": self.tokenseek.to_dict(),
            "training": self.training,
            "peft": self.peft,
            "quantization": self.quantization,
            "evaluation": dataclasses.asdict(self.evaluation),
            "inspection": dataclasses.asdict(self.inspection),
            "trainer": self.trainer,
        }


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe and apply command-line settings.

    Args:
        path: of the file, or the name of a shipped recipe.
        overrides: `--section.key value`, `--section.key=value`, or `--key value` where only one section has the key.
            Values are YAML, so `1e-5` is a float and `{a: 1}` a mapping; a key of a mapping can be set by a further dot.

    Raises:
        ConfigError: no such file, invalid YAML, an unknown section or key, or a value of the wrong type.
    """
    path = find_recipe(path, overrides)
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {path} is not valid YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"The recipe {path} must hold the sections {', '.join(SECTIONS)}.")
    settings["trainer"] = settings.get("trainer", "trainer")
    for section, values in settings.items():
        if section == "trainer":
            continue
        if section not in SECTIONS:
            raise ConfigError(
                f"{path} has an unknown section {section!r}.{closest(section, SECTIONS)} Sections are: {', '.join(SECTIONS)}."
            )
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"The section {section!r} of {path} must hold keys and values, got {values!r}.")
        for key, value in (values or {}).items():
            if section != "training" or settings["trainer"] != "sft":
                _check_key(section, key)
            _check_type(section, key, value)
    settings = {
        "trainer": settings["trainer"],
        **{section: dict(settings.get(section) or {}) for section in SECTIONS},
    }
    for name, text in parse_overrides(overrides):
        _set(settings, name, text)
    if settings["trainer"] not in TRAINERS:
        raise ConfigError(f"trainer must be one of {TRAINERS}, got {settings['trainer']!r}.")
    if settings["trainer"] == "trainer":
        for key in settings["training"]:
            _check_key("training", key)
    for section, key, what in (
        ("model", "name", "a folder or hub name"),
        ("data", "train", "a .jsonl file or hub name"),
    ):
        if not settings[section].get(key):
            raise ConfigError(f"The recipe needs {section}.{key}: {what}.")
    _check_task(settings)
    settings["training"].setdefault("output_dir", f"runs/{path.stem}")
    return Recipe(
        model=ModelSettings(**settings["model"]),
        data=DataSettings(**settings["data"]),
        tokenseek=TokenSeekConfig.from_dict(settings["tokenseek"]),
        training=settings["training"],
        peft=settings["peft"],
        quantization=settings["quantization"],
        evaluation=EvaluationSettings(**settings["evaluation"]),
        inspection=InspectionSettings(**settings["inspection"]),
        trainer=settings["trainer"],
        path=path,
    )


def _check_task(settings: dict) -> None:
    """Refuse settings of one task in a recipe of another."""
    classifies = settings["model"].get("task") == "sequence-classification"
    if classifies and not settings["data"].get("labels"):
        raise ConfigError(
            "model.task is sequence-classification, so data.labels must name the classes, such as [no, yes]."
        )
    if classifies and settings["trainer"] == "sft":
        raise ConfigError("trainer: sft trains language models. Leave it out for sequence-classification.")
    if classifies and settings["evaluation"].get("suite"):
        raise ConfigError("evaluation.suite asks a language model; a classifier is scored by evaluation.metrics.")
    if settings["evaluation"].get("metrics") and not (classifies and settings["data"].get("eval")):
        raise ConfigError(
            "evaluation.metrics need model.task: sequence-classification, and held-out rows in data.eval."
        )


def tokenseek_settings(overrides: list[str]) -> TokenSeekConfig:
    """The rule that command-line settings alone describe, where there is no recipe: `--ratio 0.2 --selection topk`."""
    settings = {
        name.removeprefix("tokenseek."): _parse(text, as_text=False) for name, text in parse_overrides(overrides)
    }
    return TokenSeekConfig.from_dict(settings)


def parse_overrides(arguments: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    """Split `--key value` and `--key=value` pairs; a key without a value is "true"."""
    pairs, position = [], 0
    while position < len(arguments):
        argument = arguments[position]
        if not argument.startswith("--") or len(argument) == 2:
            raise ConfigError(f"Expected --key value, got {argument!r}. Settings are written --section.key value.")
        name, has_value, text = argument[2:].partition("=")
        position += 1
        if not has_value:
            if position < len(arguments) and not arguments[position].startswith("--"):
                text, position = arguments[position], position + 1
            else:
                text = "true"
        pairs.append((name.replace("-", "_"), text))
    return pairs


def _set(settings: dict, name: str, text: str) -> None:
    if name == "trainer":
        settings["trainer"] = text
        return
    section, _, rest = name.partition(".")
    if section not in SECTIONS:
        first = name.partition(".")[0]
        owners = [s for s in SECTIONS if first in setting_names(s)]
        if not owners:
            known = [key for s in SECTIONS for key in setting_names(s)]
            raise ConfigError(f"There is no setting {first!r}.{closest(first, known)}")
        if len(owners) > 1:
            raise ConfigError(f"{first!r} is ambiguous. Write {' or '.join(f'--{s}.{first}' for s in owners)}.")
        section, rest = owners[0], name
    if not rest:
        raise ConfigError(f"{name!r} is a section. Write --{name}.key value.")
    key, _, inner = rest.partition(".")
    if section != "training" or settings["trainer"] != "sft":  # SFTConfig has more settings than TrainingArguments
        _check_key(section, key)
    value = _parse(text, as_text=not inner and _kinds(section, key) in ((str,), (str, type(None))))
    if inner:
        current = settings[section].get(key)
        value = {**(current if isinstance(current, dict) else {}), inner: value}
    _check_type(section, key, value)
    settings[section][key] = value


def setting_names(section: str) -> list[str]:
    """The settings of a section; none for a section whose settings are another package's."""
    if SECTIONS[section] is None:
        return []
    return [f.name for f in dataclasses.fields(SECTIONS[section]) if f.init]


def _check_key(section: str, key: str) -> None:
    if SECTIONS[section] is not None and key not in setting_names(section):
        raise ConfigError(f"The section {section!r} has no setting {key!r}.{closest(key, setting_names(section))}")


def _parse(text: str, as_text: bool):
    """A command-line value as YAML reads it; a text setting takes all but null as it stands ("{question}", "010")."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return text if as_text and value is not None else value


def _kinds(section: str, key: str) -> tuple[type, ...] | None:
    """The plain types that a setting takes; None if its annotation says more, or is another package's."""
    if key not in setting_names(section):
        return None
    annotation = typing.get_type_hints(SECTIONS[section])[key]
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    kinds = tuple(typing.get_origin(member) or member for member in members)
    return kinds if all(kind in (int, float, bool, str, dict, list, type(None)) for kind in kinds) else None


def _check_type(section: str, key: str, value) -> None:
    """Refuse a value of a wrong type; TokenSeekConfig checks its own."""
    kinds = _kinds(section, key)
    if SECTIONS[section] is TokenSeekConfig or kinds is None:
        return
    accepted = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if isinstance(value, bool) and bool not in kinds:
        accepted = False
    if not accepted:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"{section}.{key} must be {names}, got {value!r} ({type(value).__name__}).")


def _is_union(annotation) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
