"""What `tokenseek estimate` shows: ordinary training and TokenSeek side by side, and what fits into a device."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from .config import TokenSeekConfig
from .errors import ConfigError
from .estimate import DTYPES, StepEstimate, estimate, load_config


CASES = {  # tokens ditched, activation checkpointing
    "ordinary": (False, False),
    "ordinary + checkpointing": (False, True),
    "TokenSeek": (True, False),
    "TokenSeek + checkpointing": (True, True),
}
LONGEST, LARGEST = 2**20, 2**12  # where the searches end


@dataclass(frozen=True)
class Plan:
    """What a run is estimated for: arguments of `estimate` that all cases share."""

    config: object
    tokenseek: TokenSeekConfig
    tokens: int
    batch: int = 1
    method: str = "full"
    dtype: str = "bf16"
    optim: str = "adamw_torch_fused"
    autocast: bool = False
    adapter: dict | None = None

    def estimate(self, case: str, **changes) -> StepEstimate:
        """The estimate of one of `CASES`, with other settings where `changes` names them."""
        ditches, checkpointing = CASES[case]
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        settings.update(changes, checkpointing=checkpointing)
        if not ditches:
            settings["tokenseek"] = None
        return estimate(self.config, **settings)

    def longest(self, case: str, memory: int) -> int:
        """The longest row, in multiples of 128 tokens and to 1 %, of which `batch` fit into `memory` bytes; 0 if none does."""
        return 128 * greatest(lambda n: self.estimate(case, tokens=128 * n).peak, memory, LONGEST // 128, slack=0.01)

    def largest(self, case: str, memory: int) -> int:
        """The largest batch, to 1 %, that fits into `memory` bytes; 0 if none does."""
        return greatest(lambda n: self.estimate(case, batch=n).peak, memory, LARGEST, slack=0.01)


def plan_of_recipe(recipe, tokens: int | None = None) -> Plan:
    """The plan of a `Recipe`: its batch, optimizer, adapters and quantisation.

    Args:
        tokens: of a row; None for data.max_length.
    """
    adapter = dict(recipe.peft)
    method = adapter.get("method", "full")
    training = recipe.training
    config = load_config(recipe.model.name)
    return Plan(
        config,
        recipe.tokenseek,
        tokens=tokens or recipe.data.max_length or 2048,
        batch=training.get("per_device_train_batch_size", 8),
        method="qlora" if recipe.quantization else "lora" if method == "dora" else method,
        dtype=_saved_dtype(config) if recipe.model.dtype == "auto" else recipe.model.dtype,
        optim=training.get("optim", "adamw_torch_fused"),
        autocast=bool(training.get("bf16") or training.get("fp16")),
        adapter=adapter or None,
    )


def _saved_dtype(config) -> str:
    """In which a model's weights are saved, if its config says so."""
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in DTYPES else "bf16"


def case_of_recipe(recipe) -> str:
    """Which of `CASES` a `Recipe` is."""
    names = ("gradient_checkpointing", "activation_checkpointing")
    checkpointing = any(recipe.training.get(name, False) for name in names)
    ditches = recipe.tokenseek.ratio < 1 or recipe.tokenseek.parts > 1
    return next(name for name, case in CASES.items() if case == (ditches, checkpointing))


def estimate_lines(plan: Plan, memory: int | None = None) -> Iterator[str]:
    """A Markdown table with a row per case, line by line as they are found: GiB per component, operations of a micro-batch.

    Args:
        memory: bytes of the device; adds whether each case fits, the longest row and the largest batch.
    """
    head = [
        "",
        "weights",
        "gradients",
        "optimizer",
        "kept for backward",
        "of it keys, values",
        "peak",
        "share",
        "TFLOP",
        "share",
    ]
    if memory is not None:
        head += ["fits", "longest row", "largest batch"]
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    ordinary = None
    for case in CASES:
        found = plan.estimate(case)
        ordinary = ordinary or found
        parts = (found.parameters, found.gradients, found.optimizer, found.saved, found.keys_values, found.peak)
        cells = [case, *(f"{part / 2**30:.2f}" for part in parts), f"{found.peak / ordinary.peak:.0%}"]
        cells += [f"{found.operations / 1e12:.3g}", f"{found.operations / ordinary.operations:.0%}"]
        if memory is not None:
            cells += [
                "yes" if found.peak <= memory else "no",
                str(plan.longest(case, memory)),
                str(plan.largest(case, memory)),
            ]
        yield "| " + " | ".join(cells) + " |"


def greatest(need, available: float, limit: int, slack: float = 0.0) -> int:
    """The greatest n in 1..limit with need(n) <= available, 0 if there is none. `need` rises, nearly along a line.

    With `slack`, an n may be returned that is smaller than the greatest, by at most this share.
    """
    low, high, known, n = 0, limit + 1, {}, 1
    while True:
        known[n] = need(n)
        low, high = (n, high) if known[n] <= available else (low, n)
        if high - low <= max(1.0, slack * low):
            return low
        a, b = (sorted(known, key=lambda m: abs(known[m] - available)) * 2)[:2]  # the line through the two nearest
        guess = a + (available - known[a]) * (b - a) / (known[b] - known[a]) if known[a] != known[b] else 4 * low
        if len(known) % 4 == 0 and high <= limit:
            guess = (low + high) // 2  # where need() is no line, halving still ends soon
        n = int(max(low + 1, min(guess, high - 1, 64 * low)))


def parse_bytes(text: str) -> int:
    """ "24GiB", "80GB" or a number of bytes.

    Raises:
        ConfigError: anything else.
    """
    units = {"": 1, "b": 1, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ConfigError(f"Memory is written 24GiB, 80GB or as a number of bytes; got {text!r}.")
    return int(float(match[1]) * units[match[2]])
