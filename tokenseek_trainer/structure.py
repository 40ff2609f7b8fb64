"""`ModelStructure`: the parts of a model that the method touches, and the refusal of models that it cannot train."""

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from .config import TokenSeekConfig
from .errors import UnsupportedModelError
from .objective import shifts_labels, uses_loss_function
from .positions import position_modules


CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past", "past_key_value")
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention")
TOKENWISE_LAYER_TYPES = ("mlp", "moe")
# What mixes tokens in other layers, by words of their type in transformers' configs.
MIXED_BY = {
    "linear": "linear attention or a state space",
    "mamba": "a state space",
    "recurrent": "a recurrence",
    "conv": "a convolution over tokens",
    "hybrid": "a state space, a convolution or linear attention beside attention",
    "compressed": "attention to keys that are each made from several tokens",
}


@dataclass(frozen=True)
class ModelStructure:
    """Where the passes of a session hook in.

    Attributes:
        outer: what a DDP wrapper calls; the model itself, or its PeftModel.
        lm: the transformers model with its head.
        decoder: the stack of blocks, without the head.
        blocks: the transformer blocks, first to last.
        shift: True if position j predicts label j + 1 (causal-LM loss), False if it predicts label j (masked-LM loss).
        vocab_size: width of the logits; of a token classifier the number of labels.
        loss_per_row: True for sequence classification: one label and one loss a row, not a token.
        loss_counts_items: whether the model's loss divides by the Trainer's num_items_in_batch. Else, as classifiers and most
            masked LMs of transformers do, it is the mean of the micro-batch.
        attention_by_hand: attention modules that do not go through transformers' attention interface, each with the name
            of the argument by which it takes a cache, None if it takes none.
        first_position: what the model's own numbering gives to the first token.
        position_modules: those that number the tokens of a model that takes no position_ids.
        tokenwise_blocks: indices of blocks that have no attention by the config's layer types (Nemotron-H).
    """

    outer: nn.Module
    lm: PreTrainedModel
    decoder: nn.Module
    blocks: tuple[nn.Module, ...]
    shift: bool
    vocab_size: int
    loss_per_row: bool = False
    loss_counts_items: bool = True
    attention_by_hand: dict[nn.Module, str | None] = field(default_factory=dict, hash=False)
    first_position: int = 0
    position_modules: tuple[nn.Module, ...] = ()
    tokenwise_blocks: frozenset[int] = frozenset()

    @property
    def model_type(self) -> str:
        return self.lm.config.model_type

    def block_index(self, module: nn.Module) -> int | None:
        """Index of the block that contains `module`, None if none does."""
        return self._block_of.get(module)

    @property
    def _block_of(self) -> dict:
        if "_cached_block_of" not in self.__dict__:
            owners = {module: i for i, block in enumerate(self.blocks) for module in block.modules()}
            object.__setattr__(self, "_cached_block_of", owners)
        return self.__dict__["_cached_block_of"]

    def forward_accepts(self, name: str) -> bool:
        """Whether the model's or the decoder's forward names this argument."""
        return any(_accepts(module, name) for module in (self.lm, self.decoder))

    @property
    def reads_mask(self) -> bool:
        """Whether the model wants the attention mask of all tokens also when it is given the selected ones.

        Attention by hand does, and alibi, which is built over all keys from their mask.
        """
        return bool(self.attention_by_hand) or not self.forward_accepts("position_ids")

    def with_own_positions(self, inputs: dict) -> dict:
        """A batch whose position_ids count from 0 as the model's forward wants it.

        They are left out for a model that takes none, and moved up for one that begins elsewhere, unless they do already.
        """
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if positions is None:
            return inputs
        if not self.forward_accepts("position_ids"):
            return {name: value for name, value in inputs.items() if name != "position_ids"}
        below = positions < self.first_position
        if (below if mask is None else below & mask.bool()).any():
            return {**inputs, "position_ids": positions + self.first_position}
        return inputs


