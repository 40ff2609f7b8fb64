"""See which tokens matter: the scores of a few rows, and what the selection keeps of them.

Letters: n tokens of a row.
"""

import base64
import dataclasses
import html
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .collator import TOKEN_COLUMNS, TokenSeekCollator
from .config import TokenSeekConfig
from .errors import InputError, UnsupportedModelError
from .evaluation import same_random_numbers_after
from .files import write_whole
from .inspect_terminal import has_color, row_text
from .instances import Instances
from .quantized import cpu_packing_off
from .scoring import SeekResult
from .selection import candidates, select
from .session import TokenSeekSession


TEMPLATE = Path(__file__).with_name("inspect_page.html")
N_BINS = 10  # of the distributions by relative position


@dataclass(frozen=True)
class TokenRow:
    """One row and its scores. Tensors are on the CPU.

    Attributes:
        number: the row's number in its data.
        tokens: n texts. A token that ends in the middle of a character has the text ""; the last one of them has it all.
        input_ids: n token ids.
        instances: the row as a batch of one instance, (1, n).
        causal: whether position j predicts token j + 1.
        context: (n,) attention received (I1), in float32 or better; None if the model does not show its attention.
        gradient: (n,) gradient magnitude (I2), likewise.
        loss: mean cross-entropy over the supervised positions.
    """

    number: int
    tokens: list[str]
    input_ids: list[int]
    instances: Instances
    causal: bool
    context: torch.Tensor | None
    gradient: torch.Tensor
    loss: float

    @property
    def supervised(self) -> torch.Tensor:
        """(n,) bool: positions that carry a loss."""
        return self.instances.supervised[0]

    @property
    def response(self) -> torch.Tensor:
        """(n,) bool: tokens that some position learns to predict (the first goes with the second); the rest is the prompt."""
        return self.instances.learned(self.causal)[0]

    def scores(self, config: TokenSeekConfig, step: int = 0) -> torch.Tensor:
        """(n,) float64: what `select` ranks or draws by."""
        return self._found().scores(self.instances, config, step)[0]

    def kept(self, config: TokenSeekConfig, step: int = 0) -> list[int]:
        """The positions that a training step keeps, in ascending order."""
        scores = self._found().scores(self.instances, config, step)
        chosen = select(scores, self.instances, config, causal=self.causal, step=step)
        return chosen.indices[chosen.mask].tolist()

    def _found(self) -> SeekResult:
        context = None if self.context is None else self.context[None]
        return SeekResult(context=context, gradient=self.gradient[None])


