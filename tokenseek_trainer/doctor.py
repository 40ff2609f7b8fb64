"""`tokenseek doctor`: versions, device, and which optional parts are usable and why not. Nothing here needs a network."""

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import platform
import re
import time
import warnings


# What can be left out: (package, module to import, extra, what it is for). An extra of None: not installed by one.
OPTIONAL = (
    ("trl", "trl", "sft", "trainer: sft"),
    ("datasets", "datasets", "sft", "data sets of the hub"),
    ("peft", "peft", "qlora", "LoRA, DoRA, LoHa, QLoRA"),
    ("bitsandbytes", "bitsandbytes", "qlora", "4-bit weights, 8-bit optimizers"),
    ("lm-eval", "lm_eval", "eval", "tokenseek eval"),
    ("evaluate", "evaluate", "eval", "tokenseek eval"),
    ("matplotlib", "matplotlib.figure", "sweep", "plots of a sweep"),
    ("gguf", "gguf", "gguf", "models in GGUF files"),
    ("flash-attn", "flash_attn", None, "flash attention kernels"),
)
CORE = ("torch", "transformers", "accelerate")


def examine() -> int:
    """Print a report; returns 0, or 1 if training cannot work here."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # before any of them is imported
    from . import __version__

    _show("tokenseek-trainer", __version__)
    _show("python", f"{platform.python_version()} on {platform.platform()}")
    problems = [_core(package) for package in CORE]
    if not any(problems):
        _device()
        problems.append(_step())
    print()
    for package, module, extra, purpose in OPTIONAL:
        _show(package, f"{_optional(package, module, extra)}  ({purpose})")
    found = [problem for problem in problems if problem]
    print("\n" + ("\n".join(found) if found else "Training works here."))
    return 1 if found else 0


def _show(name: str, text: str) -> None:
    print(f"{name:18} {text}", flush=True)


def _core(package: str) -> str | None:
    """What is wrong with a package that everything needs."""
    problem = _problem(package, package)
    _show(package, problem or str(_version(package)))
    return f"{package}: {problem}" if problem else None


def _optional(package: str, module: str, extra: str | None) -> str:
    how = f"pip install 'tokenseek-trainer[{extra}]'" if extra else f"pip install {package}, needs a GPU"
    if _version(package) is None:
        return f"not installed: {how}"
    problem = _problem(package, module)
    return f"{_version(package)} not usable: {problem}" if problem else f"{_version(package)}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _problem(package: str, module: str) -> str | None:
    """Why a package cannot be used: too old, or its import fails; None if it can."""
    if _version(package) is None:
        return "not installed"
    wanted = _wanted(package)
    if wanted is not None and not wanted.specifier.contains(_version(package), prereleases=True):
        return f"version {_version(package)}, needed is {wanted.specifier}"
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _wanted(package: str):
    """What this library requires of a package; None if nothing, or if this library is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("tokenseek-trainer") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Requirement(line) for line in lines]
    names = [re.sub(r"[-_.]+", "-", requirement.name).lower() for requirement in found]
    return next((r for r, name in zip(found, names, strict=True) if name == package and r.specifier), None)


@contextlib.contextmanager
def _quiet():
    """Other packages' messages at import stay out of the report."""
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _device() -> None:
    import psutil
    import torch

    from .preflight import GIB, available_memory

    memory = psutil.virtual_memory()
    free, _ = available_memory(use_cpu=True) or (memory.available, "")
    _show("memory", f"{free / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB")
    _show(
        "processor",
        f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
    )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = (
            f"torch is built for {built}, but no driver or device answers"
            if built
            else "torch is a build without GPUs"
        )
        _show("GPU", "Apple's (mps)" if torch.backends.mps.is_available() else f"none: {reason}")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        _show(
            f"GPU {index}", f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
        )
    _show(
        "CUDA",
        f"{torch.version.cuda or torch.version.hip}, bfloat16 {'works' if torch.cuda.is_bf16_supported() else 'does not work'}",
    )


def _step() -> str | None:
    """Both passes, the self-check and the backward of a tiny model on the device."""
    try:
        import torch

        from .config import TokenSeekConfig
        from .selection import select
        from .selfcheck import self_check
        from .session import TokenSeekSession
        from .testing import ragged_batch, tiny_model

        start = time.perf_counter()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with _quiet():
            config, model = TokenSeekConfig(ratio=0.5), tiny_model(dtype=torch.float32).to(device)
            batch = {name: value.to(device) for name, value in ragged_batch().items()}
            with TokenSeekSession(model, config) as session:
                instances = session.instances(batch)
                self_check(session, batch, instances)
                scores = session.seek(batch, instances).scores(instances, config, 0)
                session.ditch(batch, instances, select(scores, instances, config)).backward()
    except Exception as error:
        _show("training step", f"fails on the {device}")
        return f"A training step of a tiny model fails: {type(error).__name__}: {error}"
    _show("training step", f"works on the {device}, self-check passed ({time.perf_counter() - start:.1f} s)")
    return None
