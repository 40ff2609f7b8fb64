"""Result files, as the tables read them."""

import json
import statistics
from pathlib import Path


RESULTS = Path(__file__).resolve().parent / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def where_measured(result: dict) -> str:
    hardware, versions = result["hardware"], result["versions"]
    device = hardware["device"] if hardware["device"] != "cpu" else f"{hardware['cores']} CPU cores"
    return (
        f"{device}, torch {versions['torch']}, transformers {versions['transformers']}, commit {result['commit'][:7]}"
    )


def mean(values: list[float], digits: str) -> str:
    """Mean, and standard deviation if there are several."""
    text = f"{statistics.fmean(values):{digits}}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):{digits}}"
