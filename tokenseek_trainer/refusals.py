"""What token ditching cannot be combined with, refused by name when a trainer is built: the message says what to do instead."""

from torch.utils.data import IterableDataset

from .errors import ConfigError, UnsupportedModelError
from .objective import OWN_LABELS
from .structure import ModelStructure


SUPERVISED_TRAINERS = ("SFTTrainer", "_BaseTrainer", "BaseTrainer")


def refuse_other_objectives(trainer_class: type) -> None:
    """Refuse a Trainer whose loss is not a sum over tokens."""
    names = [cls.__name__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")]
    other = [name for name in names if name.endswith("Trainer") and name not in SUPERVISED_TRAINERS]
    if other:
        raise UnsupportedModelError(
            f"{other[0]} is not supported: its loss is not a sum over tokens (it compares whole sequences), so kept tokens "
            "cannot stand for the others. Use TokenSeekTrainer or TokenSeekSFTTrainer for supervised fine-tuning."
        )


def refuse_combinations(trainer, structure: ModelStructure) -> None:
    """Refuse training arguments and settings of a built Trainer that cannot work with token ditching, before any compute."""
    args = trainer.args
    if args.n_gpu > 1:
        raise UnsupportedModelError(
            f"Trainer would run nn.DataParallel over {args.n_gpu} GPUs, which is not supported. Start one process "
            "per GPU with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if args.torch_compile:
        raise UnsupportedModelError(
            "torch_compile=True is not supported: the number of kept tokens changes from batch to batch."
        )
    if trainer.compute_loss_func is not None:
        raise UnsupportedModelError(
            "compute_loss_func is not supported: it would need the logits of all tokens. Use the model's own loss."
        )
    checkpointing = getattr(args, "activation_checkpointing_kwargs", None) or getattr(
        args, "gradient_checkpointing_kwargs", None
    )
    if (checkpointing or {}).get("use_reentrant"):
        raise UnsupportedModelError(
            "Reentrant activation checkpointing is not supported. Set use_reentrant to False in the checkpointing kwargs."
        )
    _refuse_parts(trainer, structure)
    liger = getattr(args, "liger_kernel_config", None) or {}
    if getattr(args, "use_liger_kernel", False) and liger.get("fused_linear_cross_entropy", True):
        raise UnsupportedModelError(
            "Liger's fused head computes the loss of all tokens at once, so kept tokens cannot be weighted in it. Set "
            "liger_kernel_config={'fused_linear_cross_entropy': False}; its layer kernels then stay on."
        )
    if (
        isinstance(trainer.train_dataset, IterableDataset)
        and args.max_steps <= 0
        and not hasattr(trainer.train_dataset, "__len__")
    ):
        raise ConfigError(
            f"The training data set has no length ({type(trainer.train_dataset).__name__}), so max_steps must be positive; "
            f"got {args.max_steps}."
        )


def _refuse_parts(trainer, structure: ModelStructure) -> None:
    """Parts need gradients that add up over several backwards, and tokens that see earlier ones only."""
    parts, optim = trainer.tokenseek.parts, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if parts == 1:
        return
    if structure.lm.loss_function in OWN_LABELS:
        raise UnsupportedModelError(
            f"parts={parts} is not supported for {structure.model_type!r}: its tokens may attend to later ones, or "
            "a label belongs to a row. Set parts=1."
        )
    if "layerwise" in optim or "lomo" in optim:
        raise UnsupportedModelError(
            f"parts={parts} is not supported with optim={optim!r}, which updates weights within the backward. Set parts=1."
        )
    if trainer.is_deepspeed_enabled:
        raise UnsupportedModelError(f"parts={parts} is not supported with DeepSpeed. Set parts=1.")
