"""TokenSeek: fine-tune a Transformer while caching activations only for the tokens that matter."""

from .collator import TokenSeekCollator
from .config import TokenSeekConfig
from .trainer import TokenSeekMixin, TokenSeekTrainer


__version__ = "0.1.0"
__all__ = ["TokenSeekCollator", "TokenSeekConfig", "TokenSeekMixin", "TokenSeekTrainer", "__version__"]
