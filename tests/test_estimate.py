"""`tokenseek estimate` beside what real tensors need."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tokenseek_trainer import TokenSeekConfig, estimate, losses
from tokenseek_trainer.cli import main
from tokenseek_trainer.errors import ConfigError, UnsupportedModelError
from tokenseek_trainer.estimate import CONFIGS, load_config
from tokenseek_trainer.memory import LiveTensors, SavedBytes
from tokenseek_trainer.memory_plan import CASES, Plan, greatest, parse_bytes, plan_of_recipe
from tokenseek_trainer.recipe import load_recipe
from tokenseek_trainer.selection import select
from tokenseek_trainer.session import TokenSeekSession
from tokenseek_trainer.shipped import names_recipe
from tokenseek_trainer.testing import tiny_model


def config_of(family, n_blocks=3):
    config = tiny_model(family).config
    config.num_hidden_layers = n_blocks
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * n_blocks
    return config


ROWS, TOKENS, RATIO = 2, 96, 0.25


def real_step(model, config):
    """Saved bytes and live peak of one step on real tensors: full rows, everything supervised."""
    ids = torch.randint(3, 60, (ROWS, TOKENS))
    with LiveTensors(model) as live:
        if config is None:
            with SavedBytes(model) as saved:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return saved.total, live.peak
        with TokenSeekSession(model, config) as session:
            batch = {"input_ids": ids, "labels": ids}
            instances = session.instances(batch)
            selection = select(session.seek(batch, instances).scores(instances, config, 0), instances, config)
            parts, most = selection.parts(config.parts), 0
            for i, part in enumerate(parts):
                with SavedBytes(model) as saved:
                    saved.add(*session.recorded())
                    loss = session.ditch(batch, instances, part, to_come=parts[i + 1 :])
                loss.backward()
                most = max(most, saved.total)
    return most, live.peak


def adapted(model, method):
    if method == "full":
        return model
    import peft

    config = peft.LoraConfig if method == "lora" else peft.LoHaConfig
    return peft.get_peft_model(model, config(r=8, target_modules="all-linear"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("family", "method", "scorer", "parts"),
    [
        ("llama", "full", "gradient", 1),
        ("llama", "lora", "gradient", 3),
        ("llama", "loha", "random", 1),
        ("mistral", "full", "tokenseek", 2),
        ("gpt2", "full", "gradient", 1),
    ],
)
def test_the_estimate_is_what_real_tensors_need(monkeypatch, case, family, method, scorer, parts):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", 1)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 64 * 16)  # several chunks, as with a real vocabulary
    ditches, checkpointing = CASES[case]
    config = config_of(family)
    tokenseek = TokenSeekConfig(ratio=RATIO, scorer=scorer, selection="topk", parts=parts) if ditches else None
    model = adapted(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(), method)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if method != "full":
            model.enable_input_require_grads()
    saved, peak = real_step(model, tokenseek)
    found = estimate.estimate(
        config,
        tokens=TOKENS,
        batch=ROWS,
        tokenseek=tokenseek,
        method=method,
        dtype="fp32",
        checkpointing=checkpointing,
    )
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    assert found.parameters == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert found.gradients == 4 * sum(trained) and found.optimizer == 8 * sum(trained)
    assert found.saved == pytest.approx(saved, rel=0.01)
    assert found.peak - found.parameters - found.optimizer == pytest.approx(peak, rel=0.03)


def mixture_of_experts():
    return AutoConfig.for_model(
        "mixtral", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=128,
    )  # fmt: skip


def test_a_mixture_of_experts_is_estimated_in_bfloat16():
    config = mixture_of_experts()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    saved, _ = real_step(model, None)
    found = estimate.estimate(config, tokens=TOKENS, batch=ROWS, dtype="bf16")
    assert found.saved == pytest.approx(saved, rel=0.05)


def test_a_step_that_needs_values_is_refused_with_a_sentence():
    with pytest.raises(UnsupportedModelError, match="'mixtral' model does not run on tensors without data"):
        estimate.estimate(mixture_of_experts(), tokens=TOKENS, dtype="fp32")


@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_a_deep_model_follows_from_two_small_depths(monkeypatch, case):
    plan = Plan(config_of("llama", 9), TokenSeekConfig(ratio=RATIO), tokens=TOKENS, dtype="fp32")
    followed = plan.estimate(case)
    monkeypatch.setattr(estimate._Builder, "depth_and_period", lambda self: (9, 9))
    assert plan.estimate(case) == followed


def test_blocks_that_differ_are_all_run():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=4, hidden_size=32, vocab_size=64)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    builder = estimate._Builder(config, "full", torch.float32, False, None)
    assert builder.depth_and_period() == (4, 2)


def test_four_bit_weights_are_counted_as_bitsandbytes_stores_them(tmp_path):
    import peft
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig

    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=four_bit)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    states = [module.weight.quant_state for module in model.modules() if isinstance(module, Linear4bit)]
    weights += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    ids = torch.randint(3, 60, (ROWS, TOKENS))
    with SavedBytes(model) as saved:
        model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: B018
    found = estimate.estimate(config, tokens=TOKENS, batch=ROWS, method="qlora", dtype="bf16")
    assert found.parameters == pytest.approx(weights, rel=0.01)
    assert found.saved == pytest.approx(saved.total, rel=0.05)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_shipped_configs_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name))
    assert model.num_parameters() == parameters
    assert {path.stem for path in CONFIGS.glob("*.json")} >= {name}


def test_a_hub_name_without_network_finds_the_shipped_config_or_says_what_is_known():
    assert load_config("meta-llama/Llama-3.2-1B").hidden_size == 2048
    assert load_config("HuggingFaceTB/SmolLM2-135M-Instruct").hidden_size == 576
    with pytest.raises(
        ConfigError, match=r"Without network these are known: .*llama-3.2-1b.* Did you mean 'llama-3.2-1b'"
    ):
        load_config("meta-llama/Llama-3.2-1")


@pytest.mark.parametrize("available", [0, 3, 8, 100, 1000, 10**6])
@pytest.mark.parametrize("need", [lambda n: 5 + 3 * n, lambda n: 5 + n * n // 10, lambda n: max(500, n * n)])
def test_with_slack_it_is_nearly_the_greatest(need, available):
    expected, found = greatest(need, available, 500), greatest(need, available, 500, slack=0.1)
    assert expected / 1.1 <= found <= expected


@pytest.mark.parametrize("available", [0, 3, 8, 100, 1000, 10**6])
@pytest.mark.parametrize("need", [lambda n: 5 + 3 * n, lambda n: 5 + n * n // 10, lambda n: max(500, n * n)])
def test_greatest_equals_counting(need, available):
    expected = max((n for n in range(1, 501) if need(n) <= available), default=0)
    assert greatest(need, available, 500) == expected


def test_what_fits_is_the_last_that_fits():
    plan = Plan(config_of("llama"), TokenSeekConfig(ratio=RATIO), tokens=128, dtype="fp32")
    memory, longest = 3 * 2**20, {}
    for case in ("ordinary", "TokenSeek"):
        n = longest[case] = plan.longest(case, memory)
        assert plan.estimate(case, tokens=n).peak <= memory < plan.estimate(case, tokens=n + 128).peak
        rows = plan.largest(case, memory)
        assert plan.estimate(case, batch=rows).peak <= memory < plan.estimate(case, batch=rows + 1).peak
    assert longest["TokenSeek"] > longest["ordinary"]


@pytest.mark.parametrize(
    ("text", "expected"), [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("1.5 gib", 3 * 2**29), ("1000", 1000)]
)
def test_memory_is_read_in_its_unit(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.filterwarnings("error")
def test_nothing_but_the_estimate_is_said():
    plan = Plan(load_config("smollm2-135m"), TokenSeekConfig(), 16, 1, method="lora")
    plan.config.num_hidden_layers = 1
    assert plan.estimate("TokenSeek + checkpointing").peak > 0


def test_from_the_command_line(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(config_of("llama", 1).to_json_string())  # one block: it is estimated a hundred times
    assert main(["estimate", str(config), "--seq", "64", "--dtype", "fp32", "--gpu-memory", "4MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "full, 1 x 64 tokens, fp32" in lines[0]
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == list(CASES)
    assert rows[0][7] == rows[0][9] == "100%" and int(rows[2][9].strip("%")) < 100 < int(rows[1][9].strip("%"))
    assert all(row[10] == "yes" and int(row[11]) >= 64 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "lore"], "method must be one of full, lora, loha, qlora; got 'lore'. Did you mean 'lora'"),
        (["--optim", "adam"], "optim must be one of"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--seq", "0"], "tokens must be an integer >= 1, got 0"),
        (["--ratio", "10"], "ratio must be a number in (0, 1], got 10.0. Write 0.1 to keep 10 %"),
        (["--gpu-memory", "much"], "Memory is written 24GiB"),
        (["--sequence", "10"], "Unknown argument '--sequence'"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    assert main(["estimate", "smollm2-135m", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_config_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert main(["estimate", str(tmp_path)]) == 2
    assert "has no model_type" in capsys.readouterr().err


def test_a_recipe_is_read_as_its_run_would_be(tmp_path, capsys):
    (tmp_path / "config.json").write_text(config_of("llama").to_json_string())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
model: {{name: {tmp_path}, dtype: float32}}
data: {{train: x.jsonl, max_length: 64}}
tokenseek: {{ratio: 0.5}}
training: {{per_device_train_batch_size: 3, optim: sgd, bf16: true}}
peft: {{method: lora, r: 4, target_modules: [q_proj]}}
""")
    assert main(["estimate", str(recipe), "--max_length", "32"]) == 0
    assert "lora, 3 x 32 tokens, float32, sgd, ratio 0.5" in capsys.readouterr().out
    plan = plan_of_recipe(load_recipe(recipe))
    assert (plan.autocast, plan.adapter["r"]) == (True, 4)
    assert plan.estimate("TokenSeek").gradients == 3 * (32 * 4 + 4 * 32) * 4  # float32 adapters of three blocks


def test_a_shipped_recipe_is_read_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_recipe("quickstart") and names_recipe("mine.yaml") and not names_recipe("smollm2-135m")
    (tmp_path / "quickstart").mkdir()  # a model's folder comes first
    assert not names_recipe("quickstart")


def test_the_commands_take_a_shipped_recipe_s_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("estimate", "inspect"):
        assert main([command, "quickstart", "--ratio", "7"]) == 2
        assert "ratio must be a number in (0, 1], got 7" in capsys.readouterr().err, command


def test_autocast_keeps_half_precision_activations():
    plan = Plan(config_of("llama"), TokenSeekConfig(), tokens=TOKENS, dtype="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        model = AutoModelForCausalLM.from_config(plan.config, dtype=torch.float32).train()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with SavedBytes(model) as saved:
            model(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: B018
    assert plan.estimate("ordinary", autocast=True).saved == pytest.approx(saved.total, rel=0.02)
