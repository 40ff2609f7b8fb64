"""TokenSeek: fine-tune a Transformer while caching activations only for the tokens that matter."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .collator import TokenSeekCollator
    from .config import TokenSeekConfig
    from .sft import TokenSeekSFTTrainer
    from .trainer import TokenSeekMixin, TokenSeekTrainer

    __version__: str
else:

    def __getattr__(name: str):  # unseen by a type checker, to which every name would be right
        if name == "__version__":
            return _version()
        if name in _HOMES:
            return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Where each name lives. They are imported when asked for: `tokenseek --help` needs no torch, and TRL is optional.
_HOMES = {
    "TokenSeekCollator": "collator",
    "TokenSeekConfig": "config",
    "TokenSeekMixin": "trainer",
    "TokenSeekSFTTrainer": "sft",
    "TokenSeekTrainer": "trainer",
}

__all__ = [
    "TokenSeekCollator",
    "TokenSeekConfig",
    "TokenSeekMixin",
    "TokenSeekSFTTrainer",
    "TokenSeekTrainer",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """As pyproject.toml has it; "unknown" in a checkout that was never installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("tokenseek-trainer")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
