"""`TokenSeekConfig`: every setting of the method, documented once."""

import dataclasses
import json
import math
import numbers
from dataclasses import dataclass

from .errors import ConfigError, closest


CONFIG_NAME = "tokenseek_config.json"

CHOICES = {
    "scorer": ("tokenseek", "context", "gradient", "random"),
    "select_from": ("all", "supervised"),
    "selection": ("topk", "sample"),
    "token_weight": ("instance", "none"),
    "kv_store": ("device", "cpu"),
}


@dataclass(frozen=True)
class TokenSeekConfig:
    """Which tokens are kept, and how the kept ones stand for the rest.

    An *instance* is one document: a row of the batch, or one document of a packed row.

    Args:
        ratio: Fraction of an instance's tokens that is **kept**, in (0, 1]. 1.0 is ordinary training.
        scorer: `"gradient"` scores a token by sum(|dL/dz|) over the hidden width, z being the last block's input;
            `"context"` by the attention it receives; `"tokenseek"` by alpha*log(context) + beta*minmax(gradient)
            (the paper's score); `"random"` draws a new uniform score at every step.
        alpha: Weight of log(context) in `scorer="tokenseek"`, >= 0.
        beta: Weight of minmax(gradient) in `scorer="tokenseek"`, >= 0.
        context_layers: Blocks whose attention makes the context score: `"last"`, `"all"`, or block indices
            (negative ones count from the end).
        select_from: `"supervised"` keeps only positions that carry a loss; `"all"` (the paper) chooses among all. In sequence
            classification no token has a loss of its own, and both choose among all.
        selection: `"topk"` keeps the best tokens (the paper). `"sample"` draws them with probability proportional to
            their importance and weights each loss by 1/probability, which estimates the full loss without bias.
            The importance is the gradient score, the context score, exp(score) for `"tokenseek"`, or uniform. In sequence
            classification the loss is exact without weights, and a draw decides only through which tokens gradients flow.
        uniform_share: Share of the drawing probability that is spread evenly, in [0, 1]. Only for `"sample"`.
        min_tokens: Least number of tokens kept per instance, >= 1 (never more than the instance has).
        token_weight: `"instance"` lets the kept tokens stand for all supervised tokens of their instance, so the loss
            keeps its scale; `"none"` counts every kept token once and every ditched token as zero.
        reuse_scores: Score an instance when it is first seen and go on with these scores in later epochs, which then cost no
            more than random selection. Draws are still new at every step. The scores are saved with every checkpoint.
        parts: Run the ditch pass on the kept tokens in this many parts, >= 1, the last tokens first, each part handing on the
            gradient at keys and values of the earlier tokens. The gradient is the same, activations are kept for one part at
            a time, and each part costs one more call of the model. With ratio 1.0 this is exact full fine-tuning.
        kv_store: Where keys and values of ditched tokens wait between the two passes: `"device"` or `"cpu"`.
        self_check: Compare the ditch pass with the ordinary forward on the first training batch, and stop if they
            differ.
        seed: Seed of `scorer="random"` and `selection="sample"`, >= 0.

    Raises:
        ConfigError: a value is outside the range given above, or a keyword is unknown (`from_dict`).
    """

    ratio: float = 0.1
    scorer: str = "gradient"
    alpha: float = 1.0
    beta: float = 1.0
    context_layers: str | tuple[int, ...] = "last"
    select_from: str = "supervised"
    selection: str = "sample"
    uniform_share: float = 0.2
    min_tokens: int = 1
    token_weight: str = "instance"
    reuse_scores: bool = False
    parts: int = 1
    kv_store: str = "device"
    self_check: bool = True
    seed: int = 0

    def __post_init__(self):
        self._number("ratio", lambda x: 0 < x <= 1, "a number in (0, 1]", _ratio_remedy)
        self._number("alpha", lambda x: x >= 0, "a number >= 0")
        self._number("beta", lambda x: x >= 0, "a number >= 0")
        self._number("uniform_share", lambda x: 0 <= x <= 1, "a number in [0, 1]")
        self._integer("min_tokens", 1)
        self._integer("parts", 1)
        self._integer("seed", 0)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {allowed}, got {value!r}.{closest(value, allowed)}")
        for name in ("reuse_scores", "self_check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.reuse_scores and self.scorer == "random":
            raise ConfigError("reuse_scores is true, but scorer='random' has no scores: leave it false.")
        if self.scorer == "tokenseek" and self.alpha == 0 and self.beta == 0:
            raise ConfigError(
                "alpha and beta are both 0, so every token scores the same. Raise one of them, "
                "or use scorer='random' if random tokens are what you want."
            )
        self._check_context_layers()

    def _number(self, name, allowed, range_text, remedy=lambda value: ""):
        value = getattr(self, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not allowed(value):
            raise ConfigError(f"{name} must be {range_text}, got {value!r}.{remedy(value)}")
        object.__setattr__(self, name, float(value))

    def _integer(self, name, least):
        value = getattr(self, name)
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}.")
        object.__setattr__(self, name, int(value))

    def _check_context_layers(self):
        value = self.context_layers
        if value in ("last", "all"):
            return
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in value):
            raise ConfigError(
                f"context_layers must be 'last', 'all' or a list of block indices such as [0, -1], got {value!r}."
            )
        object.__setattr__(self, "context_layers", tuple(int(i) for i in value))

    @property
    def needs_gradient(self) -> bool:
        """Whether the score uses the gradient at the last block's input."""
        return self.scorer == "gradient" or (self.scorer == "tokenseek" and self.beta > 0)

    @property
    def needs_context(self) -> bool:
        """Whether the score uses the attention that tokens receive."""
        return self.scorer == "context" or (self.scorer == "tokenseek" and self.alpha > 0)

    @classmethod
    def paper(cls, **overrides) -> "TokenSeekConfig":
        """The setting of the TokenSeek paper: joint top 10 % by log(context) + minmax(gradient)."""
        settings = {"ratio": 0.1, "scorer": "tokenseek", "selection": "topk", "select_from": "all"}
        return cls.from_dict({**settings, **overrides})

    @classmethod
    def from_dict(cls, settings: dict) -> "TokenSeekConfig":
        """Build a config from a mapping; an unknown key is refused with the nearest known one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in names:
                raise ConfigError(
                    f"TokenSeekConfig has no setting {key!r}.{closest(key, names)} The settings are: {', '.join(names)}."
                )
        return cls(**settings)

    def to_dict(self) -> dict:
        """A JSON-serialisable mapping that `from_dict` turns back into an equal config."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_json(self) -> str:
        """The text of a `tokenseek_config.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TokenSeekConfig":
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))


def _ratio_remedy(value) -> str:
    text = str(value).strip()
    try:
        percent = float(text.rstrip("% "))
    except ValueError:
        return " Use 0.1 to keep 10 % of the tokens."
    if percent == 0:
        return " At least one token must be kept; use a small ratio such as 0.05."
    if text.endswith("%") or 1 < percent <= 100:
        return f" Write {percent / 100:g} to keep {percent:g} %."
    return " Use 0.1 to keep 10 % of the tokens, 1.0 for ordinary training."
