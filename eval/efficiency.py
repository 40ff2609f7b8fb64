"""Memory and time of training steps beside strong baselines, each case in a process of its own, cases taking turns.

    python eval/efficiency.py --output eval/results/efficiency.json           all (25 minutes on two AVX2 cores)
    python eval/efficiency.py --quick --output ...                            a few minutes
    python eval/efficiency.py --device cuda --output ...                      bfloat16, real sizes (see eval/gpu.sh)

Per case: bytes kept for the backward; the greatest sum of live tensors above weights and optimizer state, by kind; peak of the
process or device; seconds per step and of each part of it; tokens per second; of the main group also operations. Random weights
(cost does not depend on values), full rows, everything supervised, AdamW. First the bytes of a step are counted, case by case;
then the cases of a group take turns, a timed step each, so that a machine whose speed changes is as fast for one as for another.
A waiting case keeps what its allocator holds, as a training run does: handing it back costs the next step, and not all alike.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
from step_case import METHODS, OTHER_RATIOS, SFT, Case, shape

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.estimate import estimate
from tokenseek_trainer.provenance import provenance


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["step_case"])  # imported once for all cases
# So many cases of a group take turns: they wait in memory (24 GiB are enough). These two take theirs after the others.
TOGETHER = 7
APART = (SFT, "all tokens in 8 parts")
CASES = (*METHODS, *OTHER_RATIOS)  # in this order in the results
GROUP = ("model", "blocks", "rows", "tokens", "ratio", "adapter")  # what the cases of a group share


def plan(quick: bool, device: str, toy: bool) -> list[dict]:
    """The groups of cases: those of one group share model, rows and length, and take turns."""
    without_sft = [name for name in METHODS if name != SFT]
    main = ["Trainer", "Trainer + checkpointing", "TokenSeek", "TokenSeek + checkpointing"]
    if device == "cuda" or toy:
        cases = [
            ("qwen2.5-0.5b", "full", (1024, 8192), main),
            ("llama-3.2-1b", "full", (1024, 8192), without_sft),
            ("llama-3.2-1b", "lora", (1024, 8192), main),
            ("llama-3.2-3b", "full", (1024, 4096), main),
        ]
        if toy:
            cases = [("smollm2-135m", "full", (64, 128), without_sft), ("smollm2-135m", "lora", (64,), main)]
        blocks = 2 if toy else None
        return [
            {"model": m, "blocks": blocks, "rows": 1, "tokens": n, "ratio": 0.1, "adapter": a, "methods": methods}
            for m, a, lengths, methods in cases
            for n in lengths
        ]
    small = {"model": "smollm2-135m", "blocks": None, "rows": 1, "tokens": 1024, "ratio": 0.1, "adapter": "full"}
    short = {**small, "blocks": 6, "methods": main}  # what depends on length and ratio shows in fewer blocks
    if quick:
        return [{**short, "tokens": n} for n in (256, 1024)]
    return [
        {**small, "methods": sorted(METHODS, key=APART.__contains__), "steps": 3},
        {**short, "rows": 4, "tokens": 256},
        {**short, "methods": [*main, *OTHER_RATIOS]},
        {**short, "tokens": 4096, "steps": 1},
        {**small, "methods": main, "adapter": "lora"},
        {**small, "methods": main, "adapter": "qlora"},
        {**short, "model": "llama-3.2-1b", "blocks": 4, "methods": main[::2] + main[1::2], "together": 2, "steps": 1},
    ]


class CaseProcess:
    """A case in a process of its own, so that its peak is its own, which waits for its turns."""

    def __init__(self, *order):
        """order: the arguments of `measure`, but steps."""
        self._pipe, other = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(other, *order))
        self._process.start()
        other.close()
        self.failed = self._wait() != "counted"

    def step(self, number: int) -> None:
        self._pipe.send(number)
        self.failed = self._wait() != "stepped"

    def result(self) -> dict | None:
        """None if the case did not get so far, as when it ran out of memory."""
        if not self.failed:
            self._pipe.send(None)
        result = None if self.failed else self._wait()
        self._process.join()
        if result is None:
            print(f"  no result (exit code {self._process.exitcode})", flush=True)
        return result

    def _wait(self):
        try:
            return self._pipe.recv()
        except EOFError:
            return None


def _serve(pipe, group: dict, method: str, device: str, counts: str) -> None:
    case = Case(group, method, device, torch.float32)
    case.count(counts)
    pipe.send("counted")
    while (number := pipe.recv()) is not None:
        case.step(number)
        pipe.send("stepped")
    pipe.send(case.result())


def measure_together(group: dict, methods: list[str], device: str, counts: str, steps: int) -> dict[str, dict | None]:
    """Count case by case, then take turns."""
    processes = {}
    for method in methods:
        print("{model} {adapter} {rows} x {tokens} r={ratio}".format(**group), method, flush=True)
        processes[method] = CaseProcess(group, method, device, counts)
    for number in range(1, steps + 1):
        for process in processes.values():
            if not process.failed:
                process.step(number)
    return {method: process.result() for method, process in processes.items()}


def measure(group: dict, method: str, device: str, counts: str, steps: int) -> dict | None:
    """A case in this process, as on a GPU, where starting one takes longer than the steps."""
    print("{model} {adapter} {rows} x {tokens} r={ratio}".format(**group), method, flush=True)
    try:
        case = Case(group, method, device, torch.float32 if device == "cpu" else torch.bfloat16)
        case.count(counts)
        for number in range(1, steps + 1):
            case.step(number)
        return case.result()
    except torch.OutOfMemoryError as error:
        print(f"  no result ({str(error).splitlines()[0]})", flush=True)
        return None
    finally:
        case = None
        gc.collect()
        torch.cuda.empty_cache()


def measure_group(group: dict, device: str, in_processes: bool, counts: str, steps: int) -> dict[str, dict | None]:
    methods = group["methods"]
    if not in_processes:
        found = {method: measure(group, method, device, counts, steps) for method in methods}
    else:
        found, size = {}, group.get("together", TOGETHER)
        for first in range(0, len(methods), size):
            found |= measure_together(group, methods[first : first + size], device, counts, steps)
    return {method: found[method] and summarized(found[method]) for method in CASES if method in found}


def operations(group: dict, method: str) -> float:
    """Of the matrix products of a step, by `tokenseek estimate`."""
    settings, checkpointing = METHODS[method]
    tokenseek = None if settings is None else TokenSeekConfig(**{"ratio": group["ratio"], **settings})
    found = estimate(
        shape(group["model"], group["blocks"]),
        tokens=group["tokens"],
        batch=group["rows"],
        tokenseek=tokenseek,
        method=group["adapter"],
        checkpointing=checkpointing,
    )
    return found.operations


def summarized(case: dict) -> dict:
    """A case with the median and the 20th and 80th percentile of its seconds in their place."""
    seconds = case["seconds"]
    totals = [sum(values) for values in zip(*seconds.values(), strict=True)]
    fifths = statistics.quantiles(totals, n=5, method="inclusive") if len(totals) > 1 else totals * 4
    return {
        **{key: value for key, value in case.items() if key != "seconds"},
        "seconds_median": statistics.median(totals),
        "seconds_p20": fifths[0],
        "seconds_p80": fifths[-1],
        "parts_median": {part: statistics.median(values) for part, values in seconds.items()},
        "timed_steps": len(totals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few blocks, 256 and 1024 tokens")
    parser.add_argument(
        "--toy", action="store_true", help="the cases of a GPU machine at toy sizes, to try the script"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="timed steps of a case (default: 1 to 3)")
    options = parser.parse_args()
    groups = plan(options.quick, options.device, options.toy)
    done: list[dict] = []
    for group in groups:
        began = time.perf_counter()
        steps = options.steps or group.get("steps", 2)
        in_processes = options.device == "cpu" and not options.toy
        cases = measure_group(group, options.device, in_processes, "one micro-batch" if done else "all", steps)
        if not done:  # of the main group: what the step would take if it were bound by matrix products alone
            for method, case in cases.items():
                if case is not None and method != SFT:
                    case["operations"] = operations(group, method)
        described = {key: value for key, value in group.items() if key in GROUP}
        done.append({**described, "measuring_seconds": round(time.perf_counter() - began), "cases": cases})
        result = {
            "benchmark": "efficiency",
            "conditions": {
                "dtype": "float32" if options.device == "cpu" else "bfloat16", "optimizer": "AdamW, fused", "seed": 0,
                "supervised": "all tokens", "quick": options.quick,
            },
            "groups": done,
            **provenance(),
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
