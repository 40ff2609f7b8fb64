"""Packed documents that the stock forward does not keep apart: told from the masks, as a comparison of logits tells."""

import warnings

import pytest
import torch
from test_conformance import BATCHES, tiny_family_model
from test_conformance import conformance as check
from transformers import Trainer, TrainingArguments

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.testing import packed_batch, ragged_batch, tiny_model


@pytest.mark.parametrize(
    ("family", "apart"),
    [
        ("llama", True),
        ("gpt_neo", True),
        ("falcon", True),
        ("gemma3", True),
        ("gpt_oss", False),
        ("opt", False),
        ("openai-gpt", False),
        ("xglm", False),
        ("biogpt", False),
    ],
)
def test_the_masks_say_what_the_logits_say(family, apart):
    model, batch = tiny_family_model(family, torch.float32), BATCHES["packed"]()
    assert check.keeps_documents_apart(model, batch) is apart
    assert check.told_of_mixing(model, batch) is not apart


def test_a_document_boundary_in_the_second_row_and_none_at_padding():
    model = tiny_family_model("opt", torch.float32)
    packed = packed_batch((5, 8))
    plain = {name: values[:, :13] for name, values in ragged_batch((13,)).items() if name in packed}
    both = {name: torch.cat([plain[name], packed[name]]) for name in packed}
    assert check.told_of_mixing(model, both)
    for alone in (plain, ragged_batch((4, 9, 12)), ragged_batch((4, 12), left=True)):
        assert not check.told_of_mixing(model, alone)
    without_masks = tiny_family_model("openai-gpt", torch.float32)
    assert not check.told_of_mixing(without_masks, ragged_batch((4, 12), left=True))


def collate(rows):
    return packed_batch((5, 8))


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_the_trainer_warns_at_the_first_packed_batch_once(family, tmp_path):
    model = tiny_family_model("opt", torch.float32) if family == "opt" else tiny_model("llama", dtype=torch.float32)
    args = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=1, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = TokenSeekTrainer(
        model=model, args=args, train_dataset=[{"input_ids": [1, 2]}] * 3, data_collator=collate,
        tokenseek=TokenSeekConfig(ratio=0.5),
    )  # fmt: skip
    assert isinstance(trainer, Trainer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    told = [str(w.message) for w in seen if "does not keep packed documents apart" in str(w.message)]
    assert len(told) == (1 if family == "opt" else 0)
    assert all("'opt' model" in text for text in told)
