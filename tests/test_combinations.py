"""Everything that users combine with a Trainer, on TokenSeekTrainer and TokenSeekSFTTrainer: tested, or refused by name.

The README's feature matrix is generated from TESTED and REFUSED, so it says what is tested here and nothing else.
"""

import importlib
import warnings
from dataclasses import dataclass, field

import peft
import pytest
import test_sft
import test_trainer
import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

from tokenseek_trainer import TokenSeekConfig, TokenSeekMixin, TokenSeekSFTTrainer, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import UnsupportedModelError
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import gradients, ragged_batch, relative_error, tiny_model, tiny_tokenizer


TRAINERS = {"Trainer": (Trainer, TokenSeekTrainer), "SFTTrainer": (SFTTrainer, TokenSeekSFTTrainer)}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
GALORE = {"optim_target_modules": ["mlp"]}


@dataclass
class Case:
    """What is combined: training arguments, an adapter, settings of TokenSeek, a kind of data."""

    arguments: dict = field(default_factory=dict)
    adapter: object = None
    tokenseek: dict = field(default_factory=dict)
    quantized: bool = False
    attention: str = "sdpa"
    rows: str | None = None
    streaming: bool = False
    only: tuple = tuple(TRAINERS)
    tolerance: float = 1e-5  # the stock loss is computed in float32


