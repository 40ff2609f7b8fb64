"""Adapters: LoRA, DoRA, LoHa and 4-bit QLoRA on top of token ditching."""

import warnings

import peft
import pytest
import torch
from test_session import run_passes, settings
from test_trainer import arguments, examples, losses
from transformers import Trainer

from tokenseek_trainer import TokenSeekConfig, TokenSeekTrainer
from tokenseek_trainer.collator import TokenSeekCollator
from tokenseek_trainer.errors import UnsupportedModelError
from tokenseek_trainer.quantized import undo_cpu_packing
from tokenseek_trainer.structure import inspect_model
from tokenseek_trainer.testing import gradients, oracle_loss, ragged_batch, relative_error, tiny_model


TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "LoRA": lambda **kw: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **kw),
    "DoRA": lambda **kw: peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True, **kw),
    "LoHa": lambda **kw: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False, **kw),
}
WHERE = {
    "everywhere": None,
    "below the last block": [0, 1],
    "only in the last block": [2],
}


def adapted(kind="LoRA", where="everywhere", **overrides):
    torch.manual_seed(3)  # adapters start from random, non-zero weights, so that every one of them gets a gradient
    config = KINDS[kind](layers_to_transform=WHERE[where])
    return peft.get_peft_model(tiny_model("llama", **overrides), config).double()


