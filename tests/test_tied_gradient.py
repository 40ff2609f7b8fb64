"""The gradient of weights that embed tokens and make logits: right, and there once."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import GemmaConfig, GemmaForCausalLM

from tokenseek_trainer import TokenSeekConfig, losses
from tokenseek_trainer.memory import LiveTensors
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import gradients, oracle_loss, packed_batch, ragged_batch, relative_error, tiny_model
from tokenseek_trainer.tied_gradient import TiedGradient, _summed_by_token


def gemma():
    """Scales what it embeds, and knows a padding token."""
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    return GemmaForCausalLM(config).double().train()


MODELS = {
    "llama": lambda: tiny_model("llama", tie_word_embeddings=True),
    "gpt2": lambda: tiny_model("gpt2"),
    "gemma": gemma,
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("family", MODELS)
def test_two_micro_batches_equal_the_detach_oracle(monkeypatch, family, chunk, parts):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 64 * chunk)
    model, config = MODELS[family](), TokenSeekConfig(ratio=0.5, parts=parts, scorer="random", selection="topk")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    batches, expected = [ragged_batch((4, 9, 1, 12), left=True), packed_batch((5, 8))], []
    for batch in batches:
        with TokenSeekSession(model, config) as session:
            instances = session.instances(batch)
            found = session.seek(batch, instances)
            selection = select(found.scores(instances, config, 0), instances, config, causal=True)
            to_come = selection.parts(parts)
            while to_come:
                part, *to_come = to_come
                session.ditch(batch, instances, part, to_come=to_come).backward()
        keep = torch.zeros(instances.ids.shape, dtype=torch.bool)
        weights = torch.zeros(instances.ids.shape, dtype=torch.float64)
        rows, slots = selection.mask.nonzero(as_tuple=True)
        keep[rows, selection.indices[rows, slots]] = True
        weights[rows, selection.indices[rows, slots]] = selection.weights[rows, slots]
        expected.append((batch, keep, weights, instances.n_supervised.sum()))
    found = gradients(model)
    model.zero_grad()
    for arguments in expected:
        oracle_loss(model, *arguments).backward()
    assert relative_error(found, gradients(model)) < 1e-9


def a_step(model, **settings):
    config = TokenSeekConfig(**{"ratio": 0.25, **settings})
    batch = ragged_batch((24,))
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        selection = select(session.seek(batch, instances).scores(instances, config, 0), instances, config)
        session.ditch(batch, instances, selection).backward()


def test_no_second_gradient_of_the_vocabulary_is_made(monkeypatch):
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=20_000, dtype=torch.float32)
    gradient = model.lm_head.weight.nbytes
    everything = sum(p.nbytes for p in model.parameters())
    for small in (True, False):
        if not small:
            monkeypatch.setattr(TiedGradient, "attach", lambda self, stack: None)
        model.zero_grad()
        with LiveTensors(model) as live:
            a_step(model, ratio=0.1, min_tokens=1, scorer="random", selection="topk")
        assert live.now == pytest.approx(everything, rel=0.01)
        more = live.peak - everything
        assert more < 0.6 * gradient if small else more > 1.9 * gradient


def test_a_frozen_part_and_untied_weights_are_left_to_autograd():
    for model in (tiny_model("llama"), tiny_model("llama", tie_word_embeddings=True)):
        if model.lm_head.weight is model.get_input_embeddings().weight:
            model.lm_head.weight.requires_grad_(False)
        a_step(model)
        assert (model.lm_head.weight.grad is None) is not model.lm_head.weight.requires_grad


def test_nothing_stays_behind():
    model = tiny_model("llama", tie_word_embeddings=True)
    weight = model.lm_head.weight
    a_step(model)
    for module in (model.lm_head, model.get_input_embeddings()):
        assert module.weight is weight and "forward" not in module.__dict__
    assert not model.get_input_embeddings().sparse and weight.grad.layout == torch.strided


@pytest.fixture
def tied():
    """Tied modules, collecting; the collector."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(9, 4, dtype=torch.float64), nn.Linear(4, 9, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    with contextlib.ExitStack() as stack:
        collector = TiedGradient(embedding, head)
        collector.attach(stack)
        collector.start(ditches=True)
        yield embedding, head, collector


def test_a_head_without_an_embedding_keeps_its_gradient(tied):
    _, head, _ = tied
    x = torch.randn(3, 4, dtype=torch.float64)
    head(x).square().sum().backward()
    found, head.weight.grad = head.weight.grad, None
    linear(x, head.weight).square().sum().backward()
    assert torch.equal(found, head.weight.grad)


def test_other_gradients_may_be_asked_for_alone(tied):
    embedding, head, _ = tied
    hidden = embedding(torch.tensor([[3, 3, 5]]))
    logits = head(hidden.tanh())
    (at_hidden,) = torch.autograd.grad(logits.square().sum(), hidden, retain_graph=True)
    expected = torch.zeros(9, 4, dtype=torch.float64).index_add_(0, torch.tensor([3, 3, 5]), at_hidden[0])
    (found,) = torch.autograd.grad(hidden, embedding.weight, at_hidden)
    assert torch.allclose(found, expected, rtol=1e-12)


def test_a_frequent_token_is_rounded_once():
    torch.manual_seed(0)
    tokens, rows = torch.tensor([5, 2, 5, 5, 2, 0, 7] * 40), torch.randn(280, 3).bfloat16()
    expected = torch.zeros(8, 3, dtype=torch.float64).index_add_(0, tokens, rows.double())
    found_tokens, sums = _summed_by_token(tokens, rows)
    found = torch.zeros(8, 3, dtype=torch.bfloat16).index_add_(0, found_tokens, sums.bfloat16())
    assert torch.equal(found, expected.to(torch.float32).bfloat16())
    assert torch.equal(_summed_by_token(tokens[:1], rows[:1])[1], rows[:1].float())
