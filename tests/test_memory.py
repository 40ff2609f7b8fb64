"""The product's claim, counted: bytes that autograd keeps, against the closed form and against ordinary training."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.memory import LiveTensors, SavedBytes, llama_layer_elements
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import ragged_batch


N, WIDTH, HEADS, GROUPS, FLOAT32 = 512, 256, 8, 2, 4
K = round(0.1 * N)


def llama(n_layers):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=int(3.5 * WIDTH),
        num_hidden_layers=n_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
    )
    return LlamaForCausalLM(config).train()


def saved_by_ordinary_training(model, batch):
    with SavedBytes(model) as saved:
        model(**batch, use_cache=False).loss  # noqa: B018
    return saved.total


def saved_by_tokenseek(model, batch, **settings):
    config = TokenSeekConfig(ratio=0.1, **settings)
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        selection = select(session.seek(batch, instances).scores(instances, config, 0), instances, config)
        assert selection.mask.sum() == K
        with SavedBytes(model) as saved:
            saved.add(*session.recorded())
            session.ditch(batch, instances, selection)
    return saved.total


def per_layer(measure, checkpointing):
    """Elements per block: the difference between 6 and 2 blocks, so that embeddings, masks and head cancel."""
    totals = []
    for n_layers in (2, 6):
        model = llama(n_layers)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = ragged_batch((N,))
        del batch["attention_mask"]
        totals.append(measure(model, batch))
    return (totals[1] - totals[0]) / 4 / FLOAT32


@pytest.mark.parametrize("settings", [{}, {"scorer": "tokenseek", "selection": "topk", "select_from": "all"}])
@pytest.mark.parametrize(("checkpointing", "limit"), [(False, 2.9), (True, 0.7)])
def test_tokenseek_keeps_what_the_memory_model_says(checkpointing, limit, settings):
    elements = per_layer(lambda model, batch: saved_by_tokenseek(model, batch, **settings), checkpointing)
    assert elements == llama_layer_elements(llama(1).config, N, K, checkpointing)
    assert elements / (N * WIDTH) <= limit


@pytest.mark.parametrize(("checkpointing", "expected"), [(False, 22.6), (True, 1.0)])
def test_ordinary_training_keeps_what_the_memory_model_says(checkpointing, expected):
    elements = per_layer(saved_by_ordinary_training, checkpointing)
    assert elements == llama_layer_elements(llama(1).config, N, None, checkpointing)
    assert elements / (N * WIDTH) == pytest.approx(expected, abs=0.1)


def test_masks_are_shared_by_all_layers():
    """A row mask is k * n floats a head of the group; kept per layer it would cost more than the activations it serves."""
    model, batch = llama(6), ragged_batch((N,))
    total = saved_by_tokenseek(model, batch) / FLOAT32
    blocks = 6 * llama_layer_elements(model.config, N, K)
    one_mask = HEADS // GROUPS * K * N
    assert total - blocks < one_mask + 20 * K * WIDTH


def test_a_storage_counts_once_and_parameters_do_not_count():
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with SavedBytes(layer) as saved:
        y = layer(x)
        z = (y * y[:2].sum()).sum()
        (layer(2 * x) ** 3).sum()  # freed at once, with all that was saved for it
    assert z.requires_grad
    # x for the weight, y for the product (also as a view), and the sum
    assert saved.total == (4 * 8 + 4 * 8 + 1) * FLOAT32


def test_live_tensors_are_told_apart_by_kind():
    layer = torch.nn.Linear(8, 8)
    with LiveTensors(layer, kind=lambda tensor: "wide" if tensor.shape[-1] == 64 else "other") as live:
        x = torch.empty(4, 8)
        wide = torch.empty(4, 64)
        live.mark("saved", x, x[:2], layer.weight)
        del wide
        y = torch.empty(2, 8)
        assert live.now == (4 * 8 + 2 * 8) * FLOAT32
    assert live.peak_by_kind == {"other": 4 * 8 * FLOAT32, "wide": 4 * 64 * FLOAT32}
    with live:
        z = torch.empty(100, 8)
    assert live.peak_by_kind == {"saved": 4 * 8 * FLOAT32, "other": (2 * 8 + 100 * 8) * FLOAT32}
    assert sum(live.peak_by_kind.values()) == live.peak and len(y) + len(z) == 102
