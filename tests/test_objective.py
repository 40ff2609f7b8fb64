"""Which label a position predicts, against the loss that the model's own forward computes."""

import pytest
import torch
from test_conformance import tiny_family_model
from torch.nn.functional import cross_entropy
from transformers import BartConfig, BartForCausalLM, Trainer, TrainingArguments

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import InputError, UnsupportedModelError
from tokenseek_trainer.objective import shifts_labels
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import ragged_batch, tiny_model


@pytest.mark.parametrize("family", ["bart", "whisper", "marian", "llama", "bert"])
def test_the_label_that_a_position_predicts_is_the_one_of_the_models_own_loss(family):
    model = tiny_model("bert") if family == "bert" else tiny_family_model(family, torch.float64)
    batch = {name: values for name, values in ragged_batch((9,)).items() if name in ("input_ids", "labels")}
    batch["labels"][:, [0, 2, 5]] = -100
    output = model(**batch, use_cache=False) if family != "bert" else model(**batch)
    shift = shifts_labels(model)
    logits = output.logits[:, :-1] if shift else output.logits
    labels = batch["labels"][:, 1:] if shift else batch["labels"]
    assert output.loss.item() == pytest.approx(cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-6)


def own_loss(loss_of):
    class OwnLoss(BartForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            output = super().forward(input_ids, attention_mask, **kwargs)
            output.loss = None if labels is None else loss_of(output.logits, labels)
            return output

    return OwnLoss(
        BartConfig(vocab_size=64, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16)
    )


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda logits, labels: cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), torch.roll(labels, -1, 1).flatten()),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flip(1).flatten()),
        lambda logits, labels: cross_entropy(2 * logits.flatten(0, 1), labels.flatten()),
        lambda logits, labels: 2 * cross_entropy(logits.flatten(0, 1), labels.flatten()),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean(),
        lambda logits, labels: logits.square().mean(),
        lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels.max() > 0 else 0,
    ],
)
def test_a_loss_that_is_anything_else_is_refused(loss_of):
    with pytest.raises(UnsupportedModelError, match="computes its loss itself, and not as the cross-entropy of every"):
        shifts_labels(own_loss(loss_of))


def test_the_trial_leaves_the_model_as_it_was():
    model = own_loss(lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten()))
    before, config = {name: p.clone() for name, p in model.named_parameters()}, model.config.to_dict()
    state = torch.random.get_rng_state()
    assert shifts_labels(model) is False
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert model.training
    assert all(torch.equal(p, before[name]) and p.device.type == "cpu" for name, p in model.named_parameters())


def arguments(folder, **settings):
    return TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip


def without_positions(rows):
    batch = TokenSeekCollator()(rows)
    del batch["position_ids"]
    return batch


def test_a_decoder_of_barts_kind_trains_as_with_the_stock_trainer(tmp_path):
    """At ratio 1.0 to the bit; below it the logged loss of all tokens is the stock loss."""
    rows = [{"input_ids": list(range(1, 13)), "labels": [*range(2, 13), -100]}] * 4
    seen = {}
    for name, ratio, parts in (("stock", None, 1), ("all", 1.0, 1), ("half", 0.5, 1), ("half in parts", 0.5, 3)):
        model = tiny_family_model("bart", torch.float32)
        args = {"model": model, "args": arguments(tmp_path), "train_dataset": rows}
        if ratio is None:
            trainer = Trainer(**args, data_collator=without_positions)
        else:
            trainer = TokenSeekTrainer(**args, tokenseek=TokenSeekConfig(ratio=ratio, parts=parts))
        trainer.train()
        seen[name] = trainer.state.log_history
    assert [log["loss"] for log in seen["stock"][:2]] == [log["loss"] for log in seen["all"][:2]]
    assert seen["half"][0]["full_loss"] == pytest.approx(seen["stock"][0]["loss"], rel=1e-5)
    assert seen["half"][0]["kept_fraction"] == pytest.approx(0.5)
    for log, in_parts in zip(seen["half"][:2], seen["half in parts"][:2], strict=True):
        assert in_parts["loss"] == pytest.approx(log["loss"], rel=1e-5)
        assert in_parts["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-5)
        assert in_parts["saved_mib"] < log["saved_mib"]


def test_labels_that_are_the_tokens_themselves_are_refused(tmp_path):
    model = tiny_family_model("bart", torch.float32)
    trainer = TokenSeekTrainer(
        model=model, args=arguments(tmp_path), train_dataset=[{"input_ids": list(range(1, 13))}] * 4
    )
    with pytest.raises(InputError, match=r"it would learn to copy.*labels\[j\] = input_ids\[j \+ 1\]"):
        trainer.train()


def test_states_of_an_encoder_are_refused():
    model = tiny_family_model("bart", torch.float64)
    batch = ragged_batch((9, 12))
    batch["encoder_hidden_states"] = torch.randn(2, 12, 32, dtype=torch.float64)
    with (
        TokenSeekSession(model, TokenSeekConfig()) as session,
        pytest.raises(InputError, match="encoder_hidden_states"),
    ):
        session.seek(batch, session.instances(batch))
