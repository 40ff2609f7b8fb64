"""Whole training runs through TokenSeekTrainer."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from test_session import state_of
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import ConfigError, InputError, UnsupportedModelError
from tokenseek_trainer.testing import ragged_batch, relative_error, tiny_model


PAPER = TokenSeekConfig.paper


def examples(lengths=(4, 9, 6, 12), n_prompt=0):
    rows = []
    for length in lengths:
        batch = ragged_batch((length,), n_prompt=n_prompt)
        rows.append({"input_ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()})
    return rows


def arguments(tmp_path, **overrides):
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**settings, **overrides})


def trained(tmp_path, config, *, trainer_class=TokenSeekTrainer, model=None, data=None, collator=None, **overrides):
    """Train and return (trainer, parameters as a dict)."""
    model = tiny_model("llama") if model is None else model
    kwargs = {} if config is None else {"tokenseek": config}
    if trainer_class is Trainer:
        collator = TokenSeekCollator()
    trainer = trainer_class(
        model=model,
        args=arguments(tmp_path, **overrides),
        train_dataset=examples() if data is None else data,
        data_collator=collator,
        **kwargs,
    )
    trainer.train()
    return trainer, {name: p.detach().clone() for name, p in model.named_parameters()}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("config", [PAPER(ratio=0.5), TokenSeekConfig(ratio=0.5), TokenSeekConfig(ratio=1.0)])
def test_accumulation_split_changes_nothing(tmp_path, config):
    """4 x 1 = 1 x 4, with rows of different lengths, so that no mean of means could pass."""
    whole, a = trained(tmp_path, config, per_device_train_batch_size=4)
    split, b = trained(tmp_path, config, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    uneven, c = trained(tmp_path, config, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    tolerance = 1e-9 if config.ratio < 1 else 1e-5  # the stock loss is computed in float32
    assert relative_error(b, a) < tolerance
    assert relative_error(c, a) < tolerance
    assert losses(split) == pytest.approx(losses(whole), rel=1e-6)
    for key in ("kept_tokens", "kept_fraction", "supervised_kept", "supervised_fraction", "full_loss"):
        assert split.state.log_history[0][key] == pytest.approx(whole.state.log_history[0][key], rel=1e-6), key
        assert uneven.state.log_history[0][key] == pytest.approx(whole.state.log_history[0][key], rel=1e-6), key


def test_one_step_moves_the_parameters(tmp_path):
    """Otherwise equality of parameters would mean nothing."""
    _, after = trained(tmp_path, PAPER(ratio=0.5))
    before = dict(tiny_model("llama").named_parameters())
    assert relative_error(after, before) > 1e-4


def test_ratio_1_is_the_stock_trainer(tmp_path):
    ours, a = trained(
        tmp_path, TokenSeekConfig(ratio=1.0), max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    stock, b = trained(
        tmp_path,
        None,
        trainer_class=Trainer,
        max_steps=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    assert losses(ours) == losses(stock)
    assert relative_error(a, b) == 0
    assert ours.state.log_history[0]["kept_fraction"] == ours.state.log_history[0]["supervised_fraction"] == 1.0


def test_keeping_all_tokens_through_the_two_passes_is_the_stock_trainer(tmp_path):
    """A ratio just below 1 rounds to every token, yet goes through seek and ditch."""
    ours, a = trained(tmp_path, PAPER(ratio=0.999), max_steps=3)
    stock, b = trained(tmp_path, None, trainer_class=Trainer, max_steps=3)
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert relative_error(a, b) < 1e-4  # AdamW's first steps amplify the float32 rounding of the stock loss


def test_full_fine_tuning_in_parts_is_the_stock_trainer(tmp_path):
    """Ratio 1.0 keeps prompts too, whatever select_from says; the scores that nobody needs are not made."""
    data, settings = examples(n_prompt=3), {"max_steps": 3, "optim": "sgd", "logging_steps": 1}
    stock, expected = trained(tmp_path, None, trainer_class=Trainer, data=data, **settings)
    ours, found = trained(tmp_path, TokenSeekConfig(ratio=1.0, parts=3, reuse_scores=True), data=data, **settings)
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-6)
    assert relative_error(found, expected) < 1e-6
    assert "full_loss" not in ours.state.log_history[0] and len(ours._score_store) == 0


def test_parts_keep_less_for_the_backward_and_log_the_same(tmp_path):
    data = examples((60, 50, 40, 64))
    logs, first = {}, None
    for parts in (1, 2, 4):
        trainer, after = trained(tmp_path, PAPER(ratio=0.8, parts=parts), data=data)
        logs[parts] = trainer.state.log_history[0]
        first = first or after
        assert relative_error(after, first) < 1e-9
    for key in (
        "loss",
        "full_loss",
        "grad_norm",
        "kept_tokens",
        "kept_fraction",
        "supervised_kept",
        "supervised_fraction",
    ):
        assert logs[4][key] == pytest.approx(logs[1][key], rel=1e-9), key
    assert logs[1]["saved_mib"] > 1.6 * logs[2]["saved_mib"] > 2 * logs[4]["saved_mib"]


def test_logged_quantities(tmp_path):
    trainer, _ = trained(tmp_path, PAPER(ratio=0.5))
    log = trainer.state.log_history[0]
    kept = 2 + 4 + 3 + 6  # round(0.5 * n), 9 tokens give round(4.5) = 4
    assert log["kept_tokens"] == kept
    assert log["kept_fraction"] == pytest.approx(kept / 31)
    assert 0 < log["supervised_kept"] <= kept
    n_supervised = sum(label != -100 for row in examples() for label in row["labels"][1:])
    assert log["supervised_fraction"] == pytest.approx(log["supervised_kept"] / n_supervised)
    assert log["saved_mib"] > 0
    batch = TokenSeekCollator()(examples())
    assert log["full_loss"] == pytest.approx(tiny_model("llama")(**batch).loss.item(), rel=1e-5)


def test_random_scoring_needs_no_head_pass_and_reports_no_full_loss(tmp_path):
    trainer, _ = trained(tmp_path, TokenSeekConfig(ratio=0.4, scorer="random", selection="topk"))
    assert "full_loss" not in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["kept_tokens"] == 2 + 4 + 2 + 5  # round(0.4 * n)


def test_random_tokens_differ_from_step_to_step(tmp_path):
    chosen = []

    class Spy(TokenSeekTrainer):
        def _tokenseek_loss(self, inputs, n):
            loss = super()._tokenseek_loss(inputs, n)
            chosen.append(self._session._selection.indices.tolist())
            return loss

    for _ in range(2):
        trained(
            tmp_path, TokenSeekConfig(ratio=0.3, scorer="random"), trainer_class=Spy, max_steps=3, data=examples((12,))
        )
    assert len({str(c) for c in chosen[:3]}) > 1
    assert chosen[:3] == chosen[3:]


def test_evaluation_and_prediction_are_the_stock_ones(tmp_path):
    model, data = tiny_model("llama"), examples((4, 9, 6, 12, 7))
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    ours = TokenSeekTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, tokenseek=PAPER(ratio=0.3))
    stock = Trainer(model=model, args=args, eval_dataset=data, data_collator=TokenSeekCollator())
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
    assert (ours.predict(data).predictions == stock.predict(data).predictions).all()


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_compute_metrics_sees_the_stock_logits(tmp_path, ratio):
    data = examples((6, 6, 6))

    def accuracy(prediction):
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    def evaluated(trainer_class, **kwargs):
        trainer = trainer_class(
            model=tiny_model("llama"),
            args=arguments(tmp_path, per_device_eval_batch_size=2),
            eval_dataset=data,
            compute_metrics=accuracy,
            data_collator=TokenSeekCollator(),
            **kwargs,
        )
        return {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_accuracy")}

    stock = evaluated(Trainer)
    assert len(stock) == 2
    assert evaluated(TokenSeekTrainer, tokenseek=PAPER(ratio=ratio)) == stock


def test_evaluation_in_mid_training_does_not_change_the_next_step(tmp_path):
    data = examples()
    _, without = trained(tmp_path, PAPER(ratio=0.5), max_steps=3)
    model = tiny_model("llama")
    trainer = TokenSeekTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1),
        train_dataset=data,
        eval_dataset=data,
        tokenseek=PAPER(ratio=0.5),
    )
    trainer.train()
    assert relative_error(dict(model.named_parameters()), without) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_checkpointing_by_argument(tmp_path, checkpointing):
    _, plain = trained(tmp_path, PAPER(ratio=0.5), max_steps=2)
    _, found = trained(tmp_path, PAPER(ratio=0.5), max_steps=2, gradient_checkpointing=checkpointing)
    assert relative_error(found, plain) == 0


def test_checkpointing_saves_memory(tmp_path):
    plain, _ = trained(tmp_path, PAPER(ratio=0.5))
    checkpointed, _ = trained(tmp_path, PAPER(ratio=0.5), gradient_checkpointing=True)
    assert checkpointed.state.log_history[0]["saved_mib"] < 0.7 * plain.state.log_history[0]["saved_mib"]


def test_the_model_is_left_as_it_was_after_training_and_after_an_exception(tmp_path):
    model = tiny_model("llama")
    trained(tmp_path, PAPER(ratio=0.5), model=model)
    before = state_of(model)

    def boom(module, args, output):
        if torch.is_grad_enabled():
            raise ZeroDivisionError("planned")

    hook = model.model.layers[0].mlp.register_forward_hook(boom)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, PAPER(ratio=0.5), model=model)
    hook.remove()
    after = state_of(model)
    assert after[1:] == before[1:]
    for name, (_, hooks, implementation) in before[0].items():
        assert after[0][name][1:] == (hooks, implementation)
    assert "tokenseek" not in str({k: v for k, v in vars(model).items() if not k.startswith("_")})


def test_a_saved_model_carries_the_config_and_loads_with_plain_transformers(tmp_path):
    config = PAPER(ratio=0.5, seed=7)
    model = tiny_model("llama", dtype=torch.float32)
    trainer, _ = trained(tmp_path, config, model=model, save_strategy="steps", save_steps=1)
    for folder in (tmp_path / "checkpoint-1", tmp_path / "final"):
        trainer.save_model(str(folder))
        assert TokenSeekConfig.from_json((folder / "tokenseek_config.json").read_text()) == config
        reloaded = AutoModelForCausalLM.from_pretrained(folder)
        assert reloaded.config._attn_implementation == "sdpa"
        prompt = torch.tensor([[5, 6, 7]])
        kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        model.eval()
        assert torch.equal(model.generate(prompt, **kwargs), reloaded.generate(prompt, **kwargs))


RESUME = """
    import json, sys
    sys.path.insert(0, {tests!r})
    import torch
    from test_trainer import *
    from test_trainer import arguments, examples
    chosen = []

    class Spy(TokenSeekTrainer):
        def _tokenseek_loss(self, inputs, n):
            loss = super()._tokenseek_loss(inputs, n)
            chosen.append(self._session._selection.indices.tolist())
            return loss

    torch.manual_seed(5)
    model = tiny_model("gpt2", dtype=torch.float32, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    args = arguments({out!r}, max_steps=4, per_device_train_batch_size=2, save_strategy="steps", save_steps=2,
                     lr_scheduler_type="constant")
    trainer = Spy(model=model, args=args, train_dataset=examples((4, 9, 6, 12, 7, 8, 10, 5)),
                  tokenseek=TokenSeekConfig(ratio=0.4))
    trainer.train(resume_from_checkpoint={resume!r})
    torch.save([model.state_dict(), chosen], {result!r})
"""


def run_in_new_process(tmp_path, out, resume, result):
    code = textwrap.dedent(RESUME).format(
        tests=str(__import__("pathlib").Path(__file__).parent), out=str(out), resume=resume, result=str(result)
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return torch.load(result)


def test_resuming_in_a_new_process_repeats_the_run(tmp_path):
    at_once, chosen_at_once = run_in_new_process(tmp_path, tmp_path / "a", None, tmp_path / "a.pt")
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    resumed, chosen_after = run_in_new_process(tmp_path, tmp_path / "b", checkpoint, tmp_path / "b.pt")
    assert all(torch.equal(at_once[name], resumed[name]) for name in at_once)
    assert chosen_after == chosen_at_once[2:]
    assert len(chosen_after) == 2


def series(trainer):
    return torch.tensor(
        [[e["loss"], e["grad_norm"]] for e in trainer.state.log_history if "loss" in e], dtype=torch.float64
    )


@pytest.mark.parametrize("config", [PAPER(ratio=0.3), TokenSeekConfig(ratio=0.3)])
@pytest.mark.parametrize(
    "other",
    [{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, {"gradient_checkpointing": True}],
    ids=["accumulation", "checkpointing"],
)
def test_a_whole_run_does_not_depend_on_how_its_steps_are_computed(tmp_path, config, other):
    common = {"max_steps": 30, "optim": "sgd", "data": examples((4, 9, 6, 12, 7, 5, 10, 8))}
    one, two = (series(trained(tmp_path, config, **kwargs)[0]) for kwargs in (common, {**common, **other}))
    drift = (one - two).abs()
    assert len(drift) == 30
    loss, grad_norm = drift.T
    assert loss.max() < 1e-6 and loss.mean() < 2e-7  # the Trainer sums losses in float32
    assert grad_norm.max() < 1e-9 and grad_norm.mean() < 1e-10


# ---- token columns ----


def test_token_indices_replace_the_scoring(tmp_path):
    seen = []

    class Spy(TokenSeekTrainer):
        def _tokenseek_loss(self, inputs, n):
            assert "token_indices" in inputs
            loss = super()._tokenseek_loss(inputs, n)
            seen.append((self._session._selection, self._session._found.loss_sum))
            return loss

    data = [{**row, "token_indices": [1, 3]} for row in examples()]
    for side in ("right", "left"):
        seen.clear()
        trained(tmp_path, PAPER(), trainer_class=Spy, data=data, collator=TokenSeekCollator(padding_side=side))
        selection, full_loss = seen[0]
        assert full_loss is None
        lengths = [4, 9, 6, 12]
        order = [lengths.index(n) for n in lengths]
        assert sorted(selection.indices.tolist()) == sorted(
            [[1 + (12 - lengths[i]) * (side == "left"), 3 + (12 - lengths[i]) * (side == "left")] for i in order]
        )


def test_given_scores_lead_to_the_same_run_as_computed_ones(tmp_path):
    from tokenseek_trainer.token_columns import add_token_columns

    for config in (PAPER(ratio=0.4), TokenSeekConfig(ratio=0.4)):
        _, computed = trained(tmp_path, config)
        scored = add_token_columns(tiny_model("llama"), examples(), config)
        _, given = trained(tmp_path, config, data=scored)
        # ranks are the same; the weights 1/probability carry the rounding of scores that travel as float32
        assert relative_error(given, computed) < (1e-9 if config.selection == "topk" else 1e-6)
    indexed = add_token_columns(
        tiny_model("llama"), examples(), PAPER(ratio=0.4), column="token_indices", batch_size=3
    )
    _, computed = trained(tmp_path, PAPER(ratio=0.4))
    _, given = trained(tmp_path, PAPER(ratio=0.4), data=indexed)
    assert relative_error(given, computed) < 1e-9


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([1, 12], "hold 12, but the example has 4 tokens"),
        ([-1], "hold -1"),
        ([1.0], "must be integers, got 1.0"),
        ([1, 1], "twice"),
    ],
)
def test_bad_token_indices_stop_before_any_compute(tmp_path, indices, message):
    data = [{**row, "token_indices": indices} for row in examples((4,))]
    with pytest.raises(InputError, match=message):
        trained(tmp_path, PAPER(), data=data)


# ---- what users get wrong ----


def test_missing_labels_are_named(tmp_path):
    def collator(rows):
        batch = TokenSeekCollator()(rows)
        del batch["labels"]
        return batch

    with pytest.raises(InputError, match=r"no labels \(it has: attention_mask, input_ids, position_ids\)"):
        trained(tmp_path, PAPER(), collator=collator)


def test_a_run_without_any_label_warns(tmp_path):
    data = [{**row, "labels": [-100] * len(row["input_ids"])} for row in examples()]
    with pytest.warns(UserWarning, match=r"No token that was kept carried a loss.*-100"):
        _, after = trained(tmp_path, PAPER(), data=data, weight_decay=0.0)
    assert relative_error(after, dict(tiny_model("llama").named_parameters())) == 0


def test_a_micro_batch_without_labels_leaves_the_others_alone(tmp_path):
    data = examples((4, 9, 6, 12))
    data[1] = {**data[1], "labels": [-100] * 9}
    _, whole = trained(tmp_path, PAPER(ratio=0.5), data=data)
    _, split = trained(
        tmp_path, PAPER(ratio=0.5), data=data, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert relative_error(split, whole) < 1e-9


def test_wrong_arguments_are_refused_at_construction(tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            yield from examples()

    def build(args=None, model=None, **kwargs):
        model = tiny_model("llama") if model is None else model
        TokenSeekTrainer(model=model, args=args or arguments(tmp_path), **{"train_dataset": examples(), **kwargs})

    with pytest.raises(ConfigError, match="TokenSeekConfig, got dict"):
        build(tokenseek={"ratio": 0.1})
    with pytest.raises(UnsupportedModelError, match="use_reentrant"):
        build(arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}))
    with pytest.raises(UnsupportedModelError, match="torch_compile"):
        build(arguments(tmp_path, torch_compile=True))
    with pytest.raises(UnsupportedModelError, match="compute_loss_func"):
        build(compute_loss_func=lambda *a, **k: None)
    with pytest.raises(UnsupportedModelError, match="block 7, but the model has blocks 0 to 2"):
        build(tokenseek=TokenSeekConfig(context_layers=[7]))
    with pytest.raises(ConfigError, match=r"loaded model, got 'gpt2'\. Load it"):
        build(model="gpt2")
    with pytest.raises((ConfigError, ValueError), match="max_steps"):
        build(arguments(tmp_path, max_steps=-1), train_dataset=Endless())
    with torch.device("meta"):
        meta = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="meta device"):
        build(model=meta)


def test_streaming_data_train_with_max_steps(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            while True:
                yield from examples()

    trainer, _ = trained(tmp_path, PAPER(ratio=0.5), data=Stream(), max_steps=2)
    assert trainer.state.global_step == 2


def test_compute_loss_outside_a_training_step_is_refused_and_stock_in_evaluation(tmp_path):
    model = tiny_model("llama")
    trainer = TokenSeekTrainer(
        model=model, args=arguments(tmp_path), train_dataset=examples(), tokenseek=PAPER(ratio=0.5)
    )
    batch = trainer.data_collator(examples())
    with pytest.raises(UnsupportedModelError, match="inside training_step only"):
        trainer.compute_loss(model.train(), batch)
    assert trainer.compute_loss(model.eval(), batch).item() == model(**batch).loss.item()


def test_a_training_step_by_hand_returns_outputs_with_the_loss(tmp_path):
    model = tiny_model("llama")
    seen = []

    class Spy(TokenSeekTrainer):
        def compute_loss(self, *args, **kwargs):
            loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            seen.append(outputs)
            return loss

    trainer = Spy(model=model, args=arguments(tmp_path), train_dataset=examples(), tokenseek=PAPER(ratio=0.5))
    trainer.current_gradient_accumulation_steps = 1  # set by train() as a rule
    loss = trainer.training_step(model, trainer.data_collator(examples()))
    assert seen[0].loss.item() == pytest.approx(loss.item()) and seen[0].logits is None
    assert all(p.grad is not None for p in model.parameters())


def test_model_init_makes_a_model_that_trains(tmp_path):
    trainer = TokenSeekTrainer(
        model_init=lambda: tiny_model("llama"),
        args=arguments(tmp_path),
        train_dataset=examples(),
        tokenseek=PAPER(ratio=0.5),
    )
    trainer.train()
    _, expected = trained(tmp_path, PAPER(ratio=0.5))
    assert relative_error(dict(trainer.model.named_parameters()), expected) == 0


@pytest.mark.parametrize("kept", [[], [0]])
def test_token_indices_that_carry_no_loss_warn(tmp_path, kept):
    data = [{**row, "token_indices": kept} for row in examples(n_prompt=3)]
    with pytest.warns(UserWarning, match="token_indices name unsupervised positions only"):
        trained(tmp_path, PAPER(), data=data)


def test_columns_of_other_collators_are_left_to_them(tmp_path):
    Dataset = pytest.importorskip("datasets").Dataset
    from transformers import DataCollatorForSeq2Seq

    from tokenseek_trainer.testing import tiny_tokenizer

    rows = [{**row, "completion_mask": [1] * len(row["input_ids"]), "note": "x"} for row in examples()]
    collator = DataCollatorForSeq2Seq(tiny_tokenizer())
    trained(tmp_path, PAPER(ratio=0.5), data=Dataset.from_list(rows), collator=collator)
    rows = Dataset.from_list([{**row, "token_indices": [1]} for row in rows])
    with pytest.raises(InputError, match="token_indices column, which DataCollatorForSeq2Seq does not pad"):
        trained(tmp_path, PAPER(ratio=0.5), data=rows, collator=collator)


def test_missing_values_of_a_data_set_are_read_as_missing(tmp_path):
    Dataset = pytest.importorskip("datasets").Dataset
    rows = examples((4, 9))
    rows = Dataset.from_list([{**rows[0], "token_indices": [1]}, {**rows[1], "token_indices": None}])
    with pytest.raises(InputError, match="has no token_indices, others have"):
        trained(tmp_path, PAPER(), data=rows)


def test_the_default_collator_pads_on_the_tokenizers_side(tmp_path):
    from tokenseek_trainer.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    trainer = TokenSeekTrainer(
        model=tiny_model("llama"), args=arguments(tmp_path), train_dataset=examples(), processing_class=tokenizer
    )
    assert trainer.data_collator(examples())["attention_mask"][0].tolist() == [0] * 8 + [1] * 4


def test_importing_the_package_registers_nothing_and_imports_nothing_optional():
    code = """
        import json, sys
        from transformers import AttentionInterface, AttentionMaskInterface, Trainer
        import transformers.modeling_utils, transformers.integrations
        before = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping), Trainer.compute_loss
        modules = set(sys.modules)
        import tokenseek_trainer
        after = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping), Trainer.compute_loss
        new = {name.partition(".")[0] for name in set(sys.modules) - modules}
        print(json.dumps([before[:2] == after[:2] and before[2] is after[2], sorted(new)]))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    untouched, new = json.loads(result.stdout.splitlines()[-1])
    assert untouched
    assert not {"trl", "peft", "bitsandbytes", "datasets", "lm_eval", "evaluate", "yaml"} & set(new)
