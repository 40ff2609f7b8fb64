"""What a training step needs, before any run: the real code on tensors that have a shape and no data.

The model is built from its config with fake tensors, and one whole step (both passes and the backward) runs on them while every
storage and every matrix product is counted. So nothing here knows an architecture, and a step that the library cannot run
cannot be estimated either.

A model of many equal blocks is run at two small depths, and the rest follows: both are linear in the depth.
"""

import copy
import json
import logging
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from .adapters import peft_config
from .config import TokenSeekConfig
from .dataless import AnswersWithoutData, few_chunks, masks_as_in_a_run, on_cpu, quantize
from .errors import ConfigError, UnsupportedModelError, closest
from .instances import Instances
from .memory import LiveTensors, SavedBytes
from .operations import Operations
from .selection import TokenSelection
from .session import TokenSeekSession
from .structure import inspect_model


CONFIGS = Path(__file__).parent / "configs"
METHODS = ("full", "lora", "loha", "qlora")
DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
          "fp32": torch.float32, "float32": torch.float32}  # fmt: skip
# Bytes of optimizer state per trained element of s bytes.
OPTIMIZERS = {
    "adamw_torch_fused": lambda s: 2 * s,
    "adamw_torch": lambda s: 2 * s,
    "adamw_8bit": lambda s: 2 + 2 * 4 / 256,  # two bytes, and a float32 scale per block of 256
    "adamw_bnb_8bit": lambda s: 2 + 2 * 4 / 256,
    "lion_8bit": lambda s: 1 + 4 / 256,
    "paged_adamw_8bit": lambda s: 0,  # in host memory, unless there is room
    "paged_adamw_32bit": lambda s: 0,
    "sgd": lambda s: 0,
}  # fmt: skip
ADAPTER = {"r": 8, "target_modules": "all-linear"}


@dataclass(frozen=True)
class StepEstimate:
    """Bytes and operations of one training step.

    Attributes:
        parameters: all weights and buffers.
        gradients: of the trained weights.
        optimizer: state of the optimizer.
        saved: what one micro-batch keeps for the backward: by autograd, and recorded keys and values.
        keys_values: the recorded keys and values alone (0 in ordinary training).
        peak: greatest sum of all live tensors at any moment, weights and optimizer state included.
        operations: floating-point operations of the matrix products of one micro-batch, forward and backward.
    """

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    keys_values: float
    peak: float
    operations: float


def load_config(name: str):
    """A model's config from a folder, a config.json, a model that ships with this library, or the hub.

    Raises:
        ConfigError: none of them has it.
    """
    path = Path(name)
    shipped = {file.stem: file for file in CONFIGS.glob("*.json")}
    key = name.rsplit("/", 1)[-1].lower().removesuffix("-instruct")  # of the same sizes
    if path.suffix == ".json" and path.is_file():
        return _read_config(path)
    if (path / "config.json").is_file():
        return _read_config(path / "config.json")
    if key in shipped:
        return _read_config(shipped[key])
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No config of {name!r}: not a folder, not a config.json, not on the hub ({str(error).splitlines()[0]}). Without "
            f"network these are known: {', '.join(sorted(shipped))}.{closest(key, shipped)}"
        ) from None


def _read_config(path: Path):
    settings = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in settings:
        raise ConfigError(f"{path} has no model_type, so it is not the config of a transformers model.")
    return AutoConfig.for_model(**settings)


