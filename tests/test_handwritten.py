"""Attention that a model file writes out: its context score against the model's own attentions, its mask table, its products."""

import pytest
import torch
from test_conformance import Float32AsFloat64, conformance, gradient_error, tiny_family_model
from test_session import run_parts
from torch import nn
from transformers import AttentionInterface

from tokenseek_trainer import TokenSeekConfig, handwritten
from tokenseek_trainer.errors import SelfCheckError, UnsupportedModelError
from tokenseek_trainer.handwritten import AttentionProducts, mask_tables
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import packed_batch, ragged_batch, relative_error, tiny_model, without_cache


CONFIG = TokenSeekConfig(scorer="context", context_layers=[0, -1])
FAMILIES = (
    "bloom",
    "falcon",
    "gpt_neo",
    "gpt_neox_japanese",
    "megatron-bert",
    "mpt",
    "mvp",
    "openai-gpt",
    "trocr",
    "xglm",
)
BATCHES = {
    "right": lambda: ragged_batch((4, 9, 1, 12)),
    "left": lambda: ragged_batch((9, 12), left=True),
    "packed": lambda: packed_batch((5, 8)),
}


def seek(model, batch):
    with TokenSeekSession(model, CONFIG) as session:
        instances = session.instances(batch)
        return session.seek(batch, instances), instances


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_context_score_is_the_column_sum_of_the_models_own_attentions(family, name):
    model, batch = tiny_family_model(family, torch.float64, attn_implementation="eager"), BATCHES[name]()
    structure = inspect_model(model)
    if name == "packed" and not structure.forward_accepts("position_ids"):
        pytest.skip("it takes no packed rows")
    with Float32AsFloat64():
        found, instances = seek(model, batch)
        inputs = structure.with_own_positions({key: value for key, value in batch.items() if key != "labels"})
        with torch.no_grad():
            attentions = model.eval()(**inputs, **without_cache(model), output_attentions=True).attentions
    assert len(attentions) == len(structure.blocks)
    real = instances.ids >= 0
    expected = torch.stack([attentions[i].mean(1) for i in (0, -1)]).mean(0)
    expected = (expected * real[:, :, None]).sum(1) * real
    assert (found.context - expected).norm() < 1e-9 * expected.norm()


