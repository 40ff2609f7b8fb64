"""One case of the efficiency benchmark: a model in training by one method, whose steps are counted and timed."""

import tempfile
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.estimate import load_config
from tokenseek_trainer.memory import LiveTensors, SavedBytes, peak_device_bytes, peak_process_bytes
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession


SFT = "SFTTrainer"  # as TRL has it: checkpointing, and its fused head, which never holds all logits
METHODS = {  # settings of TokenSeek (None: ordinary), activation checkpointing
    "Trainer": (None, False),
    "Trainer + checkpointing": (None, True),
    SFT: (None, True),
    "TokenSeek": ({}, False),
    "TokenSeek + checkpointing": ({}, True),
    "random tokens": ({"scorer": "random", "selection": "topk"}, False),
    "the paper's scores": ({"scorer": "tokenseek", "selection": "topk", "select_from": "all"}, False),
    "TokenSeek, 30 % in 3 parts": ({"ratio": 0.3, "parts": 3}, False),
    "all tokens in 8 parts": ({"ratio": 1.0, "parts": 8}, False),
}
OTHER_RATIOS = {f"TokenSeek, ratio {ratio}": ({"ratio": ratio}, False) for ratio in (0.05, 0.2, 0.5, 0.999)}
PHASES = ("seek", "ditch forward", "backward", "optimizer")


def shape(name: str, blocks: int | None):
    """A shipped config, cut to some blocks."""
    config = load_config(name)
    if blocks is not None:
        config.num_hidden_layers = blocks
    return config


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
        settings, checkpointing = {**METHODS, **OTHER_RATIOS}[method]
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

    def count(self, counts: str = "all") -> None:
        """Count the bytes of one step, which also warms up.

        Args:
            counts: "all", or "one micro-batch" (not a later one).
        """
        self._start_optimizer()
        self.counted = self._live_peak(later=counts == "all")
        self.counted["saved_bytes"] = self.saved
        self.seconds = {phase: [] for phase in PHASES}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def result(self) -> dict:
        """What was counted, and the seconds of all steps since."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return {
            "seconds": {part: values for part, values in self.seconds.items() if values},
            "keys_values_bytes": self.keys_values,
            "parameter_bytes": sum(p.nbytes for p in (*self.model.parameters(), *self.model.buffers())),
            "gradient_bytes": sum(p.nbytes for p in trained),
            "optimizer_bytes": sum(t.nbytes for state in self.optimizer.state.values() for t in state.values()),
            **self.counted,
            "peak_device_bytes": peak_device_bytes(self.device),
            "peak_process_bytes": peak_process_bytes(),
        }

    def _start_optimizer(self) -> None:
        """A step with gradients of 0, after which the optimizer has its state."""
        self._make_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _make_gradients(self) -> list[torch.Tensor]:
        """Gradients of 0, as there are some from the second micro-batch on."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in trained]

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
            with LiveTensors(self.model, [*held, *self._make_gradients()], self._kind) as live:
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
