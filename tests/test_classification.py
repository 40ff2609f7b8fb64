"""Sequence and token classification: against the detach oracle, the stock model's loss, and the stock Trainer."""

import gc

import peft
import pytest
import torch
import transformers
from test_session import run_passes, settings
from test_trainer import arguments, losses
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithPadding, Trainer

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import InputError, SelfCheckError, UnsupportedModelError
from tokenseek_trainer.selection import select
from tokenseek_trainer.selfcheck import self_check
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import (
    VOCAB_SIZE,
    ditched_tokens_detached,
    gradients,
    ragged_batch,
    relative_error,
    tiny_tokenizer,
)
from tokenseek_trainer.token_columns import add_token_columns


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection():
    """Every Trainer collects garbage when it starts, through all that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "summary_last_dropout": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip
# By name: the class's prefix, and further settings. ModernBERT has both of its masks: global in block 0, local in the others.
ENCODERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "modernbert": ("ModernBert", {"local_attention": 6}),
    "modernbert-mean": ("ModernBert", {"local_attention": 6, "classifier_pooling": "mean"}),
    "distilbert": ("DistilBert", {}),
    "electra": ("Electra", {}),
}
DECODERS = {"llama": ("Llama", {}), "gpt2": ("GPT2", {}), "qwen3": ("Qwen3", {"head_dim": 8})}

PROBLEMS = {"single": 3, "multi": 3, "regression": 1}


def tiny_classifier(name, task="SequenceClassification", *, dtype=torch.float64, **overrides):
    prefix, own = {**ENCODERS, **DECODERS}[name]
    model_class = getattr(transformers, f"{prefix}For{task}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**{**SMALL, **NO_DROPOUT, **own, "num_labels": 3, **overrides}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
    return model.to(dtype).train()


def batch_for(problem, lengths=(4, 9, 1, 12), **kwargs):
    """A ragged batch with a label for each row."""
    batch = ragged_batch(lengths, **kwargs)
    generator = torch.Generator().manual_seed(5)
    if problem == "single":
        batch["labels"] = torch.randint(0, 3, (len(lengths),), generator=generator)
    elif problem == "multi":
        batch["labels"] = torch.rand(len(lengths), 3, generator=generator, dtype=torch.float64).round()
    else:
        batch["labels"] = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return batch


def stock_inputs(model, batch):
    return inspect_model(model).with_own_positions(batch)


def classified(model, batch, config, step=0):
    """Loss, kept positions (B, n), instances and gradients of one seek and ditch."""
    with TokenSeekSession(model, config) as session:
        found = session.seek(batch, session.instances(batch))
        selection = select(found.scores(found.instances, config, step), found.instances, config, step=step)
        loss = session.ditch(batch, found.instances, selection)
        loss.backward()
    keep = torch.zeros(found.instances.ids.shape, dtype=torch.bool)
    rows, slots = selection.mask.nonzero(as_tuple=True)
    keep[rows, selection.indices[rows, slots]] = True
    return loss.detach(), keep, found.instances, gradients(model)


def check_against_oracle(model, batch, config):
    loss, keep, instances, found = classified(model, batch, config)
    with ditched_tokens_detached(model, keep):
        expected = model(**stock_inputs(model, batch)).loss
    expected.backward()
    assert abs(loss - expected) < 1e-9 * abs(expected)
    assert relative_error(found, gradients(model)) < 1e-9
    return keep, instances


@pytest.mark.parametrize("ratio", [0.05, 0.4])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_gradient_of_a_sequence_classifier_equals_the_detach_oracle(name, problem, ratio):
    model = tiny_classifier(name, num_labels=PROBLEMS[problem])
    keep, instances = check_against_oracle(model, batch_for(problem), settings(ratio))
    if name != "modernbert-mean":
        assert instances.supervised.nonzero().tolist() == [[row, 0] for row in range(4)]
        assert keep[:, 0].all()
    assert keep.sum(-1).tolist() == [max(1, round(ratio * n)) for n in (4, 9, 1, 12)]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_classifies_by_its_last_token(name, left):
    model = tiny_classifier(name)
    keep, instances = check_against_oracle(model, batch_for("single", left=left), settings(0.4))
    last = [n - 1 for n in ((12, 12, 12, 12) if left else (4, 9, 1, 12))]
    assert instances.supervised.nonzero()[:, 1].tolist() == last
    assert all(keep[row, column] for row, column in enumerate(last))


@pytest.mark.parametrize("scorer", ["tokenseek", "context", "gradient", "random"])
@pytest.mark.parametrize("selection", ["topk", "sample"])
@pytest.mark.parametrize("name", ["bert", "modernbert-mean", "llama"])
def test_every_scorer_and_rule(name, selection, scorer):
    """The default select_from too: no token has a loss of its own, so every token may be kept."""
    model, lengths = tiny_classifier(name), (13, 7)
    config = TokenSeekConfig(ratio=0.4, scorer=scorer, selection=selection)
    keep, _ = check_against_oracle(model, batch_for("single", lengths), config)
    assert keep.sum(-1).tolist() == [5, 3]


@pytest.mark.parametrize("name", ["modernbert-mean", "llama"])
def test_one_row_and_left_padding_of_a_mean(name):
    check_against_oracle(tiny_classifier(name), batch_for("single", (13,)), settings(0.3))
    check_against_oracle(tiny_classifier(name), batch_for("single", left=True), settings(0.3))


@pytest.mark.parametrize("name", ["bert", "roberta", "llama"])
def test_ditching_changes_the_gradient_and_not_the_loss(name):
    model, batch = tiny_classifier(name), batch_for("single", (13, 9))
    few, _, _, ditched = classified(model, batch, settings(0.3))
    all_, _, _, full = classified(model, batch, settings(1.0))
    assert few == pytest.approx(all_.item(), rel=1e-12)
    assert relative_error(ditched, full) > 0.05


@pytest.mark.parametrize("name", ["bert", "modernbert-mean", "llama"])
def test_checkpointing_gives_the_same_gradient_to_the_bit(name):
    model, batch = tiny_classifier(name), batch_for("single")
    plain = classified(model, batch, settings(0.5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = classified(model, batch, settings(0.5))
    assert torch.equal(plain[0], checkpointed[0])
    assert all(torch.equal(gradient, checkpointed[-1][key]) for key, gradient in plain[-1].items())


def test_the_gradient_score_is_that_of_the_summed_loss():
    model, batch = tiny_classifier("roberta"), batch_for("single")
    with TokenSeekSession(model, settings(0.5, scorer="gradient")) as session:
        found = session.seek(batch, session.instances(batch))
    inputs = []
    hook = model.roberta.encoder.layer[-1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    output = model(**stock_inputs(model, batch))
    hook.remove()
    loss = cross_entropy(output.logits, batch["labels"], reduction="sum")
    (gradient,) = torch.autograd.grad(loss, inputs[0])
    real = batch["attention_mask"].bool()
    assert torch.allclose(found.gradient[real], gradient.abs().sum(-1)[real].to(found.gradient.dtype), rtol=1e-6)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_read_position_is_found_through_weights_of_zero():
    model = tiny_classifier("roberta")
    nn.init.zeros_(model.classifier.out_proj.weight)
    with TokenSeekSession(model, settings(0.5, scorer="random", selection="sample")) as session:
        batch = batch_for("single")
        found = session.seek(batch, session.instances(batch))
    assert found.instances.supervised.nonzero().tolist() == [[row, 0] for row in range(4)]


def test_a_head_that_would_read_padding_is_refused():
    model, batch = tiny_classifier("bert"), batch_for("single", left=True)
    with pytest.raises(InputError, match=r"row 0 .* by position 0, which is padding"):
        classified(model, batch, settings(0.5))


def test_the_self_check_passes_and_finds_a_head_that_reads_elsewhere():
    batch = batch_for("single")
    for name in ("bert", "modernbert-mean", "llama"):
        model = tiny_classifier(name)
        with TokenSeekSession(model, settings(0.5)) as session:
            assert self_check(session, batch, session.instances(batch)) < 1e-6
    model = tiny_classifier("bert")
    pooler = model.bert.pooler.forward
    model.bert.pooler.forward = lambda hidden: pooler(
        hidden.roll(-2, 1)
    )  # the third position, which the ditch pass keeps elsewhere
    full = {name: value[3:] for name, value in batch.items()}
    with TokenSeekSession(model, settings(0.5)) as session, pytest.raises(SelfCheckError, match="head of this 'bert'"):
        self_check(session, full, session.instances(full))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", [*(n for n in ENCODERS if n != "modernbert-mean"), "llama"])
def test_a_token_classifier_equals_the_detach_oracle(name, left):
    model, batch = tiny_classifier(name, "TokenClassification"), ragged_batch((4, 9, 1, 12), left=left)
    batch["labels"] = torch.where(batch["labels"] >= 0, batch["labels"] % 3, -100)
    loss, keep, weights, instances, found = run_passes(model, batch, settings(0.4))
    with ditched_tokens_detached(model, keep):
        logits = model(**stock_inputs(model, {k: v for k, v in batch.items() if k != "labels"})).logits
    each = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(weights)
    expected = (each * weights * keep).sum() / instances.n_supervised.sum()
    expected.backward()
    assert abs(loss - expected) < 1e-9 * abs(expected)
    assert relative_error(found, gradients(model)) < 1e-9


@pytest.mark.parametrize("scorer", ["tokenseek", "random"])
def test_a_token_classifier_without_any_label_gets_zero_gradients(scorer):
    model, batch = tiny_classifier("bert", "TokenClassification"), ragged_batch((4, 9))
    batch["labels"][:] = -100
    loss, _, _, _, found = run_passes(model, batch, settings(0.4, scorer=scorer))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.parametrize("name", ["DebertaV2", "Albert", "FNet"])
def test_encoders_that_cannot_work_are_refused_by_name(name):
    model_class = getattr(transformers, f"{name}ForSequenceClassification")
    model = model_class(model_class.config_class(**SMALL, num_labels=3))
    batch = batch_for("single", (13, 9))
    reason = f"{model.config.model_type}.*(keys and values|stack of blocks|a part of its tokens)"
    with (
        pytest.raises((UnsupportedModelError, SelfCheckError), match=reason),
        TokenSeekSession(model, settings(0.5, scorer="gradient")) as session,
    ):
        self_check(session, batch, session.instances(batch))


def test_trl_is_not_given_a_classifier(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from tokenseek_trainer.sft import TokenSeekSFTTrainer

    args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    rows = Dataset.from_list([{"text": "w1 w2 w3"}])
    with pytest.raises(
        UnsupportedModelError, match="causal language models, which LlamaForSequenceClassification is not"
    ):
        TokenSeekSFTTrainer(
            model=tiny_classifier("llama"), args=args, train_dataset=rows, processing_class=tiny_tokenizer()
        )


def test_parts_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"parts=2 is not supported for 'llama'.*a label belongs to a row"):
        TokenSeekTrainer(model=tiny_classifier("llama"), args=arguments(tmp_path), tokenseek=TokenSeekConfig(parts=2))


def test_packed_rows_and_missing_labels_are_refused():
    model = tiny_classifier("llama")
    packed = {"input_ids": torch.ones(1, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    with TokenSeekSession(model, settings(0.5)) as session:
        with pytest.raises(InputError, match="one instance a row"):
            session.instances(packed)
        batch = batch_for("single")
        del batch["labels"]
        with pytest.raises(InputError, match=r"scorer='tokenseek' needs the loss"):
            session.seek(batch, session.instances(batch))
        with pytest.raises(RuntimeError, match="instances of seek"):
            batch = batch_for("single")
            instances = session.instances(batch)
            session.seek(batch, instances)
            session.ditch(batch, instances, None)


# ---- the trainers ----


def rows_for(task, lengths=(4, 9, 6, 12)):
    rows = []
    for i, length in enumerate(lengths):
        tokens = ragged_batch((length,))["input_ids"][0].tolist()
        label = i % 3 if task == "SequenceClassification" else [-100, *(t % 3 for t in tokens[1:])]
        if task == "MaskedLM":
            label = [(t + 1) % VOCAB_SIZE if j % 2 else -100 for j, t in enumerate(tokens)]
        rows.append({"input_ids": tokens, "labels": label})
    return rows


def without_positions(collator):
    """What the stock Trainer is given: RoBERTa counts positions by itself, from another number than 0."""
    return lambda rows: {name: value for name, value in collator(rows).items() if name != "position_ids"}


def trained(tmp_path, config, model, task, trainer_class=TokenSeekTrainer, **overrides):
    kwargs = {} if config is None else {"tokenseek": config}
    collator = TokenSeekCollator(causal=False, labels_per_row=task == "SequenceClassification")
    trainer = trainer_class(
        model=model,
        args=arguments(tmp_path, max_steps=2, **overrides),
        train_dataset=rows_for(task),
        data_collator=without_positions(collator) if trainer_class is Trainer else collator,
        **kwargs,
    )
    found = []
    step = trainer.training_step

    def watched(*args, **kw):
        loss = step(*args, **kw)
        found.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return loss

    trainer.training_step = watched
    trainer.train()
    return trainer, found


CASES = [
    ("bert", "SequenceClassification", (4, 1)), ("bert", "SequenceClassification", (1, 4)),
    ("modernbert-mean", "SequenceClassification", (2, 2)), ("llama", "SequenceClassification", (2, 2)),
    ("roberta", "TokenClassification", (2, 2)), ("llama", "TokenClassification", (1, 4)),
    ("bert", "MaskedLM", (2, 2)), ("modernbert", "MaskedLM", (1, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "split"), CASES)
def test_with_all_tokens_kept_it_trains_like_the_stock_trainer(tmp_path, name, task, split):
    """Whatever the accumulation: most of these losses are means of a micro-batch, though the Trainer counts items."""
    rows, accumulation = split
    settings_ = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    stock, expected = trained(tmp_path, None, tiny_classifier(name, task), task, Trainer, **settings_)
    two_passes = TokenSeekConfig.paper(ratio=0.999)
    for config, tolerance in ((TokenSeekConfig(ratio=1.0), 1e-12), (two_passes, 1e-5)):
        ours, found = trained(tmp_path, config, tiny_classifier(name, task), task, **settings_)
        assert losses(ours) == pytest.approx(losses(stock), rel=tolerance)
        assert relative_error(found[0], expected[0]) < tolerance
        assert relative_error(found[accumulation - 1], expected[accumulation - 1]) < tolerance
        full = [entry["full_loss"] for entry in ours.state.log_history if "full_loss" in entry]
        assert full == pytest.approx(losses(stock), rel=1e-5)


def test_label_smoothing_is_the_stock_one(tmp_path):
    """The Trainer's own, so with accumulation it counts items where the model's loss does not."""
    one_by_one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for task in ("SequenceClassification", "TokenClassification"):
        runs = [
            trained(
                tmp_path, config, tiny_classifier("bert", task), task, cls, label_smoothing_factor=0.2, **one_by_one
            )
            for config, cls in ((None, Trainer), (TokenSeekConfig.paper(ratio=0.999), TokenSeekTrainer))
        ]
        assert losses(runs[1][0]) == pytest.approx(losses(runs[0][0]), rel=1e-5)
        assert relative_error(runs[1][1][0], runs[0][1][0]) < 1e-5


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_evaluation_and_metrics_are_the_stock_ones(tmp_path, name):
    rows = [{"input_ids": row["input_ids"], "label": row["labels"]} for row in rows_for("SequenceClassification")]

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    def evaluated(trainer_class, model, collator, **kwargs):
        trainer = trainer_class(
            model=model, args=arguments(tmp_path, max_steps=2), train_dataset=rows, eval_dataset=rows,
            compute_metrics=accuracy, data_collator=collator, processing_class=tiny_tokenizer(), **kwargs,
        )  # fmt: skip
        if trainer_class is TokenSeekTrainer:
            trainer.train()
        return trainer.evaluate()

    model = tiny_classifier(name)
    before = [parameter.clone() for parameter in model.parameters()]
    ours = evaluated(TokenSeekTrainer, model, None, tokenseek=TokenSeekConfig(ratio=0.3))  # its own collator
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    stock = evaluated(Trainer, model, DataCollatorWithPadding(tiny_tokenizer()))
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)
    assert ours["eval_accuracy"] == stock["eval_accuracy"]


def test_logged_quantities(tmp_path):
    trainer, _ = trained(tmp_path, TokenSeekConfig(ratio=0.5), tiny_classifier("bert"), "SequenceClassification")
    log = trainer.state.log_history[0]
    assert log["kept_tokens"] == 2 + 4 + 3 + 6
    assert log["supervised_kept"] == 4  # the token of each row that the head reads
    assert log["loss"] == pytest.approx(log["full_loss"], rel=1e-6)  # exact at every ratio
    assert log["saved_mib"] > 0
    whole, _ = trained(tmp_path, TokenSeekConfig(ratio=1.0), tiny_classifier("bert"), "SequenceClassification")
    assert whole.state.log_history[0]["supervised_kept"] == 4


def test_lora_trains_a_classifier(tmp_path):
    model = tiny_classifier("roberta")
    adapter = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    wrapped = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
    trainer, found = trained(tmp_path, TokenSeekConfig(ratio=0.4), wrapped, "SequenceClassification")
    assert any("lora_A" in name for name in found[0]) and any("classifier" in name for name in found[0])
    assert all(torch.tensor(losses(trainer)).isfinite())


def test_given_indices_must_hold_the_token_that_the_head_reads(tmp_path):
    rows = [{**row, "token_indices": [1]} for row in rows_for("SequenceClassification")]
    trainer = TokenSeekTrainer(model=tiny_classifier("bert"), args=arguments(tmp_path), train_dataset=rows)
    with pytest.raises(InputError, match="token_indices of row 0 leave out position 0"):
        trainer.train()


def test_scored_columns_train_the_same_as_scores_computed_on_the_way(tmp_path):
    model, config = tiny_classifier("bert"), TokenSeekConfig(ratio=0.4, selection="topk")
    batch = TokenSeekCollator(labels_per_row=True)(rows_for("SequenceClassification"))
    _, keep, _, _ = classified(model, batch, config)
    scored = add_token_columns(model, rows_for("SequenceClassification"), config, column="token_indices", batch_size=2)
    order = [row["token_indices"] for row in scored]
    assert order == [row.nonzero()[:, 0].tolist() for row in keep]


def test_the_collator_takes_labels_of_rows():
    collator = TokenSeekCollator(labels_per_row=True, padding_side="left", max_length=2)
    batch = collator([{"input_ids": [5, 6, 7], "label": 2}, {"input_ids": [8], "labels": 0}])
    assert batch["labels"].tolist() == [2, 0] and batch["labels"].dtype == torch.long
    assert batch["input_ids"].tolist() == [[5, 6], [0, 8]]
    assert collator([{"input_ids": [5], "label": 0.5}])["labels"].dtype == torch.float32
    several = collator([{"input_ids": [5], "labels": [0, 1, 1]}])["labels"]
    assert several.tolist() == [[0.0, 1.0, 1.0]] and several.dtype == torch.float32
    with pytest.raises(InputError, match="Example 0 of the batch has no label"):
        collator([{"input_ids": [5]}])


def test_bf16_autocast_stays_near_float32():
    model, batch, config = tiny_classifier("bert", dtype=torch.float32), batch_for("single", (9, 12)), settings(0.5)
    exact = classified(model, batch, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = classified(model, batch, config)
    assert low[2].supervised.nonzero().tolist() == [[0, 0], [1, 0]]
    assert low[0] == pytest.approx(exact[0].item(), rel=0.05)
    assert all((low[-1][name] != 0).any() == (exact[-1][name] != 0).any() for name in exact[-1])
