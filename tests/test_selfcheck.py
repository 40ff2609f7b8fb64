"""The self-check passes on every right model and catches the two ways in which a model can be wrong."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.errors import SelfCheckError, UnsupportedModelError
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import packed_batch, ragged_batch, tiny_model


def check(model, data):
    with TokenSeekSession(model, TokenSeekConfig()) as session:
        return self_check(session, data, session.instances(data))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bert"])
def test_right_models_pass(family, dtype):
    data = [ragged_batch((4, 9, 1, 12)), ragged_batch((4, 9, 12), left=True)]
    if family != "bert":
        data.append(packed_batch())
    for batch in data:
        assert check(tiny_model(family, dtype=dtype), batch) < 2e-2


def test_right_models_pass_with_dropout_and_under_autocast():
    model = tiny_model("gpt2", dtype=torch.float32, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    assert check(model, ragged_batch((9, 12))) < 1e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check(model, ragged_batch((9, 12))) < 2e-2


def test_a_row_that_cannot_leave_a_token_out_proves_nothing():
    assert check(tiny_model("llama"), ragged_batch((1, 1))) is None


class MixesTokens(nn.Module):
    """Wraps an MLP; adds to every token the one before it, as a convolution would."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x) + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def test_a_model_that_mixes_tokens_outside_attention_is_caught_at_its_block():
    model = tiny_model("llama")
    model.model.layers[1].mlp = MixesTokens(model.model.layers[1].mlp)
    with pytest.raises(SelfCheckError, match=r"'llama' model.*after block 1 .*wrong gradients"):
        check(model, ragged_batch((9, 12)))


def test_a_model_that_ignores_position_ids_is_caught(monkeypatch):
    model = tiny_model("gpt2")
    original = model.transformer.wpe.forward

    def own_positions(position_ids):
        return original(torch.arange(position_ids.shape[-1]).expand_as(position_ids))

    monkeypatch.setattr(model.transformer.wpe, "forward", own_positions)
    with pytest.raises(SelfCheckError, match=r"'gpt2' model.*at the embeddings.*position_ids"):
        check(model, ragged_batch((9, 12)))


def test_what_depends_on_the_longest_position_is_caught(monkeypatch):
    """Without the special care that the session takes for such rotary embeddings, the check must not pass."""
    import test_session

    model = tiny_model("llama", rope_parameters=test_session.ROPE["longrope"], max_position_embeddings=16)
    data = ragged_batch((20,))
    assert check(model, data) < 1e-9
    monkeypatch.setattr("tokenseek_trainer.session.depends_on_length", lambda module: False)
    with pytest.raises(SelfCheckError, match="after block 0"):
        check(model, data)


def test_compiled_models_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"torch.compile is not supported"):
        inspect_model(torch.compile(tiny_model("llama")))
    model = tiny_model("llama")
    model.compile()
    with pytest.raises(UnsupportedModelError, match=r"torch.compile is not supported"):
        inspect_model(model)


def test_an_adapter_with_a_loss_of_its_own_is_refused():
    peft = pytest.importorskip("peft")
    adalora = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"])
    with pytest.raises(UnsupportedModelError, match="ADALORA adds a regulariser"):
        inspect_model(peft.get_peft_model(tiny_model("llama"), adalora))


def test_a_state_space_model_is_refused_by_name():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*mix tokens outside attention"):
        inspect_model(model)


def test_linear_attention_layers_are_refused_by_name():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="layers of type linear_attention"):
        inspect_model(model)


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match=r"meta device.*Load the weights"):
        inspect_model(model)


def test_encoder_decoders_headless_models_and_other_losses_are_refused():
    from transformers import BertForQuestionAnswering, T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        inspect_model(t5)
    with pytest.raises(UnsupportedModelError, match="no stack of blocks below a head"):
        inspect_model(tiny_model("llama").model)
    with pytest.raises(UnsupportedModelError, match="ForQuestionAnsweringLoss"):
        inspect_model(BertForQuestionAnswering(tiny_model("bert").config))
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel, got Linear"):
        inspect_model(nn.Linear(2, 2))


def test_a_block_without_attention_is_named():
    model = tiny_model("llama")

    class NoAttention(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model.model.layers[2].self_attn = NoAttention()
    with pytest.raises(UnsupportedModelError, match="Block 2 of the 'llama' model"):
        check(model, ragged_batch((9, 12)))


def test_a_model_that_needs_all_its_tokens_to_run_is_told_so():
    model, batch = tiny_model("llama"), ragged_batch((9, 12))

    def needs_all(module, args, output):
        if output.shape[1] < 12:
            raise RuntimeError("The size of tensor a (4) must match the size of tensor b (12)")

    model.model.layers[1].mlp.register_forward_hook(needs_all)
    with (
        pytest.raises(
            SelfCheckError, match=r"'llama' model does not run on a part of its tokens .*The size of tensor a"
        ),
        TokenSeekSession(model, TokenSeekConfig()) as session,
    ):
        self_check(session, batch, session.instances(batch))


def test_a_subclass_that_passes_its_forward_on_is_accepted_and_one_with_its_own_loss_is_not():
    class Passes(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Computes(LlamaPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.model = LlamaModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
            self.loss_type = "ForCausalLM"

        def forward(self, input_ids, position_ids=None, labels=None):
            logits = self.lm_head(self.model(input_ids, position_ids=position_ids)[0])
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    config = tiny_model("llama").config
    assert inspect_model(Passes(config)).shift
    with pytest.raises(UnsupportedModelError, match="computes its loss itself"):
        inspect_model(Computes(config))
