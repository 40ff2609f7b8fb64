"""Memory and time of training steps beside strong baselines, each case in a process of its own, cases taking turns.

    python eval/efficiency.py --output eval/results/efficiency.json           all (MINUTES on two AVX2 cores)
    python eval/efficiency.py --quick --output ...                            a few minutes
    python eval/efficiency.py --device cuda --output ...                      bfloat16, real sizes (see eval/gpu.sh)

Per case: bytes kept for the backward; the greatest sum of live tensors above weights and optimizer state, by kind; peak of the
process or device; seconds per step and of each part of it; tokens per second; of the main group also operations. Random weights (cost does not depend on values), full
rows, everything supervised, AdamW. A turn is a step in which bytes are counted, then steps that are timed.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.estimate import estimate, load_config
from tokenseek_trainer.memory import LiveTensors, SavedBytes, peak_device_bytes, peak_process_bytes
from tokenseek_trainer.provenance import provenance
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession


RANDOM = {"scorer": "random", "selection": "topk"}
PARTS = "TokenSeek, 30 % in 3 parts"
METHODS = {  # settings of TokenSeek (None: ordinary), activation checkpointing
    "Trainer": (None, False),
    "Trainer + checkpointing": (None, True),
    "TokenSeek": ({}, False),
    "TokenSeek + checkpointing": ({}, True),
    PARTS: ({"ratio": 0.3, "parts": 3}, False),
    "all tokens in 8 parts": ({"ratio": 1.0, "parts": 8}, False),
    "random tokens": (RANDOM, False),
    "the paper's scores": (
        {"scorer": "tokenseek", "selection": "topk", "select_from": "all"},
        False,
    ),
}
SFT = "SFTTrainer"  # as TRL has it: checkpointing, and its fused head, which never holds all logits
METHODS[SFT] = (None, True)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tokenseek_trainer.session", "tokenseek_trainer.estimate"])  # once for all cases
PHASES = ("seek", "ditch forward", "backward", "optimizer")


def shape(name: str, blocks: int | None):
    """A shipped config, cut to some blocks."""
    config = load_config(name)
    if blocks is not None:
        config.num_hidden_layers = blocks
    return config


def plan(quick: bool, device: str, toy: bool) -> list[dict]:
    """The groups of cases: those of one group share model, rows and length, and take a turn each; some take one `again`."""
    both, main = (
        [name for name in METHODS if name != SFT],
        ["Trainer", "Trainer + checkpointing", "TokenSeek", "TokenSeek + checkpointing"],
    )
    if device == "cuda" or toy:
        cases = [
            ("qwen2.5-0.5b", "full", (1024, 8192), main),
            ("llama-3.2-1b", "full", (1024, 8192), both),
            ("llama-3.2-1b", "lora", (1024, 8192), main),
            ("llama-3.2-3b", "full", (1024, 4096), main),
        ]
        if toy:
            cases = [("smollm2-135m", "full", (64, 128), both), ("smollm2-135m", "lora", (64,), main)]
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
        {**small, "methods": [*both, SFT], "again": [*main, "random tokens", SFT]},
        *({**short, "rows": rows, "tokens": n} for rows, n in ((4, 256), (1, 1024), (1, 4096))),
        *({**short, "ratio": r, "methods": ["TokenSeek"]} for r in (0.05, 0.2, 0.3, 0.5, 0.999)),
        {**short, "adapter": "lora"},
        {**short, "adapter": "qlora"},
        {**short, "model": "llama-3.2-1b", "blocks": 4},
    ]


# ---- one case, in its own process ----


def adapted(model, adapter: str):
    """The model with LoRA of rank 8 on all linear layers ("lora"), on 4-bit weights ("qlora"), or as it is ("full")."""
    if adapter == "full":
        return model
    import peft

    if adapter == "qlora":
        four_bit = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=model.dtype,
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, quantization_config=four_bit)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()


class Case:
    """A model with everything that a step needs."""

    def __init__(self, group: dict, method: str, device: str, dtype: torch.dtype):
        settings, checkpointing = METHODS[method]
        self.config = None if settings is None else TokenSeekConfig(**{"ratio": group["ratio"], **settings})
        self.device = torch.device(device)
        torch.manual_seed(0)
        config = shape(group["model"], group["blocks"])
        with self.device:  # random numbers for a billion weights take long on a CPU
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        model = adapted(model, group["adapter"])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            if group["adapter"] != "full":
                model.enable_input_require_grads()
        self.model, self.forward_options = model, {}
        if method == SFT:
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
            self.forward_options = {"fused_lm_head": True}
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.vocab_size = config.vocab_size
        self.weight_shapes = {tuple(p.shape) for p in trained if p.ndim == 2}
        tokens = torch.randint(0, config.vocab_size, (group["rows"], group["tokens"]), device=self.device)
        self.batch = {"input_ids": tokens, "labels": tokens.clone()}
        self.seconds = {phase: [] for phase in PHASES}
        self.saved = self.keys_values = 0

    def step(self, number: int, live: LiveTensors | None = None, counts: bool = False) -> None:
        """One optimizer step; with `counts` the saved bytes are counted (and the time is not to be used).

        Args:
            live: is told what is saved and what is recorded, unless None.
        """
        session = nullcontext() if self.config is None else TokenSeekSession(self.model, self.config)
        with session:
            clock = _Clock(self.device)
            if self.config is not None:
                instances = session.instances(self.batch)
                scored = self.config.ratio < 1
                found = session.seek(self.batch, instances, scoring=scored)
                scores = found.scores(instances, self.config, number) if scored else torch.zeros(instances.ids.shape)
                selection = select(scores.to(self.device), instances, self.config, step=number)
                to_come = selection.parts(self.config.parts)
                self.keys_values = sum(t.untyped_storage().nbytes() for t in session.recorded())
                if live is not None:
                    live.mark("recorded keys and values", *session.recorded())
                self.seconds["seek"].append(clock.lap())
            self.saved, forward, backward = 0, 0.0, 0.0
            for i in range(1 if self.config is None else len(to_come)):
                with _Saved(self.model, live) if counts else nullcontext() as saved:
                    if self.config is None:
                        loss = self.model(**self.batch, use_cache=False, **self.forward_options).loss
                    else:
                        if counts:
                            SavedBytes.add(saved, *session.recorded())
                        loss = session.ditch(self.batch, instances, to_come[i], to_come=to_come[i + 1 :])
                if counts:
                    self.saved = max(self.saved, saved.total)
                forward += clock.lap()
                loss.backward()
                backward += clock.lap()
            self.seconds["ditch forward"].append(forward)
            self.seconds["backward"].append(backward)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds["optimizer"].append(clock.lap())

    def measure(self, steps: int, counts: str = "all") -> dict:
        """Count bytes in one step, which is the warm-up, then time `steps` steps.

        Args:
            counts: "all", "one micro-batch" (not a later one), or "nothing".
        """
        self._start_optimizer()
        if counts == "nothing":
            self.step(0)
        live = {} if counts == "nothing" else self._live_peak(later=counts == "all")
        saved = self.saved
        self.seconds = {phase: [] for phase in PHASES}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for number in range(1, steps + 1):
            self.step(number)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return {
            "seconds": {part: values for part, values in self.seconds.items() if values},
            "saved_bytes": saved,
            "keys_values_bytes": self.keys_values,
            "parameter_bytes": sum(p.nbytes for p in (*self.model.parameters(), *self.model.buffers())),
            "gradient_bytes": sum(p.nbytes for p in trained),
            "optimizer_bytes": sum(t.nbytes for state in self.optimizer.state.values() for t in state.values()),
            **live,
            "peak_device_bytes": peak_device_bytes(self.device),
            "peak_process_bytes": peak_process_bytes(),
        }

    def _start_optimizer(self) -> None:
        """A step with gradients of 0, after which the optimizer has its state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _live_peak(self, later: bool) -> dict:
        """Live tensors above the weights and optimizer state, in all and by kind; the device's own count is better where there is one.

        Args:
            later: also count a micro-batch after others, when all gradients are there already.
        """
        if self.device.type == "cuda":
            self.step(0, counts=True)
            return {"live_peak_bytes": None}
        held = [t for state in self.optimizer.state.values() for t in state.values()]
        with LiveTensors(self.model, held, self._kind) as live:
            self.step(0, live, counts=True)
        found = {"live_peak_bytes": live.peak, "live_peak_by_kind": live.peak_by_kind}
        if later:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            with LiveTensors(self.model, [*held, *gradients], self._kind) as live:
                self.step(0, live, counts=True)
            found["later_live_peak_bytes"] = live.peak
        return found

    def _kind(self, tensor: torch.Tensor) -> str:
        """What a new tensor is, by its shape."""
        shape = tuple(tensor.shape)
        if shape in self.weight_shapes or shape[::-1] in self.weight_shapes:
            return "gradients of weights"
        return "logits" if shape and shape[-1] == self.vocab_size else "other"


