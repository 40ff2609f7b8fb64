"""What the self-check of the first training batch costs beside one training step, in processor seconds and in memory.

    python eval/selfcheck_cost.py --output eval/results/selfcheck.json      (about three minutes)

The model has SmolLM2-135M's shape and random weights; its memory is the greatest sum of live tensors above weights and optimizer
state, as in efficiency.py.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from step_case import Case

from tokenseek_trainer.evaluation import save_result
from tokenseek_trainer.memory import LiveTensors
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession


def check(case: Case) -> float | None:
    with TokenSeekSession(case.model, case.config) as session:
        return self_check(session, case.batch, session.instances(case.batch))


def seconds_of(run, repetitions: int) -> list[float]:
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return seconds


def live_peak(case: Case, run) -> int:
    held = [tensor for state in case.optimizer.state.values() for tensor in state.values()]
    with LiveTensors(case.model, held) as live:
        run()
    return live.peak


def measure(group: dict, repetitions: int) -> dict:
    case = Case(group, "TokenSeek", "cpu", torch.float32)
    step = lambda: case.step(1)  # noqa: E731
    step()  # warm up; the optimizer makes its state
    case.optimizer.zero_grad()
    difference = check(case)
    peaks = {
        "check_live_peak_bytes": live_peak(case, lambda: check(case)),
        "step_live_peak_bytes": live_peak(case, step),
    }
    seconds = {"check_seconds": [], "step_seconds": []}
    for _ in range(repetitions):  # in turns
        case.optimizer.zero_grad()
        seconds["check_seconds"] += seconds_of(lambda: check(case), 1)
        seconds["step_seconds"] += seconds_of(step, 1)
    medians = {f"{name}_median": statistics.median(values) for name, values in seconds.items()}
    return {**group, "greatest_difference": difference, **peaks, **seconds, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--blocks", type=int, help="fewer blocks, to try the script")
    options = parser.parse_args()
    groups = [
        {"model": "smollm2-135m", "blocks": options.blocks, "rows": 1, "tokens": n, "ratio": 0.1, "adapter": "full"}
        for n in options.tokens
    ]
    result = {
        "benchmark": "selfcheck",
        "conditions": {
            "dtype": "float32",
            "optimizer": "AdamW, fused",
            "seed": 0,
            "seconds": "processor time",
            "repetitions": options.repetitions,
        },
        "cases": [measure(group, options.repetitions) for group in groups],
        **provenance(),
    }
    save_result(result, options.output)


if __name__ == "__main__":
    main()
