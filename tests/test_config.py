import dataclasses
import json

import pytest

from tokenseek_trainer.config import TokenSeekConfig
from tokenseek_trainer.errors import ConfigError, TokenSeekError


def refusal(settings):
    with pytest.raises(ConfigError) as caught:
        TokenSeekConfig.from_dict(settings)
    return str(caught.value)


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(TokenSeekConfig()) == {
        "ratio": 0.1,
        "scorer": "gradient",
        "alpha": 1.0,
        "beta": 1.0,
        "context_layers": "last",
        "select_from": "supervised",
        "selection": "sample",
        "uniform_share": 0.2,
        "min_tokens": 1,
        "token_weight": "instance",
        "reuse_scores": False,
        "parts": 1,
        "kv_store": "device",
        "self_check": True,
        "seed": 0,
    }


def test_paper_is_the_joint_top_tenth_whatever_the_defaults_are():
    config = TokenSeekConfig.paper()
    assert (config.ratio, config.scorer, config.alpha, config.beta) == (0.1, "tokenseek", 1.0, 1.0)
    assert (config.selection, config.select_from, config.context_layers) == ("topk", "all", "last")


def test_paper_takes_overrides_and_refuses_unknown_ones():
    config = TokenSeekConfig.paper(ratio=0.5, token_weight="none")
    assert (config.ratio, config.token_weight, config.scorer) == (0.5, "none", "tokenseek")
    with pytest.raises(ConfigError, match=r"no setting 'ration'\. Did you mean 'ratio'\?"):
        TokenSeekConfig.paper(ration=0.5)


def test_config_is_frozen_and_equal_by_value():
    config = TokenSeekConfig(ratio=0.25)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.5
    assert config.ratio == 0.25
    assert config == TokenSeekConfig(ratio=0.25)
    assert len({config, TokenSeekConfig(ratio=0.25), TokenSeekConfig(ratio=0.5)}) == 2


@pytest.mark.parametrize(
    ("ratio", "remedy"),
    [
        (0, "At least one token must be kept; use a small ratio such as 0.05."),
        (0.0, "At least one token must be kept"),
        (-0.1, "Use 0.1 to keep 10 % of the tokens"),
        (1.5, "Write 0.015 to keep 1.5 %."),
        (10, "Write 0.1 to keep 10 %."),
        (100, "Write 1 to keep 100 %."),
        (250, "1.0 for ordinary training."),
        ("10%", "Write 0.1 to keep 10 %."),
        ("0.5 %", "Write 0.005 to keep 0.5 %."),
        ("0.1", "Use 0.1 to keep 10 % of the tokens"),
        ("much", "Use 0.1 to keep 10 % of the tokens"),
        (float("nan"), "Use 0.1 to keep 10 % of the tokens"),
        (float("inf"), "Use 0.1 to keep 10 % of the tokens"),
        (True, "Use 0.1 to keep 10 % of the tokens"),
        (None, "Use 0.1 to keep 10 % of the tokens"),
    ],
)
def test_bad_ratio_is_refused_with_value_range_and_remedy(ratio, remedy):
    message = refusal({"ratio": ratio})
    assert message.startswith(f"ratio must be a number in (0, 1], got {ratio!r}. ")
    assert remedy in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("alpha", -0.5, "a number >= 0"),
        ("alpha", float("nan"), "a number >= 0"),
        ("alpha", False, "a number >= 0"),
        ("beta", -1, "a number >= 0"),
        ("beta", float("inf"), "a number >= 0"),
        ("beta", "1", "a number >= 0"),
        ("uniform_share", -0.01, "a number in [0, 1]"),
        ("uniform_share", 1.01, "a number in [0, 1]"),
        ("uniform_share", True, "a number in [0, 1]"),
        ("min_tokens", 0, "an integer >= 1"),
        ("min_tokens", 1.0, "an integer >= 1"),
        ("min_tokens", True, "an integer >= 1"),
        ("parts", 0, "an integer >= 1"),
        ("parts", 2.0, "an integer >= 1"),
        ("seed", -1, "an integer >= 0"),
        ("seed", 0.5, "an integer >= 0"),
        ("seed", False, "an integer >= 0"),
        ("self_check", 1, "true or false"),
        ("self_check", "yes", "true or false"),
    ],
)
def test_bad_number_is_refused_with_value_and_range(name, value, allowed):
    assert refusal({name: value}) == f"{name} must be {allowed}, got {value!r}."