def estimate(
    config,
    *,
    tokens: int,
    batch: int = 1,
    tokenseek: TokenSeekConfig | None = None,
    method: str = "full",
    dtype: str = "bf16",
    optim: str = "adamw_torch_fused",
    checkpointing: bool = False,
    autocast: bool = False,
    adapter: dict | None = None,
) -> StepEstimate:
    """The memory of one training step with every row full and every position supervised.

    Args:
        config: a transformers config.
        tokens: tokens of a row.
        batch: rows of a micro-batch.
        tokenseek: the settings; None, or ratio 1.0 in one part: ordinary training.
        method: "full", "lora", "loha", or "qlora" (NF4 with double quantisation; other weights float32, as PEFT makes them).
        dtype: of the weights: bf16, fp16 or fp32.
        optim: as transformers' TrainingArguments name it.
        checkpointing: activation checkpointing of every block.
        autocast: bfloat16 autocast around the forward (`bf16: true` of the training arguments).
        adapter: keyword arguments of the PEFT config; None for rank 8 on all linear layers.

    Raises:
        ConfigError: a value is outside the choices.
        UnsupportedModelError: the step asks for tensors' values (experts chosen by a router), or the model is refused anyway.
    """
    _check(tokens, batch, method, dtype, optim)
    ordinary = tokenseek is None or (tokenseek.ratio == 1.0 and tokenseek.parts == 1)
    build = _Builder(config, method, DTYPES[dtype], checkpointing, adapter)
    depth, period = build.depth_and_period()

    def measure(n_blocks):
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # its errors are raised, too
        operations = Operations()
        with FakeTensorMode(allow_non_fake_inputs=True), masks_as_in_a_run(), few_chunks(operations):
            model, casting = build(n_blocks), torch.autocast("cpu", torch.bfloat16, enabled=autocast)
            try:
                with operations:
                    found = _measure(model, casting, tokens, batch, None if ordinary else tokenseek, optim)
                return {**found, "operations": operations.total}
            except (RuntimeError, NotImplementedError) as error:
                raise UnsupportedModelError(
                    f"A step of this {config.model_type!r} model does not run on tensors without data, so it cannot be estimated "
                    f"({type(error).__name__}: {str(error).splitlines()[0]}). Mixtures of experts need dtype bf16."
                ) from error

    if 4 * period >= depth:
        return _sum_up(measure(depth))
    low, high = measure(3 * period), measure(4 * period)
    more = (depth - 3 * period) / period
    return _sum_up({name: low[name] + (high[name] - low[name]) * more for name in low})


def least_bytes(config, method: str, dtype: str, optim: str, adapter: dict | None = None) -> int:
    """Weights, gradients and optimizer state alone: what a step needs at the very least. Arguments as for `estimate`."""
    _check(1, 1, method, dtype, optim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _Builder(config, method, DTYPES[dtype], False, adapter)(config.get_text_config().num_hidden_layers)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    trained = [p for p in model.parameters() if p.requires_grad]
    return weights + round(sum(p.nbytes + p.numel() * OPTIMIZERS[optim](p.element_size()) for p in trained))


def _sum_up(measured: dict[str, float]) -> StepEstimate:
    """The peak is that of the worst phase; each phase by itself is linear in the depth."""
    phases = [value for name, value in measured.items() if name.startswith("peak ")]
    values = {f.name: round(measured[f.name]) for f in fields(StepEstimate) if f.name != "peak"}
    return StepEstimate(**values, peak=values["parameters"] + values["optimizer"] + round(max(phases)))


def _check(tokens, batch, method, dtype, optim) -> None:
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value}.")
    for name, value, allowed in (("method", method, METHODS), ("dtype", dtype, DTYPES), ("optim", optim, OPTIMIZERS)):
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{closest(value, allowed)}")