def inspect_model(model: nn.Module) -> ModelStructure:
    """Find the parts of a (possibly wrapped) model.

    Raises:
        UnsupportedModelError: the model cannot be trained with token ditching; the message says why.
    """
    if isinstance(model, nn.DataParallel):
        raise UnsupportedModelError(
            "nn.DataParallel is not supported. Start one process per GPU with `accelerate launch`."
        )
    if hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules()):
        raise UnsupportedModelError(
            "torch.compile is not supported: the number of kept tokens changes from batch to batch. Pass the model uncompiled."
        )
    outer = extract_model_from_parallel(model, keep_fp32_wrapper=True)
    is_peft = hasattr(outer, "peft_config") and hasattr(outer, "get_base_model")
    if is_peft:
        _refuse_adapters(outer.active_peft_config)
    lm = outer.get_base_model() if is_peft else outer
    if not isinstance(lm, PreTrainedModel):
        raise UnsupportedModelError(f"The model must be a transformers PreTrainedModel, got {type(lm).__name__}.")
    _refuse_unsupported(lm)
    decoder = _find_decoder(lm)
    blocks = _blocks_of(lm, decoder)
    takes_positions = _accepts(lm, "position_ids") or _accepts(decoder, "position_ids")
    numbering = () if takes_positions else position_modules(decoder, blocks)
    if not (takes_positions or numbering or any("alibi" in name for name in dir(decoder))):
        raise UnsupportedModelError(
            f"{_name(lm)} takes no position_ids, so selected tokens cannot be told where they stand."
        )
    return ModelStructure(
        outer=outer,
        lm=lm,
        decoder=decoder,
        blocks=blocks,
        shift=shifts_labels(lm),
        vocab_size=_width(lm),
        loss_per_row=lm.loss_function is ForSequenceClassificationLoss,
        loss_counts_items=lm.loss_function in (ForCausalLMLoss, ForMaskedLMLoss) and uses_loss_function(lm),
        attention_by_hand=_attention_by_hand(blocks),
        first_position=_first_position(decoder) if takes_positions else 0,
        position_modules=numbering,
        tokenwise_blocks=_tokenwise_blocks(lm, blocks),
    )


def _tokenwise_blocks(lm: PreTrainedModel, blocks: tuple[nn.Module, ...]) -> frozenset[int]:
    layer_types = getattr(lm.config.get_text_config(), "layer_types", None) or ()
    if len(layer_types) != len(blocks):
        return frozenset()
    return frozenset(i for i, kind in enumerate(layer_types) if kind in TOKENWISE_LAYER_TYPES)


def _name(lm: PreTrainedModel) -> str:
    return f"{type(lm).__name__} (model type {lm.config.model_type!r})"


def _accepts(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def _first_position(decoder: nn.Module) -> int:
    """RoBERTa and its kin begin after their padding index."""
    for module in decoder.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _width(lm: PreTrainedModel) -> int:
    config: Any = lm.config
    classifies = lm.loss_function is ForTokenClassification
    return config.num_labels if classifies else config.get_text_config().vocab_size


def _attention_by_hand(blocks: tuple[nn.Module, ...]) -> dict[nn.Module, str | None]:
    """The innermost modules that take a cache, if their model file does not know transformers' attention interface.

    Where none takes a cache, those that are attention by the name of their class. The self-check proves that they are.
    """
    takes: dict[nn.Module, str | None] = {}
    for module in (m for block in blocks for m in block.modules()):
        names = [name for name in CACHE_ARGUMENTS if _accepts(module, name)]
        if names:
            takes[module] = names[0]
    if not takes:
        takes = {m: None for block in blocks for m in block.modules() if "attention" in type(m).__name__.lower()}
    innermost = {m: name for m, name in takes.items() if not any(child in takes for child in list(m.modules())[1:])}
    return {module: name for module, name in innermost.items() if not _knows_interface(module)}


def _knows_interface(module: nn.Module) -> bool:
    # all bases: FSDP2 makes a class of its own, which lies in another file
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)


