"""Families of transformers' causal language models: exact against the oracle, or refused with a sentence that says why."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainingArguments
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.falcon import modeling_falcon

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer, attention
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import UnsupportedModelError
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import context_blocks, inspect_model
from tokenseek_trainer.testing import ragged_batch, tiny_model


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))

import conformance  # noqa: E402, F401
from conformance import (  # noqa: E402
    BATCHES,
    FAMILIES,
    SELECTIONS,
    Float32AsFloat64,
    check_family,
    gradient_error,
    stock_logits,
)
from tiny_configs import ATTENTION_ONLY, tiny_config, tiny_family_model  # noqa: E402


SAMPLE = (
    "bart", "bloom", "cohere2", "deepseek_v3", "deepseek_v32", "diffllama", "falcon", "gemma2", "gemma4_text", "glm4", "glm_moe_dsa",
    "gpt_neo", "gpt_oss", "granite", "llama4_text", "mllama", "modernbert-decoder", "mpt", "olmo2", "openai-gpt", "phi3", "qwen2",
    "qwen3_moe", "roberta", "smollm3",
)  # fmt: skip


@pytest.mark.parametrize("family", SAMPLE)
def test_the_gradient_of_the_family_is_exact(family):
    found = check_family(family)
    assert found["outcome"] == "exact", found
    assert found["dtype"] == "float64"
    assert found["errors"].get("checkpointed", 0) == 0


def test_several_residual_streams():
    model = tiny_family_model("gemma3n_text", torch.float64)
    batch = BATCHES["padded"]()
    with Float32AsFloat64():
        with TokenSeekSession(model, TokenSeekConfig()) as session:
            assert self_check(session, batch, session.instances(batch)) < 1e-12
        assert gradient_error(model, batch, SELECTIONS["default"]) < 1e-9


def test_alibi_in_a_model_that_takes_positions_too():
    """Its eager branch differs from its sdpa branch, so neither may stand for the other.

    Where the biases are added to the mask (transformers 5.25), the self-check refuses it.
    """
    found = check_family("falcon", alibi=True, new_decoder_architecture=False)
    if hasattr(modeling_falcon, "ALL_ATTENTION_FUNCTIONS"):
        assert found["outcome"] == "refused" and "does not run on a part of its tokens" in found["reason"]
    else:
        assert found["outcome"] == "exact"


def test_masks_of_other_models_are_left_alone_and_the_mask_function_is_put_back():
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping)
    model, other = tiny_family_model("falcon", torch.float64), tiny_model("llama")
    batch, stranger = ragged_batch((9, 12)), ragged_batch((7, 12), left=True)
    expected = stock_logits(other, stranger)
    with TokenSeekSession(model, TokenSeekConfig()) as session:
        assert torch.equal(stock_logits(other, stranger), expected)
        session.seek(batch, session.instances(batch))
    assert ALL_MASK_ATTENTION_FUNCTIONS._local_mapping == before


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h"])
def test_a_hybrid_family_is_exact_where_its_model_has_attention_only(family):
    """Nemotron-H then ends with a block that has no attention: the context score is that of the last one that has."""
    assert check_family(family, **ATTENTION_ONLY[family])["outcome"] == "exact"


def test_the_context_score_of_a_block_without_attention_is_refused():
    model = tiny_family_model("nemotron_h", torch.float64, **ATTENTION_ONLY["nemotron_h"])
    structure = inspect_model(model)
    assert structure.tokenwise_blocks == {1, 3}
    assert context_blocks(TokenSeekConfig.paper(), structure) == {2}
    assert context_blocks(TokenSeekConfig.paper(context_layers="all"), structure) == {0, 2}
    with pytest.raises(
        UnsupportedModelError, match=r"names block -1, which has no attention. Blocks with attention: \[0, 2\]"
    ):
        context_blocks(TokenSeekConfig.paper(context_layers=[0, -1]), structure)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("qwen3_next", "linear_attention (linear attention or a state space), which mix tokens outside attention"),
        ("lfm2_moe", "conv (a convolution over tokens)"),
        ("deepseek_v4", "heavily_compressed_attention (attention to keys that are each made from several tokens)"),
        ("reformer", "does not run on a part of its tokens"),
        ("doge", "another mask than that of transformers' mask interface"),
        ("dory", "runs one block twice"),
        ("hrm_text", "blocks that run in loops"),
        ("xlnet", "takes no position_ids"),
        (
            "prophetnet",
            "computes its loss itself, and not as the cross-entropy of every position's logits with its label",
        ),
    ],
)
def test_a_refusal_names_the_reason(family, sentence):
    found = check_family(family)
    assert found["outcome"] == "refused", found
    assert sentence in found["reason"]


def test_a_gradient_that_is_off_by_a_millionth_is_wrong(monkeypatch):
    backward = attention._Splice.backward

    def off(ctx, gradient):
        fresh, *rest = backward(ctx, gradient)
        return (fresh * (1 + 1e-6), *rest)

    monkeypatch.setattr(attention._Splice, "backward", staticmethod(off))
    found = check_family("llama")
    assert found["outcome"] == "wrong"
    assert 1e-9 < found["error"] < 1e-5


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_vl"])
def test_a_vision_model_trains_on_text(family):
    """Its vision tower has as many blocks as its text model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(tiny_config(family)).double().train()
    assert all(block in set(model.get_decoder().modules()) for block in inspect_model(model).blocks)
    with Float32AsFloat64():
        assert gradient_error(model, BATCHES["padded"](), SELECTIONS["random"]) < 1e-9


@pytest.mark.parametrize("family", ["bloom", "roberta"])
def test_a_model_without_positions_or_with_its_own_trains_and_evaluates_with_the_collators(family, tmp_path):
    """The collator counts them from 0."""
    model = tiny_family_model(family, torch.float64)
    data = ragged_batch((4, 9, 12))
    rows = [
        {name: data[name][row][data["attention_mask"][row] == 1].tolist() for name in ("input_ids", "labels")}
        for row in range(3)
    ]
    expected = model(**{name: value for name, value in data.items() if name != "position_ids"}).loss.item()
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=3, per_device_eval_batch_size=3, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = TokenSeekTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=TokenSeekCollator(),
        tokenseek=TokenSeekConfig(ratio=0.4),
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()
    assert trainer.state.log_history[-2]["full_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_no_family_is_wrong_and_no_fewer_are_exact_than_recorded():
    recorded = json.loads((ROOT / "eval" / "results" / "conformance.json").read_text())
    outcomes = {family: check_family(family)["outcome"] for family in FAMILIES}
    assert [family for family, outcome in outcomes.items() if outcome == "wrong"] == []
    exact = [family for family, found in recorded["families"].items() if found["outcome"] == "exact"]
    assert [family for family in exact if outcomes.get(family) != "exact"] == []
