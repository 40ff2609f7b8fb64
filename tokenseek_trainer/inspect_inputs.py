"""What `tokenseek inspect` looks at: the model, the rows and the rule, checked before the model is loaded."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TokenSeekConfig
from .data import encode_rows, load_rows
from .errors import ConfigError, InputError
from .evaluation import checkpoint_tokenizer, load_checkpoint
from .inspection import TokenReport, check_output, inspect_tokens
from .recipe import Recipe, load_recipe, tokenseek_settings
from .shipped import names_recipe


DEFAULT_ROWS = "0:8"


@dataclass(frozen=True)
class Request:
    """A request as the command line makes it.

    Args:
        model: a folder or hub name, or a recipe (.yaml), which then names the model.
        texts: plain texts to look at. Empty: rows of data.
        data: a .jsonl or .json file, or hub name. None: the recipe's training data.
        rows: which of them, START:STOP; None: the first 8.
        recipe: a recipe, for its templates, rule and data. None: the rule is the default, and rows have the columns prompt and
            completion, or text.
        output: the page to write. None: nothing is written.
        dtype: of the weights; None: the recipe's, or as saved.
        settings: `--key value` settings of the recipe, or of the rule if there is no recipe.
    """

    model: str
    texts: list[str] = dataclasses.field(default_factory=list)
    data: str | None = None
    rows: str | None = None
    recipe: str | None = None
    output: str | None = None
    dtype: str | None = None
    settings: list[str] = dataclasses.field(default_factory=list)


def run_request(request: Request) -> TokenReport:
    """Check the request, load the model, and look.

    Raises:
        ConfigError, InputError: for anything that is missing or wrong, before the model is loaded.
    """
    if request.output is not None:
        check_output(Path(request.output))
    recipe, model, config = _rule(request)
    if bool(request.texts) == bool(request.data) and (request.texts or recipe is None):
        raise ConfigError(
            "Say what to look at: either --text, or --data FILE, or a recipe, whose training data are then shown."
        )
    if request.texts:
        if request.rows is not None:
            raise ConfigError("--rows chooses rows of a data file, so it does not go with --text.")
        first, rows, source = 0, [{"text": text} for text in request.texts], "text of the command line"
        recipe = recipe and dataclasses.replace(recipe, trainer="trainer")
    else:
        first, rows, source = _rows(request, recipe)
    dtype = request.dtype or (recipe.model.dtype if recipe else "auto")
    try:
        tokenizer = checkpoint_tokenizer(model)
    except (OSError, ValueError) as error:
        where = (
            "has no tokenizer" if Path(model).is_dir() else "is not a folder here, nor a hub name that could be read"
        )
        raise ConfigError(f"The model {model!r} {where}: {str(error).strip().splitlines()[0]}") from None
    if recipe is not None and recipe.trainer == "sft":
        return _inspect_sft(recipe, model, dtype, rows, first, config, source)
    data = recipe.data if recipe is not None and not request.texts else None
    numbers, examples = encode(rows, tokenizer, data, first)
    loaded, tokenizer = load_checkpoint(model, dtype)
    return inspect_tokens(loaded, tokenizer, examples, config, numbers=numbers, source=source)


def parse_rows(text: str) -> tuple[int, int]:
    """START and STOP of "START:STOP", or of a single number.

    Raises:
        ConfigError: it is neither, or no row lies between.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    start, stop = (int(match[1]), int(match[2] or int(match[1]) + 1)) if match else (0, 0)
    if start >= stop:
        raise ConfigError(f"rows must be START:STOP with START < STOP, such as 0:20, or one number; got {text!r}.")
    return start, stop


def encode(rows: list[dict], tokenizer, data: Any, first: int) -> tuple[list[int], list[dict]]:
    """The rows' numbers and their examples, by the templates of a recipe's data section (None: none).

    As in training, rows are left out of which nothing supervised remains within max_length.
    """
    names = ("prompt", "completion", "text", "max_length", "train_on_prompt")
    settings = {} if data is None else {name: getattr(data, name) for name in names}
    examples = encode_rows(rows, tokenizer, **settings)
    if len(examples) == len(rows):
        return list(range(first, first + len(rows))), examples
    numbers = []
    for number, row in enumerate(rows, start=first):
        try:
            encode_rows([row], tokenizer, **settings)
            numbers.append(number)
        except InputError:  # nothing supervised is left: any other fault was met above
            continue
    return numbers, examples


def _rule(request: Request) -> tuple[Recipe | None, str, TokenSeekConfig]:
    """The recipe, the model's name, and the rule."""
    is_recipe = names_recipe(request.model)
    if is_recipe and request.recipe is not None:
        raise ConfigError(f"Give one recipe: {request.model} is one, and --recipe {request.recipe} another.")
    path = request.model if is_recipe else request.recipe
    if path is None:
        return None, request.model, tokenseek_settings(request.settings)
    recipe = load_recipe(path, request.settings)
    return recipe, recipe.model.name if is_recipe else request.model, recipe.tokenseek


def _rows(request: Request, recipe: Recipe | None) -> tuple[int, list[dict], str]:
    """The number of the first row, the rows, and where they are from."""
    source = request.data if request.data or recipe is None else recipe.resolve(recipe.data.train)
    assert source is not None  # without a recipe there are data
    settings: dict[str, Any] = (
        {} if recipe is None else {"split": recipe.data.train_split, "exclude": recipe.data.exclude}
    )
    start, stop = parse_rows(request.rows or DEFAULT_ROWS)
    rows = load_rows(source, **settings)
    if start >= len(rows) or (request.rows is not None and stop > len(rows)):
        raise InputError(
            f"--rows {request.rows or DEFAULT_ROWS} is out of range: {source} has rows 0 to {len(rows) - 1}."
        )
    return start, rows[start:stop], Path(source).name


def _inspect_sft(recipe, model, dtype, rows, first, config, source) -> TokenReport:
    """Rows as TRL's SFTTrainer prepares them, so that templates of conversations and loss masks are those of training."""
    from .run import build_sft_trainer

    training = {**recipe.training, "packing": False, "padding_free": False, "report_to": "none", "eval_strategy": "no"}
    recipe = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, name=model, dtype=dtype), training=training
    )
    trainer = build_sft_trainer(recipe, None, {"train": rows})
    examples = list(trainer.train_dataset)
    if len(examples) < len(rows):  # it does not say which
        source += f", {len(rows) - len(examples)} rows without a loss left out, the others renumbered"
    return inspect_tokens(
        trainer.model,
        trainer.processing_class,
        examples,
        config,
        numbers=list(range(first, first + len(examples))),
        collator=trainer.data_collator,
        source=source,
    )