def test_the_probabilities_of_a_fused_call_are_those_of_the_eager_branch():
    """Falcon calls scaled_dot_product_attention itself, which shows none (up to transformers 5.24)."""
    found = {}
    for implementation in ("sdpa", "eager"):
        model = tiny_family_model("falcon", torch.float64, attn_implementation=implementation)
        assert model.config._attn_implementation == implementation
        with Float32AsFloat64():  # later ones take the eager softmax in float32
            found[implementation] = seek(model, ragged_batch((9, 12)))[0].context
    torch.testing.assert_close(found["sdpa"], found["eager"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masked", ["nothing", "causal", "boolean", "added"])
@pytest.mark.parametrize("groups", [4, 2])
def test_weights_of_a_fused_call_times_its_values_are_its_output(masked, groups):
    query, key, value = (torch.randn(2, heads, 7, 8, dtype=torch.float64) for heads in (4, groups, groups))
    allowed = torch.rand(2, 1, 7, 7) < 0.5
    allowed |= torch.eye(7, dtype=torch.bool)
    settings = {
        "nothing": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": allowed},
        "added": {"attn_mask": torch.randn(2, 1, 7, 7, dtype=torch.float64), "scale": 0.3},
    }[masked]
    with AttentionProducts(2, 7) as seen:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **settings)
    (weights_of,) = seen.weights
    queries = torch.tensor([[6, 0, 3], [2, 2, 5]])
    values = value.repeat_interleave(4 // groups, dim=1)
    for row in range(2):
        expected = output[row][:, queries[row]]
        torch.testing.assert_close(weights_of(queries)[row] @ values[row], expected, rtol=1e-12, atol=1e-12)


def test_mask_tables_are_found_by_their_shape_and_given_back():
    model = tiny_family_model("gpt_neo", torch.float64)
    attention = model.transformer.h[0].attn.attention
    assert mask_tables(attention) == ["bias"]
    assert mask_tables(tiny_model("llama").model.layers[0].self_attn) == []
    before = attention.bias
    with TokenSeekSession(model, TokenSeekConfig()):
        assert "bias" in attention.state_dict() or dict(attention.named_buffers())["bias"] is before
    assert attention.bias is before
    assert "bias" not in attention.__dict__


def test_a_wrong_row_of_the_table_is_caught(monkeypatch):
    def last_rows(self, index):
        return self._table[index]

    monkeypatch.setattr(handwritten.TableRows, "__getitem__", last_rows)
    with pytest.raises(SelfCheckError, match="after block"):
        check(tiny_family_model("gpt_neo", torch.float64), ragged_batch((9, 12)))


def check(model, batch):
    with TokenSeekSession(model, TokenSeekConfig()) as session:
        return self_check(session, batch, session.instances(batch))


class ByHand(nn.Module):
    """Attention of llama's blocks in another way of writing it: rows and heads in one, without a cache."""

    def __init__(self, attention):
        super().__init__()
        self.q, self.k, self.v, self.o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        batch, tokens, _ = hidden_states.shape

        def heads(x, count):
            x = x.view(batch, tokens, count, 8).transpose(1, 2)
            return x.repeat_interleave(4 // count, dim=1).reshape(batch * 4, tokens, 8)

        query, key, value = (
            heads(self.q(hidden_states), 4),
            heads(self.k(hidden_states), 2),
            heads(self.v(hidden_states), 2),
        )
        scores = 8**-0.5 * torch.bmm(query, key.transpose(1, 2)).unflatten(0, (batch, 4))
        if attention_mask is None:
            attention_mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        weights = self.mixed(scores.softmax(-1)).flatten(0, 1)
        output = (weights @ value).view(batch, 4, tokens, 8).transpose(1, 2).reshape(batch, tokens, 32)
        return self.o(output), None

    def mixed(self, weights):
        return weights


class TwoSoftmaxes(ByHand):
    def mixed(self, weights):
        return 0.5 * weights + 0.5 * (2 * weights).softmax(-1)


class Block(nn.Module):
    """Llama's, but that it takes no cache."""

    def __init__(self, layer, attention):
        super().__init__()
        self.norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])
        self.attention, self.mlp = attention, layer.mlp

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        hidden_states = hidden_states + self.attention(self.norms[0](hidden_states), attention_mask)[0]
        return hidden_states + self.mlp(self.norms[1](hidden_states))


class FusedAttention(ByHand):
    """The same of the interface's kind: what `ByHand` is compared with."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        attend = AttentionInterface()[self.config._attn_implementation]
        return self.o(attend(self, query, key, value, attention_mask, scaling=8**-0.5)[0].flatten(2)), None


def model_of(kind, module="handwritten_model"):
    """A llama without rotary embedding; its attention is named as one and lies in a file that does not know the interface."""
    kind = type(f"{kind.__name__}Attention", (kind,), {"__module__": module})
    model = tiny_model("llama")
    for i, layer in enumerate(model.model.layers):
        attention = kind(layer.self_attn)
        attention.config, attention.num_key_value_groups, attention.is_causal = model.config, 2, True
        model.model.layers[i] = Block(layer, attention)
    return model


@pytest.mark.parametrize("name", BATCHES)
def test_an_attention_without_a_cache_is_exact_by_its_products(name):
    """Beside the model whose attention goes through the interface, and against the oracle."""
    batch = BATCHES[name]()
    model, expected = model_of(ByHand), model_of(FusedAttention, "transformers.models.llama.modeling_llama")
    assert inspect_model(expected).attention_by_hand == {}
    assert set(inspect_model(model).attention_by_hand.values()) == {None}
    check(model, batch)
    for config in (TokenSeekConfig(ratio=0.4), TokenSeekConfig.paper(ratio=0.4)):
        assert gradient_error(model, batch, config) < 1e-12
        assert gradient_error(expected, batch, config) < 1e-12
        loss, fused_loss = (conformance.ditch(m, batch, config)[0].item() for m in (model, expected))
        assert loss == pytest.approx(fused_loss, rel=1e-12)
        model.zero_grad(), expected.zero_grad()
    torch.testing.assert_close(seek(model, batch)[0].context, seek(expected, batch)[0].context, rtol=1e-9, atol=1e-12)


def test_two_softmaxes_cannot_be_scored_but_train():
    model = model_of(TwoSoftmaxes)
    batch = ragged_batch((9, 12))
    check(model, batch)
    assert gradient_error(model, batch, TokenSeekConfig(ratio=0.4)) < 1e-12
    with pytest.raises(UnsupportedModelError, match="forms 2 softmaxes of all tokens in one attention"):
        seek(model, batch)


@pytest.mark.parametrize("family", ["bart", "falcon", "gpt_neo", "openai-gpt"])
def test_the_self_check_allows_the_rounding_of_bfloat16(family):
    assert check(tiny_family_model(family, torch.bfloat16), ragged_batch((9, 1, 12))) < 2e-2


def test_positions_of_the_wrong_tokens_are_caught(monkeypatch):
    def first_positions(self, selection):
        args, kwargs = self._call
        return self._forward(*args, **kwargs)[..., : selection.indices.shape[1], :].expand(
            len(selection.indices), -1, -1
        )

    monkeypatch.setattr("tokenseek_trainer.positions.OwnPositions.of_selected", first_positions)
    with pytest.raises(SelfCheckError, match="at the embeddings"):
        check(tiny_family_model("bart", torch.float64), ragged_batch((9, 12)))


@pytest.mark.parametrize("family", ["gpt_neo", "openai-gpt"])
def test_parts_of_the_ditch_pass_add_up(family):
    model, batch, config = tiny_family_model(family, torch.float64), BATCHES["left"](), TokenSeekConfig(ratio=0.6)
    with Float32AsFloat64():
        loss, whole = run_parts(model, batch, config, 1)
        parts_loss, found = run_parts(model, batch, config, 3)
    assert abs(parts_loss - loss) < 1e-12 * abs(loss)
    assert relative_error(found, whole) < 1e-12
