"""The ditch pass against the detach oracle, and the session's promise to leave no trace."""

import dataclasses
import gc

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tokenseek_trainer import TokenSeekConfig
from tokenseek_trainer.errors import InputError, UnsupportedModelError
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.testing import (
    gradients,
    oracle_loss,
    packed_batch,
    ragged_batch,
    relative_error,
    tiny_model,
)


FAMILIES = ("llama", "mistral", "gpt2", "bert")
BATCHES = {
    "right": lambda: ragged_batch((4, 9, 1, 12)),
    "left": lambda: ragged_batch((4, 9, 1, 12), left=True),
    "one_row": lambda: ragged_batch((13,)),
    "prompt": lambda: ragged_batch((7, 12), n_prompt=4),
    "packed": lambda: packed_batch((5, 8)),
}


def settings(ratio, **overrides):
    return TokenSeekConfig(
        **{"ratio": ratio, "scorer": "tokenseek", "selection": "topk", "select_from": "all", **overrides}
    )


def run_passes(model, batch, config, step=0, **kwargs):
    """Loss, selection as (B, n) tensors, and gradients of one seek and ditch."""
    with TokenSeekSession(model, config) as session:
        instances = session.instances(batch)
        found = session.seek(batch, instances)
        selection = select(
            found.scores(instances, config, step), instances, config, causal=session.structure.shift, step=step
        )
        loss = session.ditch(batch, instances, selection, **kwargs)
        loss.backward()
    keep = torch.zeros(instances.ids.shape, dtype=torch.bool)
    weights = torch.zeros(instances.ids.shape, dtype=torch.float64)
    rows, slots = selection.mask.nonzero(as_tuple=True)
    keep[rows, selection.indices[rows, slots]] = True
    weights[rows, selection.indices[rows, slots]] = selection.weights[rows, slots]
    return loss.detach(), keep, weights, instances, gradients(model)


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_equals_the_detach_oracle(family, batch, ratio):
    if family == "bert" and batch == "packed":
        pytest.skip("BERT has no notion of packed documents")
    model, data = tiny_model(family), BATCHES[batch]()
    loss, keep, weights, instances, found = run_passes(model, data, settings(ratio))

    expected = oracle_loss(model, data, keep, weights, instances.n_supervised.sum(), shift=family != "bert")
    expected.backward()

    assert abs(loss - expected) < 1e-9 * abs(expected)
    assert relative_error(found, gradients(model)) < 1e-9


ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 16, "factor": 8.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE)
def test_rotary_embeddings_that_depend_on_the_length_see_the_whole_length(kind):
    """The kept tokens end below the length at which frequencies change, the row goes beyond it."""
    model = tiny_model("llama", rope_parameters=ROPE[kind], max_position_embeddings=16)
    data = ragged_batch((40, 33))
    data["labels"][:, 12:] = -100
    loss, keep, weights, instances, found = run_passes(model, data, settings(0.2))
    assert keep.nonzero()[:, 1].max() < 16
    expected = oracle_loss(model, data, keep, weights, instances.n_supervised.sum())
    expected.backward()
    assert abs(loss - expected) < 1e-9 * abs(expected)
    assert relative_error(found, gradients(model)) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_ditching_changes_the_gradient(family):
    """Otherwise the oracle test could pass by ditching nothing."""
    model, data = tiny_model(family), BATCHES["one_row"]()
    _, _, _, _, ditched = run_passes(model, data, settings(0.3))
    _, _, _, _, full = run_passes(model, data, settings(1.0))
    assert relative_error(ditched, full) > 0.1


