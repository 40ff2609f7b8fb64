"""The seek pass: its scores against eager attentions and a full backward, under every attention implementation."""

import pytest
import torch

from tokenseek_trainer import TokenSeekConfig, scoring
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import packed_batch, ragged_batch, tiny_model


CONFIG = TokenSeekConfig.paper()
BATCHES = {
    "right": lambda: ragged_batch((4, 9, 1, 12)),
    "left": lambda: ragged_batch((4, 9, 12), left=True),
    "prompt": lambda: ragged_batch((7, 12), n_prompt=4),
    "packed": lambda: packed_batch((5, 8)),
}
CASES = [(f, b) for f in ("llama", "mistral", "gpt2", "bert") for b in BATCHES if (f, b) != ("bert", "packed")]


def seek(model, batch, config=CONFIG):
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        return session.seek(batch, instances), instances


def inputs_of(model, batch):
    no_cache = {} if model.config.model_type == "bert" else {"use_cache": False}
    return {**{k: v for k, v in batch.items() if k != "labels"}, **no_cache}


@pytest.mark.parametrize("layers", ["last", "all", [0, -1]])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_context_score_is_the_column_sum_of_the_eager_attentions(family, name, layers, monkeypatch):
    model, batch = tiny_model(family), BATCHES[name]()
    found, instances = seek(model, batch, TokenSeekConfig.paper(context_layers=layers))

    model.set_attn_implementation("eager")
    softmax = (
        torch.nn.functional.softmax
    )  # transformers casts to float32 in it, where the mask of a pad's row overflows
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    with torch.no_grad():
        attentions = model.eval()(**inputs_of(model, batch), output_attentions=True).attentions
    chosen = {"last": [2], "all": [0, 1, 2]}[layers] if isinstance(layers, str) else layers
    real = instances.ids >= 0
    expected = torch.stack([attentions[i].mean(1) for i in chosen]).mean(0)  # (B, queries, keys)
    expected = (expected * real[:, :, None]).sum(1) * real
    assert (found.context - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_gradient_score_is_that_of_a_full_backward(family, name):
    model, batch = tiny_model(family), BATCHES[name]()
    found, instances = seek(model, batch)

    kept = {}
    block = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))[-1]

    def keep(module, args, kwargs):
        kept["z"] = args[0] if args else kwargs["hidden_states"]
        kept["z"].retain_grad()

    hook = block.register_forward_pre_hook(keep, with_kwargs=True)
    logits = model(**inputs_of(model, batch)).logits
    hook.remove()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), instances.targets.flatten(), reduction="none")
    losses.sum().backward()
    expected = kept["z"].grad.abs().sum(-1)

    assert (found.gradient - expected).norm() < 1e-9 * expected.norm()
    assert found.loss_sum.item() == pytest.approx(losses.sum().item(), rel=1e-12)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_scores_do_not_depend_on_the_attention_implementation(family, name):
    batch = BATCHES[name]()
    results = {}
    for implementation in ("sdpa", "eager"):
        model = tiny_model(family, dtype=torch.float32)
        model.set_attn_implementation(implementation)
        results[implementation] = seek(model, batch)[0]
        assert model.config._attn_implementation == implementation
    for field in ("context", "gradient"):
        a, b = (getattr(results[i], field) for i in ("sdpa", "eager"))
        assert (a - b).norm() < 1e-5 * b.norm(), field


def test_scoring_touches_no_parameter():
    model = tiny_model("llama")
    model.model.layers[-1].mlp.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    seek(model, ragged_batch((9, 12)))
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == flags


def test_scoring_works_when_nothing_below_the_last_block_is_trained():
    """As with adapters: no input of the last block then requires grad by itself."""
    model = tiny_model("llama")
    expected, _ = seek(model, ragged_batch((9, 12)))
    model.requires_grad_(False)
    found, _ = seek(model, ragged_batch((9, 12)))
    assert torch.equal(found.gradient, expected.gradient)


def test_attention_probabilities_are_held_in_chunks(monkeypatch):
    """No tensor of n x n per head may exist while scoring."""
    n, heads = 12, 4
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", heads * n * 3)
    sizes = []
    original = scoring.eager_attention_weights

    def spy(*args, **kwargs):
        weights = original(*args, **kwargs)
        sizes.append(weights.shape)
        return weights

    monkeypatch.setattr("tokenseek_trainer.attention.eager_attention_weights", spy)
    model, batch = tiny_model("llama"), ragged_batch((n,))
    chunked, _ = seek(model, batch)
    assert sizes == [(1, heads, 3, n)] * 4
    monkeypatch.undo()
    torch.testing.assert_close(chunked.context, seek(model, batch)[0].context, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        ("tokenseek", (True, True, True)),
        ("context", (True, False, True)),
        ("gradient", (False, True, True)),
        ("random", (False, False, False)),
    ],
)
def test_only_what_the_scorer_needs_is_computed(scorer, expected):
    found, _ = seek(tiny_model("llama"), ragged_batch((9, 12)), TokenSeekConfig(scorer=scorer))
    assert tuple(value is not None for value in (found.context, found.gradient, found.loss_sum)) == expected
