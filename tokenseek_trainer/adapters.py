"""The peft and quantization sections of a recipe, as configs of PEFT and bitsandbytes."""

import dataclasses
import importlib.util
import inspect

from .errors import ConfigError, closest
from .recipe import Recipe


METHODS = ("lora", "dora", "loha")


def adapter_config(recipe: Recipe):
    """The PEFT config that the recipe describes; None for full fine-tuning.

    Raises:
        ConfigError: PEFT is not installed, an unknown method or setting, or quantised weights without an adapter.
    """
    if not recipe.peft:
        if recipe.quantization:
            raise ConfigError(
                "Quantised weights cannot be trained themselves. Add a peft section, such as {method: lora, r: 8}."
            )
        return None
    # with SEQ_CLS the classifier's new head is trained too, beside the adapter
    task_type = "CAUSAL_LM" if recipe.model.task == "causal-lm" else "SEQ_CLS"
    return peft_config({"task_type": task_type, **recipe.peft})


def peft_config(settings: dict):
    """A PEFT config from `method` ("lora", "dora" or "loha") and keyword arguments of its config class.

    Raises:
        ConfigError: PEFT is not installed, or an unknown method or setting.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("The recipe's peft section needs PEFT: pip install 'tokenseek-trainer[qlora]'")
    import peft

    settings = dict(settings)
    method = settings.pop("method", None)
    if method not in METHODS:
        raise ConfigError(f"peft.method must be one of {METHODS}, got {method!r}.{closest(method, METHODS)}")
    config_class = peft.LoHaConfig if method == "loha" else peft.LoraConfig
    if method == "dora":
        settings["use_dora"] = True
    check_keys("peft", settings, config_class)
    return config_class(**{"task_type": "CAUSAL_LM", **settings})


def quantization_config(recipe: Recipe):
    """The BitsAndBytesConfig that the recipe describes.

    Raises:
        ConfigError: bitsandbytes is not installed, or an unknown setting.
    """
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "The recipe's quantization section needs bitsandbytes: pip install 'tokenseek-trainer[qlora]'"
        )
    known = [name for name in inspect.signature(BitsAndBytesConfig).parameters if name != "kwargs"]
    _refuse_unknown("quantization", recipe.quantization, known)
    return BitsAndBytesConfig(**recipe.quantization)


def check_keys(section: str, settings: dict, config_class: type) -> None:
    """Refuse settings that a dataclass does not have, with the nearest that it has."""
    _refuse_unknown(section, settings, [f.name for f in dataclasses.fields(config_class) if f.init])


def _refuse_unknown(section, settings, known) -> None:
    for key in settings:
        if key not in known:
            raise ConfigError(f"The section {section!r} has no setting {key!r}.{closest(key, known)}")