@dataclass(frozen=True)
class TokenReport:
    """What `inspect_tokens` found.

    Attributes:
        rows: the rows that were looked at.
        config: the rule by which the report marks tokens.
        model: the model's name.
        source: where the rows are from.
        step: the optimizer step whose draw is shown.
    """

    rows: list[TokenRow]
    config: TokenSeekConfig
    model: str
    source: str
    step: int

    def by_position(self) -> dict[str, list[float]]:
        """How much of each score lies in each tenth of a row, from its start to its end: shares, mean over rows."""
        found = {}
        for name in ("context", "gradient"):
            values = [(row, getattr(row, name)) for row in self.rows if getattr(row, name) is not None]
            if values:
                found[name] = torch.stack([_bin_shares(score.double()) for _, score in values]).mean(0).tolist()
        return found

    def overlap(self) -> float | None:
        """Jaccard index of the best tokens by context and the best by gradient, at the config's ratio; mean over rows.

        Both are taken from the tokens that `config.select_from` allows. None if there are no context scores.
        """
        if self.rows[0].context is None:
            return None
        found = []
        for row in self.rows:
            sets = [
                set(row.kept(dataclasses.replace(self.config, scorer=scorer, selection="topk", reuse_scores=False)))
                for scorer in ("context", "gradient")
            ]
            found.append(len(sets[0] & sets[1]) / max(1, len(sets[0] | sets[1])))
        return sum(found) / len(found)

    def to_html(self) -> str:
        """The page: one file that needs nothing else."""
        data = json.dumps(self._to_dict(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        head, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("{{title}}")
        middle, _, end = rest.partition("{{data}}")
        title = html.escape(f"Tokens that matter: {self.model}")
        return "".join([head, title, middle, data.replace("<", "\\u003c"), end])  # no "</script>" of a row ends it

    def save(self, path: str | Path) -> None:
        """Write the page so that a reader sees all of it or nothing."""
        path = Path(path)
        check_output(path)
        write_whole(path, self.to_html())

    def _repr_html_(self) -> str:
        """The page in a frame of its own, as notebooks show it; where they strip frames, a line that says what to do."""
        return (
            "<p>The tokens show here if this notebook is trusted. <code>report.save('report.html')</code> writes them to a "
            "page of their own.</p>"
            f'<iframe sandbox="allow-scripts" title="Tokens that matter" style="width:100%;height:720px;border:0" '
            f'srcdoc="{html.escape(self.to_html())}"></iframe>'
        )

    def to_terminal(self, color: bool | None = None) -> str:
        """The rows as text: kept tokens in «guillemets», or with colour underlined, and all shaded by their score.

        Args:
            color: None: if standard output is a terminal and NO_COLOR is not set.
        """
        color = has_color() if color is None else color
        parts = [f"{self.model}: {self.source}", describe(self.config, self.step), ""]
        parts += [row_text(row, self.config, self.step, color) for row in self.rows]
        for name, shares in self.by_position().items():
            parts.append(f"{name:8} by tenth of the row: " + " ".join(f"{100 * share:3.0f}%" for share in shares))
        if (overlap := self.overlap()) is not None:
            parts.append(f"overlap of the best by context and the best by gradient (Jaccard): {overlap:.2f}")
        return "\n".join(parts) + "\n"

    def _to_dict(self) -> dict:
        return {
            "model": self.model,
            "source": self.source,
            "step": self.step,
            "rule": self.config.to_dict(),
            "by_position": self.by_position(),
            "rows": [_row_data(row, self.config, self.step) for row in self.rows],
        }


def inspect_tokens(
    model: nn.Module,
    tokenizer,
    rows: list[dict],
    config: TokenSeekConfig | None = None,
    *,
    numbers: list[int] | None = None,
    collator: Callable | None = None,
    source: str = "",
    step: int = 0,
) -> TokenReport:
    """Score a few rows with a model as it is: nothing of it changes, and no random number is drawn.

    Both scores are computed, whatever the config's scorer; token columns of the rows are left aside.

    Args:
        rows: encoded examples, as `encode_rows` or a Trainer's data set hold them: `input_ids`, and `labels` where not every
            token carries a loss.
        config: the rule whose marks the report shows; None: the default.
        numbers: what the rows are called; None: 0, 1, ...
        collator: makes a batch of a list with one row; None: `TokenSeekCollator`.
        source: where the rows are from, for the report's head.
        step: the optimizer step whose draw is shown.

    Raises:
        InputError: no rows, one of several documents, or one without a token that carries a loss.
        UnsupportedModelError: the model cannot be trained with token ditching.
    """
    config = TokenSeekConfig() if config is None else config
    if not rows:
        raise InputError("There are no rows to inspect: give at least one.")
    collator = collator or TokenSeekCollator(pad_token_id=getattr(tokenizer, "pad_token_id", None))
    numbers = list(range(len(rows))) if numbers is None else numbers
    device = next(model.parameters()).device
    with same_random_numbers_after():  # a collator may mask at random
        batches = [
            collator([{name: values for name, values in row.items() if name not in TOKEN_COLUMNS}]) for row in rows
        ]
        batches = [{k: v.to(device) for k, v in batch.items() if isinstance(v, torch.Tensor)} for batch in batches]

    def seek(scoring: TokenSeekConfig) -> list[TokenRow]:
        found = []
        with cpu_packing_off(model), TokenSeekSession(model, scoring) as session:
            for number, batch in zip(numbers, batches, strict=True):
                found.append(_inspect_row(session, tokenizer, batch, number))
                session.records.clear()
        return found

    both = dataclasses.replace(config, scorer="tokenseek", alpha=1.0, beta=1.0)
    with same_random_numbers_after():
        try:
            found = seek(both)
        except UnsupportedModelError:
            if config.needs_context:
                raise
            found = seek(dataclasses.replace(both, scorer="gradient"))  # the model does not show its attention
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    return TokenReport(found, config, name, source, step)


def describe(config: TokenSeekConfig, step: int) -> str:
    """The rule in a sentence."""
    if config.ratio == 1.0:
        return "keeps every token that a loss depends on: ordinary training"
    score = {
        "gradient": "the gradient score",
        "context": "the context score",
        "tokenseek": f"{config.alpha:g} log(context) + {config.beta:g} minmax(gradient)",
        "random": "nothing: at random",
    }[config.scorer]
    among = "tokens that carry a loss" if config.select_from == "supervised" else "all tokens"
    if config.selection == "topk":
        return f"keeps {100 * config.ratio:g} % of a row, the best by {score}, among {among}"
    return (
        f"keeps {100 * config.ratio:g} % of a row, drawn among {among} in proportion to {score}; this is step {step}"
    )


def check_output(path: Path) -> None:
    """Raise InputError unless a file can be written at `path`."""
    if path.is_dir():
        raise InputError(f"{path} is a folder. Name a file in it, such as {path / 'report.html'}.")
    if not path.parent.is_dir():
        raise InputError(
            f"The folder {path.parent} does not exist, so {path.name} cannot be written there. Make it first."
        )


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds to those before it, so that the texts joined are the decoded whole.

    A token that ends in the middle of a character adds "" and the one that completes it the whole character.
    """

    def decode(start, end):
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode(start, read), decode(start, end)
        unfinished = now.endswith("\ufffd") and end < len(ids) and end - read < 4  # a character has 4 bytes at most
        texts.append("" if unfinished else now[len(before) :])
        if not unfinished:
            start, read = read, end
    return texts


def _inspect_row(session, tokenizer, batch, number) -> TokenRow:
    instances = session.instances(batch)
    if instances.count != 1:
        raise InputError(f"Row {number} holds {instances.count} packed documents. Inspect rows of one document each.")
    if not instances.supervised.any():
        raise InputError(
            f"Row {number} has no token that carries a loss, so it has no gradient score: its labels are all -100. Check the "
            "prompt masking and the maximum length."
        )
    seek = session.seek(batch, instances)
    real = (instances.ids[0] >= 0).cpu()
    tokens = batch["input_ids"][0].cpu()[real].tolist()
    return TokenRow(
        number=number,
        tokens=token_texts(tokenizer, tokens),
        input_ids=tokens,
        instances=_without_padding(instances),
        causal=session.structure.shift,
        context=None if seek.context is None else seek.context[0].cpu()[real],
        gradient=seek.gradient[0].cpu()[real],
        loss=float(seek.loss_sum) / int(instances.n_supervised),
    )


def _without_padding(instances: Instances) -> Instances:
    real = instances.ids[0] >= 0
    fields = {field.name: getattr(instances, field.name) for field in dataclasses.fields(instances)}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    shorter: dict[str, Any] = {k: (v[:, real] if v.ndim == 2 else v).cpu() for k, v in tensors.items()}
    return dataclasses.replace(instances, **shorter)


def _bin_shares(score: torch.Tensor) -> torch.Tensor:
    """(N_BINS,) share of the summed score in each tenth of the row."""
    place = torch.arange(len(score)) * N_BINS // len(score)
    sums = torch.zeros(N_BINS, dtype=torch.float64).index_add(0, place, score)
    return sums / sums.sum().clamp(min=1e-300)


def _row_data(row: TokenRow, config: TokenSeekConfig, step: int) -> dict:
    """What the page needs of a row. Scores go as base64 of little-endian floats: exact, and small."""
    flags = row.supervised.long() + 2 * row.response.long() + 4 * candidates_of_all(row).long()
    return {
        "number": row.number,
        "key": str(int(row.instances.keys)),  # JavaScript's numbers hold no int64
        "loss": row.loss if np.isfinite(row.loss) else None,
        "causal": row.causal,
        "tokens": row.tokens,
        "ids": _base64(torch.tensor(row.input_ids, dtype=torch.int32)),
        "flags": "".join(map(str, flags.tolist())),
        "dtype": str(row.gradient.dtype).removeprefix("torch."),
        "context": None if row.context is None else _base64(row.context.to(row.gradient.dtype)),
        "gradient": _base64(row.gradient),
        "kept": row.kept(config, step),
    }


def candidates_of_all(row: TokenRow) -> torch.Tensor:
    """(n,) bool: what `select_from="all"` may keep."""
    return candidates(row.instances, TokenSeekConfig(select_from="all"), row.causal)[0]


def _base64(values: torch.Tensor) -> str:
    array = values.detach().contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")