@pytest.mark.parametrize(
    ("name", "value", "allowed", "nearest"),
    [
        ("scorer", "tokenseak", ["tokenseek", "context", "gradient", "random"], "tokenseek"),
        ("scorer", "Gradient", ["tokenseek", "context", "gradient", "random"], "gradient"),
        ("select_from", "supervized", ["all", "supervised"], "supervised"),
        ("selection", "top_k", ["topk", "sample"], "topk"),
        ("token_weight", "instances", ["instance", "none"], "instance"),
        ("kv_store", "gpu", ["device", "cpu"], "cpu"),
    ],
)
def test_unknown_choice_is_refused_with_the_choices_and_the_nearest(name, value, allowed, nearest):
    message = refusal({name: value})
    assert message.startswith(f"{name} must be one of ")
    assert f"got {value!r}." in message
    assert all(repr(choice) in message for choice in allowed)
    assert message.endswith(f"Did you mean {nearest!r}?")


@pytest.mark.parametrize("value", ["zzz", None, 7])
def test_choice_like_no_other_is_refused_without_a_guess(value):
    message = refusal({"selection": value})
    assert message == f"selection must be one of ('topk', 'sample'), got {value!r}."


def test_two_zero_weights_are_refused_for_the_score_that_uses_them_only():
    message = refusal({"scorer": "tokenseek", "alpha": 0, "beta": 0.0})
    assert "alpha and beta are both 0" in message
    assert "Raise one of them, or use scorer='random'" in message
    for scorer in ("gradient", "context", "random"):
        assert TokenSeekConfig(scorer=scorer, alpha=0, beta=0).scorer == scorer
    assert TokenSeekConfig(scorer="tokenseek", alpha=0, beta=0.5).beta == 0.5


@pytest.mark.parametrize("value", ["first", [], (), 0, [0.0], ["0"], [True], None])
def test_bad_context_layers_are_refused_with_value_and_an_example(value):
    message = refusal({"context_layers": value})
    assert message == (
        f"context_layers must be 'last', 'all' or a list of block indices such as [0, -1], got {value!r}."
    )


def test_unknown_key_is_refused_with_the_nearest_and_all_settings():
    message = refusal({"ratio": 0.5, "min_token": 2})
    assert message.startswith("TokenSeekConfig has no setting 'min_token'. Did you mean 'min_tokens'?")
    assert all(field.name in message for field in dataclasses.fields(TokenSeekConfig))
    assert "Did you mean" not in refusal({"zzzzzz": 1})


def test_config_error_is_caught_as_value_error_and_as_the_package_error():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, TokenSeekError)


@pytest.mark.parametrize("limit", [{"ratio": 1}, {"ratio": 1e-6}, {"uniform_share": 0}, {"uniform_share": 1}])
def test_ends_of_a_range_are_accepted_and_become_floats(limit):
    (name, value), config = *limit.items(), TokenSeekConfig(**limit)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is float


@pytest.mark.parametrize(
    "config",
    [
        TokenSeekConfig(),
        TokenSeekConfig.paper(),
        TokenSeekConfig(context_layers=[0, -1]),
        TokenSeekConfig(context_layers=(2,), ratio=1, alpha=0, min_tokens=7, seed=2**40, self_check=False),
        TokenSeekConfig(ratio=1 / 3, uniform_share=0.1 + 0.2, kv_store="cpu", context_layers="all"),
    ],
)
def test_json_gives_back_an_equal_config(config):
    back = TokenSeekConfig.from_json(config.to_json())
    assert back == config
    assert hash(back) == hash(config)
    assert TokenSeekConfig.from_dict(config.to_dict()) == config
    assert json.loads(config.to_json()) == config.to_dict()
    assert config.to_json().endswith("}\n")


def test_context_layers_are_a_tuple_in_python_and_a_list_in_json():
    config = TokenSeekConfig(context_layers=[0, -1])
    assert config.context_layers == (0, -1)
    assert config.to_dict()["context_layers"] == [0, -1]
    assert TokenSeekConfig.from_json(config.to_json()).context_layers == (0, -1)


@pytest.mark.parametrize(
    ("scorer", "alpha", "beta", "context", "gradient"),
    [
        ("tokenseek", 1, 1, True, True),
        ("tokenseek", 0, 1, False, True),
        ("tokenseek", 1, 0, True, False),
        ("context", 0, 1, True, False),
        ("gradient", 1, 0, False, True),
        ("random", 1, 1, False, False),
    ],
)
def test_only_the_scores_that_count_are_asked_for(scorer, alpha, beta, context, gradient):
    config = TokenSeekConfig(scorer=scorer, alpha=alpha, beta=beta)
    assert config.needs_context is context
    assert config.needs_gradient is gradient