@pytest.mark.parametrize("batch", ["right", "left", "prompt", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_everything_kept_gives_the_models_own_loss_and_gradient(family, batch):
    model, data = tiny_model(family), BATCHES[batch]()
    loss, _, _, _, found = run_passes(model, data, settings(1.0))
    expected = model(**data, use_cache=False).loss  # with a cache transformers would not tell packed documents apart
    expected.backward()
    # transformers casts float64 logits to float32 for its loss, which bounds the agreement
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_error(found, gradients(model)) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_gives_the_same_gradient_to_the_bit(family):
    model, data = tiny_model(family), BATCHES["right"]()
    plain = run_passes(model, data, settings(0.5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = run_passes(model, data, settings(0.5))
    assert torch.equal(plain[0], checkpointed[0])
    for name, gradient in plain[-1].items():
        assert torch.equal(gradient, checkpointed[-1][name]), name


def test_reentrant_checkpointing_is_refused():
    model = tiny_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedModelError, match="use_reentrant"), TokenSeekSession(model, settings(0.5)):
        pass


@pytest.mark.parametrize("scorer", ["tokenseek", "context", "gradient", "random"])
@pytest.mark.parametrize("selection", ["topk", "sample"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_trains_the_same_alone_padded_or_among_others(family, selection, scorer):
    model = tiny_model(family)
    config = settings(0.4, scorer=scorer, selection=selection)

    def of_row(data, row, n_items=9):
        """Kept positions counted from the row's start, and the row's gradient."""
        others = [r for r in range(len(data["labels"])) if r != row]
        data = {k: v.clone() for k, v in data.items()}
        data["labels"][others] = -100
        _, keep, _, instances, found = run_passes(model, data, config, step=3, num_items_in_batch=n_items)
        real = instances.ids[row] >= 0
        return keep[row][real].nonzero()[:, 0].tolist(), found

    alone = of_row(ragged_batch((9,)), 0)
    variants = {
        "padded": of_row(ragged_batch((9,), pad_to=16), 0),
        "left": of_row(ragged_batch((9,), pad_to=16, left=True), 0),
        "among others": of_row(ragged_batch((4, 9, 12)), 1),
        "among others, left": of_row(ragged_batch((4, 9, 12), left=True), 1),
        "packed": None,
    }
    assert len(alone[0]) == 4
    for name, variant in variants.items():
        if variant is not None:
            assert variant[0] == alone[0], name
            assert relative_error(variant[1], alone[1]) < 1e-9, name


def test_a_document_trains_the_same_packed_or_alone():
    model, config = tiny_model("mistral"), settings(0.5)
    _, packed_keep, _, _, packed = run_passes(model, packed_batch((5, 8)), config, num_items_in_batch=10)
    _, first_keep, _, _, first = run_passes(model, ragged_batch((5,)), config, num_items_in_batch=10)
    _, second_keep, _, _, second = run_passes(model, ragged_batch((8,)), config, num_items_in_batch=10)
    assert torch.equal(packed_keep, torch.cat([first_keep, second_keep], dim=1))
    assert relative_error(packed, {name: first[name] + second[name] for name in first}) < 1e-9


def test_position_ids_need_not_be_given():
    model, config = tiny_model("gpt2"), settings(0.5)
    given = ragged_batch((4, 9), left=True)
    absent = {k: v for k, v in given.items() if k != "position_ids"}
    assert relative_error(run_passes(model, absent, config)[-1], run_passes(model, given, config)[-1]) == 0


def test_rows_without_a_label_train_nothing():
    model = tiny_model("llama")
    data = ragged_batch((6, 9))
    data["labels"][1] = -100
    loss, keep, _, _, found = run_passes(model, data, settings(0.5))
    assert not keep[1].any()
    alone = run_passes(model, ragged_batch((6,)), settings(0.5))
    assert loss == pytest.approx(alone[0].item(), rel=1e-12)
    assert relative_error(found, alone[-1]) < 1e-9


@pytest.mark.parametrize("selection", ["topk", "sample"])
@pytest.mark.parametrize("scorer", ["tokenseek", "random"])
def test_a_batch_without_any_label_gives_zero_gradients(scorer, selection):
    model = tiny_model("llama")
    data = ragged_batch((6, 9))
    data["labels"][:] = -100
    loss, _, _, _, found = run_passes(model, data, settings(0.5, scorer=scorer, selection=selection))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("config", [TokenSeekConfig(), TokenSeekConfig.paper()], ids=["default", "paper"])
def test_the_loss_keeps_its_scale(config, ratio):
    """A model that knows nothing has loss log(64) = 4.16 at every ratio."""
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
    )
    loss = run_passes(model, ragged_batch((200, 150, 180)), dataclasses.replace(config, ratio=ratio))[0]
    assert 3.8 < loss < 4.6


def test_given_losses_are_smoothed_as_the_stock_trainer_does():
    from transformers.trainer_pt_utils import LabelSmoother

    model, data = tiny_model("llama"), ragged_batch((6, 9))
    config = settings(1.0)
    with TokenSeekSession(model, config) as session:
        instances = session.instances(data)
        found = session.seek(data, instances, label_smoothing=0.1)
        selection = select(found.scores(instances, config, 0), instances, config)
        loss = session.ditch(data, instances, selection, label_smoothing=0.1)
    expected = LabelSmoother(epsilon=0.1)(model(**data), data["labels"], shift_labels=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.loss_sum.item() / int(instances.n_supervised.sum()) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("chunk", [64 * 3, 64 * 1000])
def test_the_head_is_applied_in_chunks_without_changing_anything(chunk, monkeypatch):
    from tokenseek_trainer import losses

    model, data = tiny_model("llama"), ragged_batch((4, 9, 12))
    expected = run_passes(model, data, settings(0.7))
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk)
    found = run_passes(model, data, settings(0.7))
    assert torch.equal(found[1], expected[1])
    assert relative_error(found[-1], expected[-1]) < 1e-12


def test_dropout_is_reproducible_and_off_while_seeking():
    model = tiny_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    data, config = ragged_batch((9, 12)), settings(0.5)

    def run(seed):
        torch.manual_seed(seed)
        return run_passes(model, data, config)

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[1], other[1])  # the selection does not depend on dropout
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert all(torch.equal(first[-1][name], again[-1][name]) for name in first[-1])
    assert all(module.training for module in model.modules())

    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = run(1)
    assert all(torch.equal(first[-1][name], checkpointed[-1][name]) for name in first[-1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_autocast_stays_near_float32(checkpointing):
    model, data, config = tiny_model("llama", dtype=torch.float32), ragged_batch((9, 12)), settings(0.5)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    exact = run_passes(model, data, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = run_passes(model, data, config)
        ordinary = model(**data).loss
    ordinary.backward()
    gradients(model)
    assert all(gradient.isfinite().all() for gradient in low[-1].values())
    # every weight must get a gradient: one that was cast without grad in the seek pass would get none
    assert all((low[-1][name] != 0).any() == (exact[-1][name] != 0).any() for name in exact[-1])
    if torch.equal(low[1], exact[1]):
        assert relative_error(low[-1], exact[-1]) < 0.1


def test_keys_and_values_are_never_repeated_and_queries_of_fused_projections_are_not_kept():
    llama, gpt2, data = tiny_model("llama"), tiny_model("gpt2"), ragged_batch((9, 12))
    for model, groups in ((llama, 2), (gpt2, 4)):
        with TokenSeekSession(model, settings(0.5)) as session:
            session.seek(data, session.instances(data))
            for tensor in session.recorded():
                assert tensor.shape == (2, groups, 12, 8)
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_masks_of_the_seek_pass_are_gone_before_the_ditch_pass(implementation):
    model, n = tiny_model("mistral"), 97
    model.set_attn_implementation(implementation)
    data = ragged_batch((n, 50))

    def square():
        gc.collect()
        return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape[-2:] == (n, n)]

    assert not square()
    with TokenSeekSession(model, settings(0.3)) as session:
        session.seek(data, session.instances(data))
        assert not square()


def test_kv_store_on_the_cpu_gives_the_same_result():
    model, data = tiny_model("llama"), ragged_batch((9, 12))
    on_device = run_passes(model, data, settings(0.5))
    on_cpu = run_passes(model, data, settings(0.5, kv_store="cpu"))
    assert relative_error(on_cpu[-1], on_device[-1]) == 0


def state_of(model):
    """Everything about a model that a session touches, by identity."""
    modules = {
        name: (
            {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")},
            {hook_type: dict(hooks) for hook_type, hooks in vars(module).items() if hook_type.endswith("_hooks")},
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    }
    registered = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    return modules, registered, [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("fails_in", [None, "seek", "ditch", "backward"])
def test_the_model_is_left_as_it_was(fails_in, monkeypatch):
    model, data = tiny_model("llama").train(), ragged_batch((9, 12))
    model.model.layers[1].eval()  # a user's own choice must survive
    model.forward = model.forward  # as accelerate does: a forward on the instance must be put back, not deleted
    before = state_of(model)
    calls = {"n": 0}

    def boom(module, args, output):
        calls["n"] += 1
        if (fails_in, calls["n"]) in (("seek", 1), ("ditch", 2)):
            raise ZeroDivisionError("planned")
        if fails_in == "backward" and calls["n"] == 2:
            output.register_hook(lambda gradient: 1 / 0)

    hook = model.model.layers[1].mlp.register_forward_hook(boom)
    try:
        run_passes(model, data, settings(0.5))
    except ZeroDivisionError:
        assert fails_in is not None
    else:
        assert fails_in is None
    hook.remove()
    model.zero_grad()
    assert state_of(model) == before


def test_generation_is_untouched_by_training(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", dtype=torch.float32)
    run_passes(model, ragged_batch((9, 12)), settings(0.5))
    model.eval()
    prompt = torch.tensor([[5, 6, 7]])
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **kwargs), reloaded.generate(prompt, **kwargs))


def test_extra_inputs_that_cannot_be_gathered_are_refused_by_name():
    model, data = tiny_model("llama"), ragged_batch((9, 12))
    data["pixel_values"] = torch.zeros(2, 3, 4, 4)
    with pytest.raises(InputError, match="pixel_values"):
        run_passes(model, data, settings(0.5))


def test_context_layers_outside_the_model_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"block 7.*blocks 0 to 2"):
        TokenSeekSession(tiny_model("llama"), settings(0.5, context_layers=[7]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_keys_and_values_are_let_go_at_their_last_use(checkpointing):
    model, data = tiny_model("llama"), ragged_batch((9, 12))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = settings(0.5)
    with TokenSeekSession(model, config) as session:
        instances = session.instances(data)
        scores = session.seek(data, instances).scores(instances, config, 0)
        assert len(session.recorded()) == 2 * 3
        loss = session.ditch(data, instances, select(scores, instances, config))
        assert len(session.recorded()) == (2 * 3 if checkpointing else 0)  # a recomputed block needs them again
        loss.backward()
        assert session.recorded() == []


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ratio", [0.3, 0.999, 1.0])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_parts_add_up_to_the_gradient_of_the_whole(family, batch, ratio, checkpointing):
    model, data, config = tiny_model(family), BATCHES[batch](), settings(ratio)
    loss, _, _, _, whole = run_passes(model, data, config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for count in (2, 3, 5):
        parts_loss, found = run_parts(model, data, config, count)
        assert abs(parts_loss - loss) < 1e-12 * abs(loss)
        assert relative_error(found, whole) < 1e-12


def run_parts(model, data, config, count):
    """Summed loss and gradients of the ditch pass in parts."""
    total = 0.0
    with TokenSeekSession(model, config) as session:
        instances = session.instances(data)
        found = session.seek(data, instances)
        selection = select(found.scores(instances, config, 0), instances, config)
        parts = selection.parts(count)
        for i, part in enumerate(parts):
            loss = session.ditch(data, instances, part, to_come=parts[i + 1 :])
            loss.backward()
            total += loss.detach()
        assert not session.recorded()
    return total, gradients(model)


def test_parts_are_refused_where_a_token_sees_later_ones():
    """Its gradient at keys of a part that ran before would be lost without a word."""
    with pytest.raises(UnsupportedModelError, match=r"attend to later ones.*Set parts=1"):
        run_parts(tiny_model("bert"), ragged_batch((9, 6)), settings(0.8), 2)
