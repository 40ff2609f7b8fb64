"""Sparse attention whose indexer chooses the keys of every query (DeepSeek V3.2, GLM 5): chosen once, kept for the ditch pass."""

import pytest
import torch
from test_conformance import tiny_family_model
from test_session import settings

from tokenseek_trainer.errors import UnsupportedModelError
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import Float32AsFloat64, gradients, ragged_batch, relative_error


FAMILIES = ("deepseek_v32", "glm_moe_dsa")  # the latter shares an indexer's choice between layers


@pytest.fixture(autouse=True)
def in_float64():
    with Float32AsFloat64():
        yield


def passes(model, batch, config, n_parts=1):
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        parts = select(found.scores(instances, config, 0), instances, config).parts(n_parts)
        for number, part in enumerate(parts):
            session.ditch(batch, instances, part, to_come=parts[number + 1 :]).backward()
    return gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_parts_the_gradient_is_that_of_all_at_once(family):
    model, batch = tiny_family_model(family, torch.float64), ragged_batch((14, 20))
    whole = passes(model, batch, settings(0.5))
    assert relative_error(passes(model, batch, settings(0.5), n_parts=3), whole) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_score_counts_chosen_keys_only(family):
    model, batch = tiny_family_model(family, torch.float64), ragged_batch((20,))
    with TokenSeekSession(model, settings(0.5)) as session:
        found = session.seek(batch, session.instances(batch))
    model.set_attn_implementation("eager")
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    last = model(**inputs, output_attentions=True, use_cache=False).attentions[-1]
    assert (last > 0).sum(-1).max() == model.config.index_topk
    assert torch.allclose(found.context, last.mean(1).sum(1), atol=1e-12)


def test_a_choice_of_all_keys_is_not_stored():
    batch = ragged_batch((20,))
    for topk, n_choices in ((6, 4), (20, 0), (2048, 0)):
        model = tiny_family_model("deepseek_v32", torch.float64, index_topk=topk)
        with TokenSeekSession(model, settings(0.5)) as session:
            session.seek(batch, session.instances(batch))
            stored = [tensor for tensor in session.recorded() if not tensor.is_floating_point()]
            assert [tuple(tensor.shape) for tensor in stored] == [(1, 20, topk)] * n_choices


def test_an_indexer_that_keeps_its_choice_to_itself_is_refused(monkeypatch):
    model, batch = tiny_family_model("deepseek_v32", torch.float64), ragged_batch((20,))
    with TokenSeekSession(model, settings(0.5)) as session:
        with pytest.raises(UnsupportedModelError, match="keys that its indexer chose"):
            session.attention._attention(model.model.layers[0].self_attn, None, None, None, None)
        indexer = model.model.layers[0].self_attn.indexer
        session.attention._mode = "seek"
        session.attention._instances = session.instances(batch)
        with pytest.raises(UnsupportedModelError, match="something else than the chosen keys"):
            session.attention._run_indexer(indexer, lambda: torch.zeros(1, 20, 20))
