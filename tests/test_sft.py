"""TokenSeekSFTTrainer: TRL's data modes and defaults, with token ditching."""

import pytest
import torch
from datasets import Dataset
from test_routing import mixture
from trl import SFTConfig, SFTTrainer

from tokenseek_trainer import TokenSeekConfig, TokenSeekSFTTrainer
from tokenseek_trainer.errors import InputError, UnsupportedModelError
from tokenseek_trainer.testing import relative_error, tiny_model, tiny_tokenizer


def sentence(start, length):
    return " ".join(f"w{(start * 7 + j * j) % 50}" for j in range(length))


def chat(i):
    user, answer = (
        {"role": "user", "content": sentence(i, 4)},
        {"role": "assistant", "content": sentence(i + 1, 3 + i % 5)},
    )
    return [user, answer, {"role": "user", "content": sentence(i + 2, 2)}, {**answer, "content": sentence(i + 3, 4)}]


ROWS = range(8)
DATA = {
    "text": [{"text": sentence(i, 6 + i)} for i in ROWS],
    "prompt_completion": [
        {"prompt": sentence(i, 3 + i % 3), "completion": " " + sentence(i + 5, 4 + i)} for i in ROWS
    ],
    "conversation": [{"messages": chat(i)} for i in ROWS],
    "conversational_prompt": [{"prompt": chat(i)[:3], "completion": chat(i)[3:]} for i in ROWS],
}
MODES = {
    "language modelling": ("text", {}),
    "prompt and completion": ("prompt_completion", {}),
    "train on the prompt": ("prompt_completion", {"completion_only_loss": False}),
    "conversations": ("conversation", {}),
    "conversational prompts": ("conversational_prompt", {}),
    "assistant_only_loss": ("conversation", {"assistant_only_loss": True}),
    "packing (bfd)": ("prompt_completion", {"packing": True, "max_length": 32}),
    "padding_free": ("prompt_completion", {"padding_free": True, "max_length": None}),
}


def arguments(tmp_path, **overrides):
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "bf16": False,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_length": 64,
        "dataset_num_proc": None,
        "dataloader_pin_memory": False,
        "shuffle_dataset": False,
    }
    return SFTConfig(**{**settings, **overrides})


def model():
    return tiny_model("llama", pad_token_id=0, eos_token_id=2, bos_token_id=None)


def trainer_of(tmp_path, config, rows="prompt_completion", trainer_class=TokenSeekSFTTrainer, **overrides):
    kwargs = {} if config is None else {"tokenseek": config}
    rows = DATA[rows] if isinstance(rows, str) else rows
    extra = {k: overrides.pop(k) for k in ("model", "peft_config", "eval_dataset") if k in overrides}
    return trainer_class(
        **{"model": model(), **extra},
        args=arguments(tmp_path, **overrides),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        **kwargs,
    )


