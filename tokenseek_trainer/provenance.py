"""Where a result comes from: versions, commit and hardware, as plain data for result files."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "lm_eval")


def provenance() -> dict:
    """Versions of the packages that matter, the commit of this code (None outside a checkout), and the hardware."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "tokenseek_trainer"],
            cwd=folder.parent,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