def _refuse_unsupported(lm: PreTrainedModel) -> None:
    name = _name(lm)
    if any(p.is_meta for p in lm.parameters()):
        raise UnsupportedModelError(
            f"{name} has parameters on the meta device, without values. Load the weights before training."
        )
    if lm.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders and encoders are supported.")
    layer_types = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    other = sorted(layer_types - {*ATTENTION_LAYER_TYPES, *TOKENWISE_LAYER_TYPES})
    # transformers up to 5.24 marks what keeps a state; later ones name all layers, but of these two
    keeps_state = getattr(lm, "_is_stateful", lm.config.model_type in ("rwkv", "xlstm"))
    if other or (keeps_state and not layer_types):
        reasons = [why for word, why in MIXED_BY.items() if any(word in kind for kind in other)]
        which = f"layers of type {', '.join(other)}" if other else "recurrent or state-space layers"
        which += f" ({'; '.join(reasons)})" if reasons else ""
        raise UnsupportedModelError(
            f"{name} has {which}, which mix tokens outside attention: a ditched token cannot be made a constant there. "
            "Use an attention-only model."
        )
    if _find_decoder(lm) is lm:
        raise UnsupportedModelError(
            f"{name} shows no stack of blocks below a head. If it has no head, load it with AutoModelForCausalLM or "
            "AutoModelForMaskedLM; else it is built in another way (blocks that run in loops, several stacks), which is "
            "not supported."
        )


def _refuse_adapters(config) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{kind} adds virtual tokens, whose activations cannot be ditched. Use an adapter method such as LoRA, DoRA or LoHa."
        )
    if kind == "ADALORA":
        raise UnsupportedModelError(
            "ADALORA adds a regulariser to the model's own loss, which token ditching replaces. Use LoRA, DoRA or LoHa."
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            "Activated LoRA (alora_invocation_tokens) looks for tokens in the text, of which only some are kept. Use LoRA."
        )


def _find_decoder(lm: PreTrainedModel) -> nn.Module:
    """The stack of blocks that the model's forward calls: the first of several places that holds one.

    `lm` itself if none does.
    """
    named = [lm.get_decoder()] if lm.loss_function is ForCausalLMLoss else []
    inner = [child for child in lm.children() if isinstance(child, PreTrainedModel)]
    for module in (*named, lm.base_model, *inner):
        if isinstance(module, nn.Module) and module is not lm and _blocks_of(lm, module):
            return module
    return lm


def _blocks_of(lm: PreTrainedModel, decoder: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost list of as many modules as the config says that the model has blocks, () if there is none.

    Some configs count blocks of another kind as num_hidden_layers: those of the encoder that is not there, or attentions.
    """
    config = lm.config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "decoder_layers", "num_layers"):
        for module in _modules_of_text(decoder, (type(lm.config), type(config))):
            if isinstance(module, nn.ModuleList) and len(module) == getattr(config, name, None):
                return tuple(module)
    return ()


def _modules_of_text(module: nn.Module, configs: tuple[type, ...]):
    """All modules, outermost first, without models of another config inside: vision or audio towers."""
    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) or isinstance(child.config, configs):
            yield from _modules_of_text(child, configs)


def uses_checkpointing(model: nn.Module) -> bool:
    """Whether activation checkpointing is on.

    Raises:
        UnsupportedModelError: it is on in its reentrant form, which replays the forward without its inputs' graph.
    """
    on = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in on:
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant", True):  # torch's own default
            raise UnsupportedModelError(
                "Reentrant activation checkpointing is not supported. Set "
                "activation_checkpointing_kwargs={'use_reentrant': False}."
            )
    return bool(on)


def context_blocks(config: TokenSeekConfig, structure: ModelStructure) -> set[int]:
    """Indices of the blocks whose attention makes the context score; one that the model has not is refused."""
    n = len(structure.blocks)
    attending = [i for i in range(n) if i not in structure.tokenwise_blocks]
    if config.context_layers == "last":
        return {attending[-1]}
    if config.context_layers == "all":
        return set(attending)
    named = [int(i) for i in config.context_layers]
    bad = [i for i in named if not -n <= i < n]
    if bad:
        raise UnsupportedModelError(f"context_layers names block {bad[0]}, but the model has blocks 0 to {n - 1}.")
    without = [i for i in named if i % n in structure.tokenwise_blocks]
    if without:
        raise UnsupportedModelError(
            f"context_layers names block {without[0]}, which has no attention. Blocks with attention: {attending}."
        )
    return {i % n for i in named}