TESTED = {
    "full fine-tuning": Case(),
    "LoRA": Case(adapter=peft.LoraConfig(**LORA)),
    "DoRA": Case(adapter=peft.LoraConfig(**LORA, use_dora=True)),
    "LoHa": Case(adapter=peft.LoHaConfig(**LORA, init_weights=False)),
    "QLoRA (NF4, double quantisation)": Case(adapter=peft.LoraConfig(**LORA), quantized=True, tolerance=1e-4),
    "activation checkpointing": Case({"gradient_checkpointing": True}),
    "gradient accumulation": Case({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "bf16 autocast": Case({"bf16": True}, tolerance=2**-6),
    "kv_store on the CPU": Case(tokenseek={"kv_store": "cpu"}),
    "parts": Case(tokenseek={"parts": 3}),
    "parts, LoRA, activation checkpointing, accumulation": Case(
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        adapter=peft.LoraConfig(**LORA),
        tokenseek={"parts": 2},
    ),
    "eager attention": Case(attention="eager"),
    "label smoothing": Case({"label_smoothing_factor": 0.1}),
    "8-bit AdamW": Case({"optim": "adamw_bnb_8bit"}),
    "paged AdamW (bitsandbytes does not page on a CPU)": Case({"optim": "paged_adamw_32bit"}),
    "GaLore": Case({"optim": "galore_adamw", **GALORE}, tolerance=1e-3),
    "GaLore, layer by layer": Case({"optim": "galore_adamw_layerwise", **GALORE}, tolerance=1e-3),
    "LOMO": Case({"optim": "lomo"}),
    "streaming data with max_steps": Case(streaming=True),
    "prompt and completion": Case(rows="prompt_completion"),
    "conversations": Case(rows="conversation", only=("SFTTrainer",)),
    "assistant_only_loss": Case({"assistant_only_loss": True}, rows="conversation", only=("SFTTrainer",)),
    "packing (bfd)": Case({"packing": True, "max_length": 32}, only=("SFTTrainer",)),
    "padding_free": Case({"padding_free": True, "max_length": None}, only=("SFTTrainer",)),
}
NEEDS = {"GaLore": "galore_torch", "LOMO": "lomo_optim"}

REFUSED = {
    "reentrant checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "use_reentrant",
    ),
    "torch.compile": ({"torch_compile": True}, "torch_compile=True is not supported"),
    "compute_loss_func": ({"compute_loss_func": lambda *a, **k: None}, "compute_loss_func is not supported"),
    "Liger's fused head": (
        {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
        "fused",
    ),
    "activation_offloading": ({"activation_offloading": True}, "activation_offloading"),
    "DFT loss": ({"loss_type": "dft"}, "loss_type='dft'"),
    "token columns with packing": ({"packing": True, "token_column": True}, "token_indices column, which packing"),
}
# What other files test, or the tests at the end of this one: (Trainer, SFTTrainer, file, test).
ELSEWHERE = {
    "DDP, two processes": (
        "tested",
        "tested",
        "test_distributed",
        "test_two_processes_train_like_one_with_twice_the_batch",
    ),
    "FSDP2, two processes (the two passes)": (
        "tested",
        "",
        "test_distributed",
        "test_wrapped_passes_give_the_gradient_of_one_process",
    ),
    "evaluation in mid-training": (
        "tested",
        "tested",
        "test_trainer",
        "test_evaluation_in_mid_training_does_not_change_the_next_step",
    ),
    "token_indices, token_scores columns": ("tested", "tested", "test_sft", "test_token_indices_survive_and_decide"),
    "NEFTune": ("tested", "", "test_combinations", "test_neftune_noise_is_as_large_as_in_ordinary_training"),
    "fp16 loss scaling (the two passes)": (
        "tested",
        "",
        "test_combinations",
        "test_a_loss_scaler_scales_the_gradients_once",
    ),
    "sequence classification": (
        "tested",
        "",
        "test_classification",
        "test_the_gradient_of_a_sequence_classifier_equals_the_detach_oracle",
    ),
    "mixture of experts with its auxiliary loss": (
        "tested",
        "tested",
        "test_sft",
        "test_a_mixture_of_experts_with_its_auxiliary_loss",
    ),
    "token classification": ("tested", "", "test_classification", "test_a_token_classifier_equals_the_detach_oracle"),
    "prompt tuning, prefix tuning": ("refused", "refused", "test_peft", "test_prompt_learning_is_refused_by_name"),
    "nn.DataParallel": ("refused", "refused", "test_combinations", "test_data_parallel_is_refused"),
    "DPO and other preference trainers": (
        "refused",
        "refused",
        "test_combinations",
        "test_preference_training_is_refused_with_the_reason",
    ),
}
ONLY_SFT = ("activation_offloading", "DFT loss", "token columns with packing")


def feature_matrix() -> list[tuple[str, str, str]]:
    """(feature, Trainer, SFTTrainer) with the entries "tested", "refused" and "" for the README."""
    rows = [
        (name, *("tested" if trainer in case.only else "" for trainer in TRAINERS)) for name, case in TESTED.items()
    ]
    rows += [(name, trainer, sft) for name, (trainer, sft, _, _) in ELSEWHERE.items() if trainer == "tested"]
    rows += [(name, "" if name in ONLY_SFT else "refused", "refused") for name in REFUSED]
    return rows + [(name, trainer, sft) for name, (trainer, sft, _, _) in ELSEWHERE.items() if trainer == "refused"]


def test_the_feature_matrix_names_tests_that_exist():
    for name, (_, _, file, test) in ELSEWHERE.items():
        assert callable(getattr(importlib.import_module(file), test)), name


def names(trainer):
    return [name for name, case in TESTED.items() if trainer in case.only]


def build(tmp_path, trainer, config, case):
    """A trainer of the given kind; config None: the stock one."""
    stock, ours = TRAINERS[trainer]
    arguments = {"max_steps": 3, "lr_scheduler_type": "constant", **case.arguments}
    kwargs = {} if config is None else {"tokenseek": config}
    model = test_sft.model()
    if case.quantized:
        import test_peft

        model = test_peft.quantized_base(tmp_path)
    elif (
        "bnb" in str(arguments.get("optim"))
        or arguments.get("optim", "").startswith(("paged", "galore", "lomo"))
        or arguments.get("bf16")
    ):
        model = model.float()
    model.set_attn_implementation(case.attention)
    torch.manual_seed(1)
    if case.adapter is not None:
        model = peft.get_peft_model(model, case.adapter, autocast_adapter_dtype=False)
        model = (
            model.to(next(p for p in model.parameters() if p.is_floating_point()).dtype)
            if not case.quantized
            else model
        )
    if trainer == "SFTTrainer":
        rows = test_sft.DATA[case.rows or "prompt_completion"]
        data, extra = Dataset.from_list(rows), {"processing_class": tiny_tokenizer()}
        args = test_sft.arguments(tmp_path, **arguments)
    else:
        rows = test_trainer.examples((4, 9, 6, 12, 7, 8), n_prompt=3 if case.rows else 0)
        data, extra = rows, {"data_collator": TokenSeekCollator()}
        args = test_trainer.arguments(tmp_path, **arguments)
    if case.streaming:
        data = IterableDataset.from_generator(lambda: (row for _ in range(9) for row in rows))
    return (stock if config is None else ours)(model=model, args=args, train_dataset=data, **kwargs, **extra)


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step (before clipping moves on); empty if the optimizer consumes them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not hasattr(self, "found"):
            self.found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def run(*args):
    trainer = build(*args)
    trainer.add_callback(gradients_ := FirstGradients())
    trainer.first_gradients = gradients_
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer, relative_error(after, before)


def skip_if_missing(name):
    for start, package in NEEDS.items():
        if name.startswith(start):
            pytest.importorskip(package)


@pytest.mark.parametrize(("trainer", "name"), [(t, n) for t in TRAINERS for n in names(t)])
def test_with_all_tokens_kept_it_trains_like_the_stock_trainer(tmp_path, trainer, name):
    """A ratio of 0.999 keeps every token, but goes through seek and ditch."""
    skip_if_missing(name)
    case = TESTED[name]
    stock, _ = run(tmp_path, trainer, None, case)
    ours, _ = run(tmp_path, trainer, TokenSeekConfig.paper(ratio=0.999, **case.tokenseek), case)
    for key in ("loss", "grad_norm"):
        assert test_sft.logged(ours, key) == pytest.approx(test_sft.logged(stock, key), rel=case.tolerance), key
    expected = stock.first_gradients.found
    assert ours.first_gradients.found.keys() == expected.keys()
    if expected:
        assert relative_error(ours.first_gradients.found, expected) < case.tolerance


@pytest.mark.parametrize(("trainer", "name"), [(t, n) for t in TRAINERS for n in names(t)])
def test_at_a_low_ratio_it_learns_from_few_tokens(tmp_path, trainer, name):
    skip_if_missing(name)
    case = TESTED[name]
    ours, moved = run(tmp_path, trainer, TokenSeekConfig(ratio=0.3, **case.tokenseek), case)
    assert moved > 1e-6
    assert all(0.15 < kept < 0.45 for kept in test_sft.logged(ours, "kept_fraction"))
    full = test_sft.logged(ours, "full_loss")
    assert len(full) == 3 and all(torch.tensor(full).isfinite())


@pytest.mark.parametrize(
    ("trainer", "name"), [(t, n) for t in TRAINERS for n in REFUSED if t == "SFTTrainer" or n not in ONLY_SFT]
)
def test_what_cannot_work_is_refused_by_name(tmp_path, trainer, name):
    arguments, message = REFUSED[name]
    arguments = dict(arguments)
    extra = {}
    if "compute_loss_func" in arguments:
        extra["compute_loss_func"] = arguments.pop("compute_loss_func")
    rows = test_sft.DATA["prompt_completion"]
    if arguments.pop("token_column", False):
        rows = test_sft.encoded_rows(token_indices=lambda row: [1])
    model = test_sft.model()
    with pytest.raises((UnsupportedModelError, ValueError), match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if trainer == "SFTTrainer":
            TokenSeekSFTTrainer(
                model=model, args=test_sft.arguments(tmp_path, **arguments), train_dataset=Dataset.from_list(rows),
                processing_class=tiny_tokenizer(), **extra,
            )  # fmt: skip
        else:
            args = test_trainer.arguments(tmp_path, **arguments)
            TokenSeekTrainer(model=model, args=args, train_dataset=test_trainer.examples(), **extra)


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_parts_are_refused_where_the_backward_updates_weights(tmp_path, optim):
    with pytest.raises(UnsupportedModelError, match=r"parts=2 is not supported with optim.*Set parts=1"):
        build(tmp_path, "Trainer", TokenSeekConfig(parts=2), Case({"optim": optim, **GALORE}))


def test_parts_are_refused_where_tokens_see_later_ones(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"parts=2 is not supported for 'bert'.*Set parts=1"):
        args = test_trainer.arguments(tmp_path)
        TokenSeekTrainer(tiny_model("bert"), args, train_dataset=[], tokenseek=TokenSeekConfig(parts=2))


def test_data_parallel_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"DataParallel is not supported.*accelerate launch"):
        inspect_model(torch.nn.DataParallel(tiny_model("llama")))


def test_preference_training_is_refused_with_the_reason():
    from trl import DPOConfig, DPOTrainer

    class TokenSeekDPOTrainer(TokenSeekMixin, DPOTrainer):
        pass

    with pytest.raises(UnsupportedModelError, match=r"DPOTrainer is not supported.*compares whole sequences"):
        TokenSeekDPOTrainer(model=tiny_model("llama"), args=DPOConfig, train_dataset=None)


def test_neftune_noise_is_as_large_as_in_ordinary_training(tmp_path):
    """It shrinks with the number of tokens that the embedding sees, of which there are fewer now."""
    seen, clean = [], {}
    model = tiny_model("llama")
    alpha, ratio, n = 5.0, 0.25, 12

    def watch(module, args, output):
        tokens = args[0]
        if torch.is_grad_enabled() and module.training:
            seen.append((output - module.weight[tokens]).detach().abs().max().item())
        else:
            clean["difference"] = (output - module.weight[tokens]).abs().max().item()

    trainer = TokenSeekTrainer(
        model=model,
        args=test_trainer.arguments(tmp_path, neftune_noise_alpha=alpha, max_steps=4),
        train_dataset=test_trainer.examples((n, n, n, n)),
        tokenseek=TokenSeekConfig(ratio=ratio),
    )
    trainer.add_callback(Watcher(model, watch))
    trainer.train()
    largest = alpha / (n * 32) ** 0.5
    assert len(seen) == 4
    assert 0.9 * largest < max(seen) <= largest * 1.0001
    assert clean["difference"] == 0
    assert not hasattr(model.get_input_embeddings(), "neftune_noise_alpha")


class Watcher(TrainerCallback):
    """Hooks the embedding after NEFTune has hooked it."""

    def __init__(self, model, watch):
        self.model, self.watch = model, watch

    def on_train_begin(self, *args, **kwargs):
        self.handle = self.model.get_input_embeddings().register_forward_hook(self.watch)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


def test_a_loss_scaler_scales_the_gradients_once():
    """As fp16 training does: the scaled loss goes backward once, and no second backward reaches a parameter."""
    model, data, config = tiny_model("llama", dtype=torch.float32), ragged_batch((9, 12)), TokenSeekConfig(ratio=0.4)
    from test_session import run_passes

    expected = run_passes(model, data, config)[-1]
    calls = {name: 0 for name, _ in model.named_parameters()}

    def count(name):
        return lambda p: calls.update({name: calls[name] + 1})

    hooks = [p.register_post_accumulate_grad_hook(count(name)) for name, p in model.named_parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with TokenSeekSession(model, config) as session:
        from tokenseek_trainer.selection import select

        instances = session.instances(data)
        found = session.seek(data, instances)
        assert not any(calls.values())
        selection = select(found.scores(instances, config, 0), instances, config)
        scaler.scale(session.ditch(data, instances, selection)).backward()
    for hook in hooks:
        hook.remove()
    assert set(calls.values()) == {1}
    scaler.unscale_(optimizer)
    assert relative_error(gradients(model), expected) < 1e-6