class _Builder:
    """Builds the model, with adapters and 4-bit weights if the method has them, at any depth."""

    def __init__(self, config, method, dtype, checkpointing, adapter):
        self.config, self.method, self.dtype = config, method, dtype
        self.checkpointing, self.adapter = checkpointing, adapter

    def __call__(self, n_blocks: int) -> nn.Module:
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = n_blocks
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:n_blocks]
        with torch.device("meta"):  # PEFT converts weights in ways that fake tensors do not allow
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).train()
            if self.method == "qlora":
                quantize(model, self.dtype)
            if self.method != "full":
                import peft

                settings = {"method": self.method.removeprefix("q"), **(self.adapter or ADAPTER)}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an older name
                    model = peft.get_peft_model(model, peft_config(settings))
        on_cpu(model)
        if self.checkpointing:
            newer = getattr(model, "activation_checkpointing_enable", None)
            enable = newer or model.gradient_checkpointing_enable  # what it is called in older transformers
            enable({"use_reentrant": False})
            if self.method != "full":
                model.enable_input_require_grads()
        return model

    def depth_and_period(self) -> tuple[int, int]:
        """The number of blocks, and after how many they repeat."""
        depth = self.config.get_text_config().num_hidden_layers
        layer_types = getattr(self.config.get_text_config(), "layer_types", None) or [None] * depth
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        with FakeTensorMode():
            blocks = inspect_model(on_cpu(model)).blocks
        kinds = [
            (layer_types[i], tuple((name, tuple(p.shape)) for name, p in block.named_parameters()))
            for i, block in enumerate(blocks)
        ]
        period = next(p for p in range(1, depth + 1) if all(kinds[i] == kinds[i % p] for i in range(depth)))
        return depth, period


def _measure(
    model, casting, tokens: int, batch: int, tokenseek: TokenSeekConfig | None, optim: str
) -> dict[str, float]:
    """The bytes of `StepEstimate`, with a peak for each phase of the step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    step = _ordinary_step if tokenseek is None else _tokenseek_step
    with LiveTensors(model) as live, AnswersWithoutData():
        saved, keys_values, phases = step(model, live, casting, tokens, batch, tokenseek)
    return {
        "parameters": sum(storage.nbytes() for storage in storages.values()),
        "gradients": sum(p.numel() * p.element_size() for p in trained),
        "optimizer": sum(p.numel() * OPTIMIZERS[optim](p.element_size()) for p in trained),
        "saved": saved,
        "keys_values": keys_values,
        **phases,
    }


def _ordinary_step(model, live, casting, tokens, batch, _):
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    with SavedBytes(model) as saved, casting:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return saved.total, 0, _backward(loss, live, {})


def _tokenseek_step(model, live, casting, tokens, batch, config):
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    ones = torch.ones(batch, dtype=torch.long)
    instances = Instances(ids=ids, position_ids=ids, targets=ids, n_tokens=ones, n_supervised=ones, keys=ones)
    k = min(tokens, max(config.min_tokens, round(config.ratio * tokens)))
    sizes = [(i + 1) * k // config.parts - i * k // config.parts for i in reversed(range(config.parts))]
    mask, weights = torch.ones(batch, k, dtype=torch.bool), torch.ones(batch, k, dtype=torch.float64)
    to_come = [TokenSelection(ids[:, :size], mask[:, :size], weights[:, :size]) for size in sizes]
    saved_bytes, phases = 0, {}
    with TokenSeekSession(model, config) as passes:
        with casting:
            passes.seek({"input_ids": ids}, instances, scoring=config.ratio < 1)
        phases["peak seek"] = live.peak
        keys_values = sum(tensor.untyped_storage().nbytes() for tensor in passes.recorded())
        while to_come:
            part, to_come = to_come[0], to_come[1:]
            with SavedBytes(model) as saved, casting:
                saved.add(*passes.recorded())
                loss = passes.ditch({"input_ids": ids}, instances, part, to_come=to_come)
            saved_bytes = max(saved_bytes, saved.total)
            phases = _backward(loss, live, phases, f" of the part before {len(to_come)} others")
    return saved_bytes, keys_values, phases


def _backward(loss, live, phases: dict, name: str = "") -> dict:
    """Going back, activations go and gradients come, so either end can be the worst moment."""
    start = len(live.history)
    loss.backward()
    forward, backward = live.history[:start], live.history[start:]
    half = len(backward) // 2
    ends = {"backward, first half": max(backward[:half]), "backward, second half": max(backward[half:])}
    return {**phases, **{f"peak {key}{name}": value for key, value in {"forward": max(forward), **ends}.items()}}