class _Saved(SavedBytes):
    """Tells what is saved to the count of live tensors, too. Logits stay logits."""

    def __init__(self, model, live: LiveTensors | None):
        super().__init__(model)
        self._live, self._vocab_size = live, model.get_input_embeddings().weight.shape[0]

    def add(self, *tensors: torch.Tensor) -> None:
        super().add(*tensors)
        if self._live is not None:
            self._live.mark("saved", *(t for t in tensors if t.shape[-1:] != (self._vocab_size,)))


class _Clock:
    def __init__(self, device):
        self.device = device
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, self._now()
        return self.last - before


# ---- all cases ----


def run_case(*order) -> dict | None:
    """`measure_case` in a new process on a CPU, so that its peak is the case's own. None if it ran out of memory."""
    if order[2] != "cpu":
        return measure_case(*order)
    answers, answer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send, args=(answer, order))
    process.start()
    answer.close()
    try:
        return answers.recv()
    except EOFError:
        process.join()
        print(f"  no result (exit code {process.exitcode})", flush=True)
        return None
    finally:
        process.join()


def _send(answer, order) -> None:
    answer.send(measure_case(*order))


def measure_case(group: dict, method: str, device: str, steps: int, counts: str) -> dict | None:
    try:
        return Case(group, method, device, torch.float32 if device == "cpu" else torch.bfloat16).measure(steps, counts)
    except torch.OutOfMemoryError as error:
        print(f"  no result ({str(error).splitlines()[0]})", flush=True)
        return None
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


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


