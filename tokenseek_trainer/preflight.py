"""What a run checks before it costs time: that it can write its results, and whether it is likely to fit into memory."""

import os
import shutil
import tempfile
from pathlib import Path

import psutil
import torch

from .errors import ConfigError
from .memory import MIB


GIB = 2**30


def check_output_folder(folder: str | Path) -> None:
    """Make the output folder and write a file into it.

    Raises:
        ConfigError: that is not possible; the message says why.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MIB))
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"Nothing can be written into output_dir {folder}: {error.strerror}. Free some space, or give another folder with "
            "--output_dir."
        ) from None


def check_disk_space(model: torch.nn.Module, folder: str | Path) -> None:
    """Refuse a run whose trained weights would not fit on the disk.

    Raises:
        ConfigError: the folder's disk has less free space than they need, also counting weights there that will be replaced.
    """
    adapter = hasattr(model, "peft_config")
    saved = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
    replaced = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    free = shutil.disk_usage(folder).free + replaced
    if free < saved:
        raise ConfigError(
            f"The trained weights need {saved / GIB:.2f} GiB, and the disk of output_dir {folder} has {free / GIB:.2f} GiB. Free "
            "some space, or give another folder with --output_dir."
        )


def available_memory(use_cpu: bool = False) -> tuple[int, str] | None:
    """Free bytes of the device that a run would use, and its name; None where they are not known.

    On a CPU the limit of the process's control group counts, where it is lower.
    """
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.mem_get_info()[0], torch.cuda.get_device_name()
    if torch.backends.mps.is_available() and not use_cpu:
        return None  # shared with everything else, and grows into swap
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        free = min(free, max(limit, 0))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return free, "the CPU's memory"


def too_large(recipe, tokens: int | None = None) -> str | None:
    """A warning, before a model is loaded, that a training step is likely not to fit.

    Weights, gradients and optimizer state are counted first, in a fraction of a second. Only if they take more than an eighth of
    what is free, a whole step is estimated, which takes a second or two.

    Args:
        tokens: of the longest row; None for data.max_length.

    Returns:
        None if there is nothing to say: it fits, nothing is known, or there are several processes, which may split the model.
    """
    from .estimate import least_bytes
    from .memory_plan import case_of_recipe, plan_of_recipe

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    memory = available_memory(recipe.training.get("use_cpu", False))
    if memory is None:
        return None
    free, device = memory
    try:
        plan, case = plan_of_recipe(recipe, tokens), case_of_recipe(recipe)
        needed: float = least_bytes(plan.config, plan.method, plan.dtype, plan.optim, plan.adapter)
        if free / 8 < needed <= free:
            needed = plan.estimate(case).peak
    except Exception:  # an estimate is a courtesy: whatever is wrong with the recipe is said by the run itself
        return None
    if needed <= free:
        return None
    return (
        f"This run is likely not to fit: a step needs about {needed / GIB:.1f} GiB, and {device} has {free / GIB:.1f} GiB free. "
        f"It goes on all the same. Shorter rows (--max_length), fewer rows (--per_device_train_batch_size) or an adapter "
        f"(--peft.method lora) need less: `tokenseek estimate {recipe.path or 'RECIPE'} --gpu-memory {free / GIB:.1f}GiB`."
    )