def trainable(found, model):
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: gradient for name, gradient in found.items() if name in names}


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_equals_the_detach_oracle(kind, where, ratio):
    model, data = adapted(kind, where), ragged_batch((4, 9, 12))
    loss, keep, weights, instances, found = run_passes(model, data, settings(ratio))
    lm = model.get_base_model()
    expected = oracle_loss(lm, data, keep, weights, instances.n_supervised.sum())
    expected.backward()
    assert abs(loss - expected) < 1e-9 * abs(expected)
    found, reference = trainable(found, model), trainable(gradients(model), model)
    assert reference
    assert all((gradient != 0).any() for gradient in reference.values())
    assert relative_error(found, reference) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradient(kind):
    model, data = adapted(kind), ragged_batch((4, 9, 12))
    plain = run_passes(model, data, settings(0.5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    checkpointed = run_passes(model, data, settings(0.5))
    assert relative_error(checkpointed[-1], plain[-1]) == 0


@pytest.mark.parametrize("where", WHERE)
def test_frozen_weights_get_no_gradient_and_keep_their_flags(where):
    model = adapted("LoRA", where)
    flags = [p.requires_grad for p in model.parameters()]
    run_passes(model, ragged_batch((9, 12)), settings(0.5))
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
    assert not with_gradient  # run_passes cleared those of the adapters
    assert [p.requires_grad for p in model.parameters()] == flags


def train(tmp_path, model, config, trainer_class=TokenSeekTrainer, **overrides):
    kwargs = {} if config is None else {"tokenseek": config}
    trainer = trainer_class(
        model=model,
        args=arguments(tmp_path, **overrides),
        train_dataset=examples(),
        data_collator=TokenSeekCollator(),
        **kwargs,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("ratio", [0.999, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_all_tokens_is_the_stock_trainer(tmp_path, kind, ratio):
    ours, stock = adapted(kind), adapted(kind)
    a = train(tmp_path, ours, TokenSeekConfig.paper(ratio=ratio), max_steps=3)
    b = train(tmp_path, stock, None, Trainer, max_steps=3)
    assert losses(a) == pytest.approx(losses(b), rel=1e-5)
    assert relative_error(dict(ours.named_parameters()), dict(stock.named_parameters())) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_stock_one(tmp_path, kind):
    def evaluated(trainer_class, **kwargs):
        trainer = trainer_class(
            model=adapted(kind),
            args=arguments(tmp_path),
            eval_dataset=examples(),
            data_collator=TokenSeekCollator(),
            **kwargs,
        )
        return trainer.evaluate()["eval_loss"]

    assert evaluated(TokenSeekTrainer, tokenseek=TokenSeekConfig(ratio=0.1)) == evaluated(Trainer)


def test_every_lora_b_moves_after_one_step(tmp_path):
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(tmp_path, model, TokenSeekConfig(ratio=0.3))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    expected = {name for name in before if "lora_B" in name}
    assert len(expected) == 7 * 3
    assert moved == expected  # lora_A has no gradient while lora_B is 0; frozen weights have none ever


def test_lora_dropout_is_on_in_the_ditch_pass_only():
    model = peft.get_peft_model(
        tiny_model("llama"),
        peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, lora_dropout=0.5),
    ).train()
    data = ragged_batch((9, 12))

    def run(seed):
        torch.manual_seed(seed)
        return run_passes(model, data, settings(0.5))

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], other[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_checkpoints_save_resume_merge_and_reload(tmp_path, kind):
    model = adapted(kind, dtype=torch.float32).float()
    settings_ = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    train(tmp_path / "a", model, TokenSeekConfig(ratio=0.4), **settings_)
    assert (tmp_path / "a" / "checkpoint-2" / "tokenseek_config.json").is_file()
    assert (tmp_path / "a" / "checkpoint-2" / "adapter_config.json").is_file()

    again = adapted(kind, dtype=torch.float32).float()
    trainer = TokenSeekTrainer(
        model=again,
        args=arguments(tmp_path / "b", **settings_),
        train_dataset=examples(),
        data_collator=TokenSeekCollator(),
        tokenseek=TokenSeekConfig(ratio=0.4),
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert relative_error(dict(again.named_parameters()), dict(model.named_parameters())) == 0

    tokens = ragged_batch((9,))["input_ids"]
    model.eval()
    expected = model(tokens).logits
    reloaded = peft.PeftModel.from_pretrained(
        tiny_model("llama", dtype=torch.float32), tmp_path / "a" / "checkpoint-4"
    ).eval()
    torch.testing.assert_close(reloaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    merged = reloaded.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_prompt_learning_is_refused_by_name():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"PROMPT_TUNING adds virtual tokens.*LoRA"):
        inspect_model(peft.get_peft_model(tiny_model("llama"), config))


# ---- QLoRA ----


def quantized_base(tmp_path, hidden=64, double=True):
    """A tiny Llama in NF4 with double quantisation."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tmp_path / "base"
    tiny_model("llama", dtype=torch.float32, hidden_size=hidden, intermediate_size=2 * hidden).save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)


def quantized(tmp_path, double=True):
    base = quantized_base(tmp_path, double=double)
    torch.manual_seed(3)
    return peft.get_peft_model(base, KINDS["LoRA"]()).train()


@pytest.mark.parametrize("evaluated_before", [False, True])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_qlora_gradient_equals_the_detach_oracle(tmp_path, ratio, evaluated_before):
    """An evaluation repacks the weights on some CPUs, and their kernel has no backward."""
    data = ragged_batch((4, 9, 12))

    def prepared():
        model = quantized(tmp_path)
        if evaluated_before:
            with torch.no_grad():
                model.eval()(data["input_ids"])
            model.train()
        return model

    model = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU that repacks, the way back is announced
        loss, keep, weights, instances, found = run_passes(model, data, settings(ratio))
        model = prepared()
        undo_cpu_packing(model)
    expected = oracle_loss(model.get_base_model(), data, keep, weights.float(), instances.n_supervised.sum())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, reference = trainable(found, model), trainable(gradients(model), model)
    assert all((gradient != 0).any() for gradient in found.values())
    assert relative_error(found, reference) < 1e-4  # 4-bit weights are multiplied in float32


@pytest.mark.parametrize("double", [True, False])
def test_weights_that_an_evaluation_repacked_come_back(tmp_path, double):
    def gradient(evaluated):
        model, data = quantized(tmp_path, double), ragged_batch((9, 12))
        if evaluated:
            with torch.no_grad():
                model.eval()(data["input_ids"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                undo_cpu_packing(model.train())
        model(**data).loss.backward()
        return trainable(gradients(model), model)

    assert relative_error(gradient(True), gradient(False)) < 2**-7  # the scales were rounded to bfloat16


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_an_evaluation_in_mid_training_does_not_change_qlora(tmp_path, ratio):
    def run(**overrides):
        model = quantized(tmp_path)
        trainer = TokenSeekTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=3, **overrides),
            train_dataset=examples(),
            eval_dataset=examples(),
            data_collator=TokenSeekCollator(),
            tokenseek=TokenSeekConfig(ratio=ratio),
        )
        trainer.train()
        return trainable(dict(model.named_parameters()), model)

    assert relative_error(run(eval_strategy="steps", eval_steps=1), run()) == 0


def test_qlora_trains_saves_and_reloads(tmp_path):
    model = quantized(tmp_path)
    trainer = train(
        tmp_path / "run", model, TokenSeekConfig(ratio=0.4), max_steps=4, save_strategy="steps", save_steps=4,
        gradient_checkpointing=True,
    )  # fmt: skip
    assert all(loss < 10 for loss in losses(trainer))
    tokens = ragged_batch((9,))["input_ids"]
    reloaded = peft.PeftModel.from_pretrained(quantized_base(tmp_path), tmp_path / "run" / "checkpoint-4")
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4)