def merged(turns: list[dict]) -> dict:
    """One case's turns as one record: all seconds together, with their median and 20th and 80th percentile."""
    seconds = {part: [value for turn in turns for value in turn["seconds"][part]] for part in turns[0]["seconds"]}
    totals = [sum(values) for values in zip(*seconds.values(), strict=True)]
    fifths = statistics.quantiles(totals, n=5, method="inclusive") if len(totals) > 1 else totals * 4
    return {
        **{key: value for key, value in turns[0].items() if key != "seconds"},  # in which bytes were counted
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
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    options = parser.parse_args()
    groups = plan(options.quick, options.device, options.toy)
    done: list[dict] = []
    for group in groups:
        found: dict[str, list] = {method: [] for method in group["methods"]}
        for method in [*group["methods"], *group.get("again", ())]:
            print("{model} {adapter} {rows} x {tokens} r={ratio}".format(**group), method, flush=True)
            counts = "nothing" if found[method] else "one micro-batch" if done else "all"
            if (turn := run_case(group, method, options.device, options.steps, counts)) is not None:
                found[method].append(turn)
        cases = {method: merged(turns) if turns else None for method, turns in found.items()}
        if not done:  # of the main group: what the step would take if it were bound by matrix products alone
            for method, case in cases.items():
                if case is not None and method != SFT:
                    case["operations"] = operations(group, method)
        done.append({**{key: value for key, value in group.items() if key not in ("methods", "again")}, "cases": cases})
        result = {
            "benchmark": "efficiency",
            "conditions": {
                "dtype": "float32" if options.device == "cpu" else "bfloat16", "optimizer": "AdamW, fused", "seed": 0,
                "supervised": "all tokens", "steps_of_a_turn": options.steps, "quick": options.quick,
            },
            "groups": done,
            **provenance(),
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
