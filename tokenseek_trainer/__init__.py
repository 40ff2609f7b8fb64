"""TokenSeek: fine-tune a Transformer while caching activations only for the tokens that matter."""

from .collator import TokenSeekCollator
from .config import TokenSeekConfig
from .trainer import TokenSeekMixin, TokenSeekTrainer


__version__ = "0.1.0"
__all__ = [
    "TokenSeekCollator",
    "TokenSeekConfig",
    "TokenSeekMixin",
    "TokenSeekSFTTrainer",
    "TokenSeekTrainer",
    "__version__",
]


def __getattr__(name: str):
    if name == "TokenSeekSFTTrainer":  # imports TRL, which is optional
        from .sft import TokenSeekSFTTrainer

        return TokenSeekSFTTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