def trained(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    return trainer, {name: p.detach().clone() for name, p in unwrapped.named_parameters()}


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("ratio", [0.999, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_keeping_all_tokens_is_the_stock_trainer(tmp_path, mode, ratio):
    rows, overrides = MODES[mode]
    stock, a = trained(tmp_path, None, rows, SFTTrainer, **overrides)
    ours, b = trained(tmp_path, TokenSeekConfig.paper(ratio=ratio), rows, **overrides)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-5)
    assert logged(ours, "grad_norm") == pytest.approx(logged(stock, "grad_norm"), rel=1e-5)
    assert logged(ours, "num_tokens") == logged(stock, "num_tokens")
    assert relative_error(b, a) < 1e-4  # AdamW amplifies the float32 rounding of the stock loss


@pytest.mark.parametrize("overrides", [{}, {"gradient_accumulation_steps": 2}, {"padding_free": True}])
def test_a_mixture_of_experts_with_its_auxiliary_loss(tmp_path, overrides):
    """SFTTrainer switches it on where a model has one. Every token in two parts, then some."""
    common = {"max_length": None, "learning_rate": 1e-3, **overrides}
    stock, a = trained(tmp_path, None, trainer_class=SFTTrainer, model=mixture(), **common)
    ours, b = trained(tmp_path, TokenSeekConfig(ratio=1.0, parts=2), model=mixture(), **common)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-6)
    assert logged(ours, "aux_loss") == pytest.approx(logged(stock, "aux_loss"), rel=1e-6)
    assert logged(ours, "grad_norm") == pytest.approx(logged(stock, "grad_norm"), rel=1e-5)
    assert relative_error(b, a) < 1e-4
    some, _ = trained(tmp_path, TokenSeekConfig(ratio=0.3), model=mixture(), **common)
    assert logged(some, "aux_loss")[0] == pytest.approx(logged(stock, "aux_loss")[0], rel=1e-6)  # of all tokens


@pytest.mark.parametrize("mode", MODES)
def test_training_at_a_low_ratio_learns_and_keeps_few_tokens(tmp_path, mode):
    rows, overrides = MODES[mode]
    config = TokenSeekConfig(ratio=0.3)
    trainer, after = trained(tmp_path, config, rows, **{**overrides, "max_steps": 12})
    assert relative_error(after, dict(model().named_parameters())) > 1e-3
    assert 0.2 < logged(trainer, "kept_fraction")[0] < 0.4
    assert logged(trainer, "full_loss")[-1] < logged(trainer, "full_loss")[0]


def test_documents_are_selected_alike_packed_or_padded(tmp_path):
    """Padding-free batches hold the same documents as padded ones: so must the losses and the parameters."""
    for config in (TokenSeekConfig(ratio=0.4), TokenSeekConfig.paper(ratio=0.4)):
        padded, a = trained(tmp_path, config)
        flat, b = trained(tmp_path, config, padding_free=True, max_length=None)
        assert logged(flat, "loss") == pytest.approx(logged(padded, "loss"), rel=1e-6)
        assert logged(flat, "kept_tokens") == logged(padded, "kept_tokens")
        assert relative_error(b, a) < 1e-7


@pytest.mark.parametrize("ratio", [0.999, 1.0])
def test_a_whole_run_is_the_same_packed_or_not(tmp_path, ratio):
    """All eight documents fit one packed row, so both runs see the same documents in every step."""
    config, common = TokenSeekConfig.paper(ratio=ratio), {"max_steps": 30, "optim": "sgd"}
    loose, _ = trained(tmp_path, config, per_device_train_batch_size=8, **common)
    packed, _ = trained(tmp_path, config, per_device_train_batch_size=1, packing=True, max_length=256, **common)
    for key in ("loss", "grad_norm"):
        drift = (torch.tensor(logged(loose, key)) - torch.tensor(logged(packed, key))).abs()
        assert len(drift) == 30
        assert drift.max() < 1e-5 and drift.mean() < 1e-6, key  # the stock loss, at ratio 1.0, is computed in float32


def test_metrics_of_the_kept_tokens_bear_their_name(tmp_path):
    trainer, _ = trained(tmp_path, TokenSeekConfig(ratio=0.4))
    stock, _ = trained(tmp_path, None, trainer_class=SFTTrainer)
    keys = set(trainer.state.log_history[0])
    assert {"kept_entropy", "kept_mean_token_accuracy", "num_tokens"} <= keys
    assert not {"entropy", "mean_token_accuracy"} & keys
    assert logged(trainer, "num_tokens") == logged(stock, "num_tokens")
    assert 0 < logged(trainer, "kept_entropy")[0] < torch.log(torch.tensor(64.0))


def test_with_all_tokens_kept_the_metrics_are_the_stock_ones(tmp_path):
    stock, _ = trained(tmp_path, None, trainer_class=SFTTrainer)
    ours, _ = trained(tmp_path, TokenSeekConfig.paper(ratio=0.999))
    assert logged(ours, "kept_entropy") == pytest.approx(logged(stock, "entropy"), rel=1e-4)
    assert logged(ours, "kept_mean_token_accuracy") == pytest.approx(logged(stock, "mean_token_accuracy"), rel=1e-6)


def test_evaluation_is_the_stock_one(tmp_path):
    held_out = Dataset.from_list(DATA["prompt_completion"][:3])
    ours = trainer_of(tmp_path, TokenSeekConfig(ratio=0.2), eval_dataset=held_out).evaluate()
    stock = trainer_of(tmp_path, None, trainer_class=SFTTrainer, eval_dataset=held_out).evaluate()
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert ours[key] == pytest.approx(stock[key], rel=1e-6), key


def test_an_evaluation_in_mid_training_does_not_change_the_next_step(tmp_path):
    held_out = Dataset.from_list(DATA["prompt_completion"][:3])
    _, without = trained(tmp_path, TokenSeekConfig(ratio=0.4), max_steps=3)
    _, evaluated = trained(
        tmp_path, TokenSeekConfig(ratio=0.4), max_steps=3, eval_dataset=held_out, eval_strategy="steps", eval_steps=1
    )
    assert relative_error(evaluated, without) == 0


def test_activation_checkpointing_stays_on_and_changes_nothing(tmp_path):
    on, a = trained(tmp_path, TokenSeekConfig(ratio=0.4))
    off, b = trained(tmp_path, TokenSeekConfig(ratio=0.4), gradient_checkpointing=False)
    assert relative_error(a, b) == 0
    assert logged(on, "saved_mib")[0] < logged(off, "saved_mib")[0]


# ---- token columns ----


def encoded_rows(**columns):
    rows = [{"input_ids": [5 + (i + j) % 40 for j in range(6 + i)]} for i in ROWS]
    rows = [{**row, "labels": list(row["input_ids"])} for row in rows]
    return [{**row, **{name: make(row) for name, make in columns.items()}} for row in rows]


def test_token_indices_survive_and_decide(tmp_path):
    rows = encoded_rows(token_indices=lambda row: [1, 2, len(row["input_ids"]) - 2])
    trainer, _ = trained(tmp_path, TokenSeekConfig.paper(), rows)
    assert logged(trainer, "kept_tokens") == [12.0, 12.0]
    assert not logged(trainer, "full_loss")


def test_token_columns_are_cut_with_the_text(tmp_path):
    rows = encoded_rows(
        token_scores=lambda row: [float(i) for i in range(len(row["input_ids"]))],
        token_indices=lambda row: list(range(len(row["input_ids"]))),
    )
    trainer = trainer_of(tmp_path, TokenSeekConfig.paper(), rows, max_length=8)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[1] == batch["token_scores"].shape[1] == 8
    assert batch["token_indices"].max() == 7
    trainer.train()


def test_bad_token_columns_are_refused(tmp_path):
    beyond = encoded_rows(token_indices=lambda row: [len(row["input_ids"])])
    with pytest.raises(InputError, match=r"token_indices of example .* hold"):
        trained(tmp_path, TokenSeekConfig.paper(), beyond)
    short = encoded_rows(token_scores=lambda row: [1.0])
    with pytest.raises(InputError, match=r"token_scores of example \d has 1 entries"):
        trained(tmp_path, TokenSeekConfig.paper(), short)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"packing": True}, "token_indices column, which packing"),
        ({"padding_free": True, "max_length": None}, "token_indices column, which packing and padding_free"),
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end'"),
    ],
)
def test_token_columns_that_cannot_be_carried_are_refused_by_name(tmp_path, overrides, message):
    rows = encoded_rows(token_indices=lambda row: [1])
    with pytest.raises(UnsupportedModelError, match=message):
        trainer_of(tmp_path, TokenSeekConfig.paper(), rows, **overrides)


def test_losses_that_would_be_ignored_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="loss_type='dft'"):
        trainer_of(tmp_path, TokenSeekConfig(), loss_type="dft")


def test_label_smoothing_is_honoured(tmp_path):
    stock, a = trained(tmp_path, None, trainer_class=SFTTrainer, label_smoothing_factor=0.1)
    ours, b = trained(tmp_path, TokenSeekConfig.paper(ratio=0.999), label_smoothing_factor=0.1)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-5)
    assert relative_error(b, a) < 1e-4


def test_an_eos_that_is_also_the_padding_token_keeps_its_label(tmp_path):
    tokenizer = tiny_tokenizer(pad_token="<eos>")
    trainer = TokenSeekSFTTrainer(
        model=model(),
        args=arguments(tmp_path),
        train_dataset=Dataset.from_list(DATA["prompt_completion"]),
        processing_class=tokenizer,
        tokenseek=TokenSeekConfig(ratio=0.3),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    last = batch["attention_mask"].sum(-1) - 1
    assert (batch["labels"].gather(1, last[:, None]) == tokenizer.eos_token_id).all()
    trainer.train()
