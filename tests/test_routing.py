"""A mixture's auxiliary loss over kept tokens: the oracle's gradient, and the stock loss where every token is kept."""

import pytest
import torch
import transformers
from test_session import run_passes, settings
from test_trainer import arguments, examples

from tokenseek_trainer import TokenSeekCollator, TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.routing import router_coefficient
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import (
    VOCAB_SIZE,
    Float32AsFloat64,
    ditched_tokens_detached,
    gradients,
    oracle_loss,
    packed_batch,
    ragged_batch,
    relative_error,
)


SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0, "experts_implementation": "eager", "output_router_logits": True, "router_aux_loss_coef": 0.7}  # fmt: skip
EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
    "JetMoe": {"num_local_experts": 4, "num_key_value_heads": 2, "kv_channels": 8, "aux_loss_coef": 0.7},
}  # fmt: skip
BATCHES = {
    "right": lambda: ragged_batch((4, 9, 1, 12), n_prompt=3),
    "left": lambda: ragged_batch((4, 9, 1, 12), left=True),
    "packed": lambda: packed_batch((5, 8)),
}


def mixture(family: str = "Mixtral", **overrides):
    """A random mixture of experts in float64, whose routers are not even."""
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **EXPERTS[family], **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4)
    if config.output_router_logits and not model(torch.ones(1, 2, dtype=torch.long)).router_logits:
        pytest.skip(f"this version of transformers shows no router logits of {family}, in the stock model neither")
    return model.train()


@pytest.fixture
def in_float64():
    """Routers and their loss compute in float32 by choice; in float64 their rounding cannot hide an error."""
    with Float32AsFloat64():
        yield


def load_balancing(logits, n_experts, top_k, mask=None):
    """Switch Transformer, equations 4 to 6, over the tokens of all layers: X * sum over experts of share * probability."""
    probability = torch.cat(logits).softmax(-1)
    counted = torch.ones(len(logits[0])) if mask is None else mask.flatten()
    counted = counted.double().repeat(len(logits))[:, None]
    chosen = torch.zeros_like(probability).scatter_(1, probability.topk(top_k).indices, 1.0)
    share, mean = ((counted * x).sum(0) / counted.sum() for x in (chosen, probability))
    return n_experts * (share * mean).sum()


def oracle_auxiliary(model, batch, keep, instances):
    """From an ordinary forward whose ditched tokens are constants; a kept token's gradient counts n / k times."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with ditched_tokens_detached(model, keep):
        logits = model(**inputs, use_cache=False).router_logits
    counts = torch.ones(keep.shape, dtype=torch.float64)
    for instance in range(instances.count):
        own = instances.ids == instance
        counts[own] = own.sum() / (own & keep).sum().clamp(min=1)
    found = []
    for layer in logits:
        weight = (keep * counts).flatten()[:, None]
        found.append(layer.detach() + weight * (layer - layer.detach()))
    return load_balancing(tuple(found), 4, 2, batch.get("attention_mask"))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", EXPERTS)
def test_gradient_equals_the_detach_oracle(in_float64, family, batch):
    model, data = mixture(family), BATCHES[batch]()
    loss, keep, weights, instances, found = run_passes(model, data, settings(0.4))

    tokens = oracle_loss(model, data, keep, weights, instances.n_supervised.sum())
    auxiliary = oracle_auxiliary(model, data, keep, instances)
    expected = tokens + 0.7 * auxiliary
    expected.backward()

    assert abs(loss - expected) < 1e-9 * abs(expected)
    assert relative_error(found, gradients(model)) < 1e-9


@pytest.mark.parametrize("family", ["Mixtral", "GraniteMoe", "GptOss"])
def test_activation_checkpointing_changes_nothing(family):
    model, data = mixture(family), BATCHES["right"]()
    *_, expected = run_passes(model, data, settings(0.4))
    model.gradient_checkpointing_enable()
    *_, found = run_passes(model, data, settings(0.4))
    assert relative_error(found, expected) < 1e-12


def test_the_auxiliary_loss_matters_in_these_tests(in_float64):
    model, data = mixture(), BATCHES["right"]()
    *_, found = run_passes(model, data, settings(0.4))
    *_, without = run_passes(model, data, settings(0.4), router_weight=0.0)
    assert relative_error(without, found) > 1e-2


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "JetMoe"])
def test_with_every_token_kept_it_is_the_stock_loss(in_float64, family, left, n_parts):
    model, data = mixture(family), ragged_batch((4, 9, 2, 12), left=left)
    config = settings(1.0)
    total = torch.zeros((), dtype=torch.float64)
    with TokenSeekSession(model, config) as session:
        instances = session.instances(data)
        found = session.seek(data, instances, scoring=False)
        scores = torch.zeros(instances.ids.shape)
        parts = select(scores, found.instances, config, causal=False).parts(n_parts)
        assert session.routers.recorded
        for number, part in enumerate(parts):
            loss = session.ditch(data, instances, part, to_come=parts[number + 1 :])
            loss.backward()
            total += loss.detach()
        assert not session.recorded()
    split = gradients(model)
    expected = model(**data, use_cache=False).loss
    expected.backward()

    assert abs(total - expected) < 1e-9 * abs(expected)
    assert relative_error(split, gradients(model)) < 1e-9


def test_the_model_is_the_same_afterwards_and_without_router_logits_nothing_is_recorded():
    model, data = mixture(output_router_logits=False), BATCHES["right"]()
    with TokenSeekSession(model, settings(0.4)) as session:
        session.seek(data, session.instances(data))
        assert not session.routers.recorded
    shown = model(**{k: v for k, v in data.items() if k != "labels"}, output_router_logits=True)
    assert len(shown.router_logits) == 3 and shown.router_logits[0].shape == (data["input_ids"].numel(), 4)


def test_coefficients_are_found():
    assert router_coefficient(mixture("Mixtral")) == router_coefficient(mixture("JetMoe")) == 0.7
    assert router_coefficient(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    ))) == 0.0  # fmt: skip


def train(trainer_class, model, path, **overrides):
    tokenseek = overrides.pop("tokenseek", None)
    extra = {} if tokenseek is None else {"tokenseek": tokenseek}
    args = arguments(path, max_steps=2, **overrides)
    trainer = trainer_class(
        model=model, args=args, train_dataset=examples(), data_collator=TokenSeekCollator(), **extra
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("overrides", [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}])
def test_trainer_at_ratio_one_in_parts_follows_the_stock_trainer(tmp_path, overrides):
    expected, theirs = train(transformers.Trainer, mixture(), tmp_path / "a", **overrides)
    config = TokenSeekConfig(ratio=1.0, parts=2)
    losses, ours = train(TokenSeekTrainer, mixture(), tmp_path / "b", tokenseek=config, **overrides)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert relative_error(ours, theirs) < 1e-6


def test_trainer_adds_it_at_a_tenth_of_the_tokens(tmp_path):
    config = TokenSeekConfig(ratio=0.3)
    losses, _ = train(TokenSeekTrainer, mixture(), tmp_path / "a", tokenseek=config)
    without, _ = train(TokenSeekTrainer, mixture(router_aux_loss_coef=0.0), tmp_path / "b", tokenseek=config)
    assert losses[0] > without[0] + 0.5  # 0.7 times a value that is 1 or more
