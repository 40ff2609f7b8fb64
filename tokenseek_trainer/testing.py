"""Tiny models, awkward batches and the oracle that the method is tested against.

The oracle is the definition, taken literally: an ordinary forward of all tokens in which every value of a ditched token
is detached. It shares no code with the product and has none of its memory saving.
"""

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode


VOCAB_SIZE = 64


def tiny_model(family: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> nn.Module:
    """A random model of 3 small blocks: "llama" (GQA), "mistral" (sliding window 4), "gpt2" or "bert" (bidirectional)."""
    import transformers as t

    decoder = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    gpt2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
    bert = {k: v for k, v in decoder.items() if k != "num_key_value_heads"}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    bert_no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, decoder),
        "mistral": (t.MistralForCausalLM, t.MistralConfig, {**decoder, "sliding_window": 4}),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, {**gpt2, **no_dropout, "bos_token_id": 0, "eos_token_id": 0}),
        "bert": (t.BertForMaskedLM, t.BertConfig, {**bert, **bert_no_dropout}),
    }
    model_class, config_class, settings = families[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**{**settings, **overrides})).to(dtype)
        with torch.no_grad():  # the default initialisation is so small that attention would be uniform
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
    return model.train()


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{{ ' ' }}"
    "{% else %}{{ message['content'] + ' <eos> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def tiny_tokenizer(*, pad_token: str = "<pad>"):
    """A word-level tokenizer of `VOCAB_SIZE` tokens ("w0", "w1", ...) with a chat template that marks answers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    words = [f"w{i}" for i in range(VOCAB_SIZE - len(special))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad_token,
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE,
    )


def ragged_batch(
    lengths=(4, 9, 6, 12), *, left: bool = False, pad_to: int = 0, seed: int = 0, n_prompt: int = 0
) -> dict:
    """Rows of random tokens, padded to the longest (or to `pad_to`), all supervised but the first `n_prompt` tokens.

    A row's content depends on its length and the seed only.
    """
    n = max(*lengths, pad_to) if len(lengths) > 1 else max(lengths[0], pad_to)
    batch = {
        "input_ids": torch.zeros(len(lengths), n, dtype=torch.long),
        "attention_mask": torch.zeros(len(lengths), n, dtype=torch.long),
        "labels": torch.full((len(lengths), n), -100),
    }
    for row, length in enumerate(lengths):
        tokens = torch.randint(1, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed + 1000 * length))
        where = slice(n - length, n) if left else slice(0, length)
        batch["input_ids"][row, where] = tokens
        batch["attention_mask"][row, where] = 1
        labels = tokens.clone()
        labels[: max(n_prompt, 1)] = -100
        batch["labels"][row, where] = labels
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


def packed_batch(lengths=(5, 8), *, seed: int = 0) -> dict:
    """One row that holds several documents, told apart by position_ids only."""
    documents = [ragged_batch((length,), seed=seed) for length in lengths]
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.cat([document[name] for document in documents], dim=1) for name in names}


@contextlib.contextmanager
def ditched_tokens_detached(model: nn.Module, keep: torch.Tensor):
    """Inside, every module of `model` detaches its output at the positions where `keep` (B, n) is False.

    That covers the definition (hidden states after the embeddings and every block, keys and values) wherever each of them
    leaves a module as (B, n, ...), (B, heads, n, width), (streams, B, n, E) or (B * n, ...), and gives the same gradient: a ditched position's
    outputs are then constants everywhere. Modules without weights are left out: in a mixture of experts an activation
    function sees each expert's tokens in an order of its own, and their number may happen to be B * n.
    """
    batch, n = keep.shape
    base: nn.Module = model.base_model  # type: ignore[assignment]

    def detach(_module, _inputs, output):
        if not isinstance(output, torch.Tensor):
            return output
        if output.shape[:2] == (batch, n):
            where = keep.reshape((batch, n) + (1,) * (output.ndim - 2))
        elif output.ndim == 4 and (output.shape[0], output.shape[2]) == (batch, n):
            where = keep[:, None, :, None]
        elif output.ndim == 4 and output.shape[1:3] == (batch, n):
            where = keep[:, :, None]
        elif output.ndim == 2 and output.shape[0] == batch * n:
            where = keep.flatten()[:, None]
        else:
            return output
        return torch.where(where, output, output.detach())

    hooks = [
        module.register_forward_hook(detach) for module in base.modules() if any(True for _ in module.parameters())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def oracle_loss(model: nn.Module, batch: dict, keep: torch.Tensor, weights: torch.Tensor, n_items, shift: bool = True):
    """(1/N) * sum over kept positions of weight * cross-entropy, from the full logits. keep, weights: (B, n)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with ditched_tokens_detached(model, keep):
        logits = model(**inputs, **without_cache(model)).logits
    labels = batch["labels"]
    if shift:
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return (losses.view_as(labels) * weights * keep).sum() / n_items


def without_cache(model: Any) -> dict:
    """The argument that switches a decoder's cache off, which some models only pass on; encoders have none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    forwards = [inspect.signature(type(module).forward).parameters for module in (model, model.base_model, decoder)]
    return {"use_cache": False} if any("use_cache" in parameters for parameters in forwards) else {}


class Float32AsFloat64(TorchFunctionMode):
    """What a model computes in float32 by choice (norms, softmax, routers) is computed in float64.

    Otherwise its rounding, 1e-8 to 1e-6, would hide errors of that size in a float64 model.
    """

    def __enter__(self):
        self.default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.set_default_dtype(self.default_dtype)
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clones of all gradients by parameter name (zeros where there is none); the model's own are cleared."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def relative_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Greatest difference of any parameter's gradient, relative to the norm of b's over all parameters."""
    scale = torch.stack([value.detach().double().norm() for value in b.values()]).norm()
    return float(max((a[name].detach().double() - b[name].detach().double()).norm() for name in b) / scale)
