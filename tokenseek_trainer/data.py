"""From raw rows (prompt and completion, or plain text) to tokens and labels."""

import json
import string
from pathlib import Path

from .collator import TOKEN_COLUMNS
from .errors import InputError
from .instances import IGNORE_INDEX


ENCODED_COLUMNS = ("input_ids", "labels", "completion_mask", *TOKEN_COLUMNS)


SFT_COLUMNS = ("messages", "prompt", "completion", "text", *ENCODED_COLUMNS)


def load_rows(
    source: str, split: str = "train", limit: int | None = None, exclude: dict[str, list] | None = None
) -> list[dict]:
    """Read rows from a local .jsonl or .json file, or from a data set of the hub.

    Args:
        source: a path that ends in .jsonl (one object a line) or .json (a list of objects), or a hub name, which needs
            the `datasets` package.
        split: of a hub data set.
        limit: read only the first rows that are not excluded. None: all.
        exclude: column to values; rows that have one of the values in the column are left out.

    Raises:
        InputError: the file does not exist, is not valid, holds no rows, or lacks a column to exclude by.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise InputError(f"The data file {source} does not exist (looked in {path.parent.resolve()}).")
        rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_json(path)
    elif path.is_file() or path.suffix in (".csv", ".tsv", ".parquet", ".txt", ".yaml", ".yml"):
        raise InputError(f"The data {source} must be a .jsonl or .json file, or a data set of the hub.")
    else:
        rows = _load_from_hub(source, split)
    if not rows:
        raise InputError(f"The data {source} hold no rows.")
    for column, values in (exclude or {}).items():
        if not any(column in row for row in rows):
            raise InputError(
                f"data.exclude names the column {column!r}, but the rows have: {', '.join(sorted(rows[0]))}."
            )
        unwanted = values if isinstance(values, list) else [values]
        rows = [row for row in rows if row.get(column) not in unwanted]
    if not rows:
        raise InputError(f"data.exclude leaves no row of {source}.")
    return rows[:limit]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}.") from None


def _read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(
        _read_text(path).split("\n"), start=1
    ):  # splitlines() would split inside strings too
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"Line {number} of {path} is not JSON: {error}.") from None
        if not isinstance(rows[-1], dict):
            raise InputError(f"Line {number} of {path} must hold an object with columns, got {line.strip()[:60]}.")
    return rows


def _read_json(path: Path) -> list[dict]:
    try:
        rows = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} must hold a list of objects with columns; one object a line is a .jsonl file.")
    return rows


def _load_from_hub(source: str, split: str) -> list[dict]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"{source!r} is not a .jsonl or .json file, and loading it from the hub needs the datasets package: "
            "pip install datasets"
        ) from None
    try:
        return load_dataset(source, split=split).to_list()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source!r} is not a .jsonl or .json file, and could not be loaded from the hub: {str(error).splitlines()[0]}"
        ) from error


def encode_rows(
    rows: list[dict],
    tokenizer,
    *,
    prompt: str | list[str] | None = None,
    completion: str | None = None,
    text: str | None = None,
    max_length: int | None = None,
    train_on_prompt: bool = False,
) -> list[dict]:
    """Tokenise rows. A completion ends with eos; the labels of its prompt are -100.

    Rows that hold `input_ids` already (the output of `tokenseek score`) are only cut to `max_length`.

    Args:
        prompt, completion: templates with the row's columns in braces, such as "Question: {question}\\nAnswer:". They
            are tokenised apart, so that no token straddles the border. Of a list of prompts each row takes the first whose
            columns are all filled, else the last.
        text: a template for rows without a prompt. With no template at all, rows must have the columns prompt and
            completion, or text.
        max_length: cut longer rows at the end. None: no limit.
        train_on_prompt: whether prompt tokens carry a loss too.

    Returns:
        One dict per row with `input_ids` and `labels`, and the row's token columns if it has any. Rows of which nothing
        supervised is left after cutting are dropped.

    Raises:
        InputError: a template names a column that the rows lack, only one of prompt and completion is given, or no row
            is left.
    """
    if (prompt is None) != (completion is None):
        raise InputError("prompt and completion belong together: give both templates, or text alone.")
    if prompt is not None and text is not None:
        raise InputError("Give either prompt and completion, or text, not both.")
    encoded = []
    for row in rows:
        example = _encode(row, tokenizer, prompt, completion, text, train_on_prompt)
        example = {k: v if k == "token_indices" else v[:max_length] for k, v in example.items()}
        if max_length is not None and "token_indices" in example:
            example["token_indices"] = [i for i in example["token_indices"] if i < max_length]
        if any(label != IGNORE_INDEX for label in example["labels"][1:]):
            encoded.append(example)
    if not encoded:
        raise InputError(
            f"None of the {len(rows)} rows has a supervised token left within max_length={max_length}. Raise max_length, "
            "or check the templates."
        )
    return encoded


def encode_classified(
    rows: list[dict], tokenizer, *, text: str | None, label: str, labels: list, max_length: int | None = None
) -> list[dict]:
    """Tokenise rows for sequence classification.

    Args:
        text: a template with the row's columns in braces. None: "{text}".
        label: the column that holds a row's class.
        labels: the classes in the order of their numbers.
        max_length: cut longer texts; special tokens at their end stay. None: no limit.

    Returns:
        One dict per row with `input_ids` and `label`, and the row's token columns if it has any. Rows that hold `input_ids`
        already (the output of `tokenseek score`) stay as they are.

    Raises:
        InputError: a column is missing, or a row's class is not among `labels`.
    """
    return [
        _encode_classified(row, number, tokenizer, text or "{text}", label, labels, max_length)
        for number, row in enumerate(rows)
    ]


def _encode_classified(row, number, tokenizer, text, label, labels, max_length) -> dict:
    if "input_ids" in row:
        return {name: row[name] for name in ("input_ids", "label", *TOKEN_COLUMNS) if row.get(name) is not None}
    if row.get(label) not in labels:
        raise InputError(
            f"Row {number} has {row.get(label)!r} in the column {label!r} (columns: {', '.join(row)}); data.labels are: "
            f"{', '.join(map(repr, labels))}."
        )
    tokens = tokenizer(_fill(text, row), truncation=max_length is not None, max_length=max_length).input_ids
    columns = {name: row[name] for name in TOKEN_COLUMNS if row.get(name) is not None}
    return {"input_ids": tokens, "label": labels.index(row[label]), **columns}


def sft_row(
    row: dict, *, prompt: str | list[str] | None = None, completion: str | None = None, text: str | None = None
) -> dict:
    """A row as TRL's SFTTrainer takes it: the templates filled in, or without templates the row itself.

    Raises:
        InputError: a template names a column that the row lacks, or without templates it has none that SFTTrainer reads.
    """
    if prompt is not None and completion is not None:
        return {"prompt": _fill(prompt, row), "completion": _fill(completion, row)}
    if text is not None:
        return {"text": _fill(text, row)}
    found = {name: row[name] for name in SFT_COLUMNS if name in row}
    if not found.keys() & {"messages", "text", "input_ids"} and not {"prompt", "completion"} <= found.keys():
        raise InputError(
            f"The rows have the columns {', '.join(sorted(row))}. Expected messages, or prompt and completion, or text; or name the "
            "columns in templates: data.prompt and data.completion, or data.text."
        )
    return found


def _encode(row, tokenizer, prompt, completion, text, train_on_prompt) -> dict:
    if "input_ids" in row:
        example = {name: row[name] for name in ENCODED_COLUMNS if row.get(name) is not None}
        return {"labels": list(row["input_ids"]), **example}
    if prompt is None and text is None:
        if "prompt" in row and "completion" in row:
            prompt, completion = "{prompt}", "{completion}"
        elif "text" in row:
            text = "{text}"
        else:
            raise InputError(
                f"The rows have the columns {', '.join(sorted(row))}. Expected prompt and completion, or text; or name "
                "the columns in templates: data.prompt and data.completion, or data.text."
            )
    eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if text is not None:
        tokens = _without_end(tokenizer(_fill(text, row)).input_ids, eos) + eos
        return {"input_ids": tokens, "labels": list(tokens)}
    head = _without_end(tokenizer(_fill(prompt, row)).input_ids, eos)
    tail = tokenizer(_fill(completion, row), add_special_tokens=False).input_ids + eos
    labels = list(head) if train_on_prompt else [IGNORE_INDEX] * len(head)
    example = {"input_ids": head + tail, "labels": labels + tail}
    return {**example, **{name: row[name] for name in TOKEN_COLUMNS if row.get(name) is not None}}


def _without_end(tokens: list[int], eos: list[int]) -> list[int]:
    """Some tokenizers append eos by themselves."""
    return tokens[:-1] if eos and tokens[-1:] == eos else tokens


def _fill(template: str | list[str], row: dict) -> str:
    if isinstance(template, list):
        filled = [t for t in template if all(row.get(name) for name in _columns(t))]
        return _fill((filled or template[-1:])[0], row)
    names = _columns(template)
    missing = [name for name in names if name not in row]
    if missing:
        raise InputError(
            f"The template {template!r} names the column {missing[0]!r}, but the rows have: {', '.join(sorted(row))}."
        )
    return template.format(**{name: "" if row[name] is None else row[name] for name in names})


def _columns(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InputError(f"The template {template!r} is not valid: {error}. Write {{{{ and }}}} for braces.") from None
