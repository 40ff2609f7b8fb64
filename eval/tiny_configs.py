"""A tiny random model of any family of transformers' causal-LM mapping, by shrinking the defaults of its config class."""

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tokenseek_trainer.testing import VOCAB_SIZE


N_LAYERS = 4
WINDOW = 6  # of sliding and chunked layers: shorter than the rows of the check
MAX_PARAMETERS = 30_000_000

# Small values for whatever a config calls a thing.
SMALL = [
    (
        32,
        "hidden_size n_embd d_model dim embedding_size emb_dim word_embed_proj_dim n_embed projection_dim lru_width "
        "embed_dim",
    ),
    (
        48,
        "intermediate_size n_inner ffn_dim d_ff dff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size moe_intermediate_size "
        "intermediate_size_mlp shared_expert_intermediate_size expert_ffn_hidden_size dim_ff moe_shared_expert_intermediate_size "
        "shared_intermediate_size intermediate_dim",
    ),
    (
        N_LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks depth",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads",
    ),
    (6, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (
        2,
        "num_key_value_heads num_kv_shared_layers num_kv_heads n_kv_heads num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token "
        "top_k_experts kv_n_heads",
    ),
    (1, "first_k_dense_replace moe_layer_start_index n_group topk_group num_expert_group num_nextn_predict_layers"),
    (
        8,
        "head_dim global_head_dim swa_head_dim qk_nope_head_dim qk_rope_head_dim d_kv kv_channels attention_head_size "
        "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input mamba_d_head rotary_dim",
    ),
    (12, "v_head_dim"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank image_size index_head_dim"),
    (128, "max_position_embeddings n_positions max_sequence_length n_ctx max_seq_len max_target_positions"),
    (WINDOW, "index_topk sliding_window attention_chunk_size sliding_window_size window_size local_attention"),
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input num_codebook_tokens"),
]
BY_NAME = {name: value for value, names in SMALL for name in names.split()}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = ("drop", "jitter")  # routers' jitter too: the two passes and the oracle must see the same values

# What generic shrinking cannot know; merged into the shrunk settings (nested configs as nested dicts).
NO_VISION = {"vision_config": None, "audio_config": None}
GEMMA3N = {"num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.0] * (N_LAYERS // 2)}
GEMMA4 = {"num_kv_shared_layers": 2, "global_head_dim": 16}
HYBRID = ["linear_attention", "hybrid"] * (N_LAYERS // 2)
SLIDING_MLA = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
DOTS3_NOTE = {f"swa_{name}": value for name, value in SLIDING_MLA.items()}
QWEN4_INDEXER = {
    "indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
}  # fmt: skip
SHARED_INDEXERS = {"indexer_types": ["full", "shared"] * (N_LAYERS // 2)}
OVERRIDES: dict[str, dict] = {
    "bamba": {"mamba_n_heads": 8},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": DOTS3_NOTE,
        "vision_config": {"mlp_layer_types": ["dense"] * N_LAYERS, "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3_NOTE,
    "gemma3n_text": GEMMA3N,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": N_LAYERS,
        }
    },
    "gemma4_text": GEMMA4,
    "gemma4": {**NO_VISION, "text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "gemma4_unified": {
        "text_config": GEMMA4,
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
    },
    "glm_moe_dsa": SHARED_INDEXERS,
    "gpt_neo": {"attention_types": [[["global", "local"], N_LAYERS // 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hy_v4": SHARED_INDEXERS,
    "kolibri1_1": {"head_dim": 16, "index_num_heads": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (N_LAYERS // 2)},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, WINDOW)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": HYBRID},
    "zamba2": {"layers_block_type": HYBRID},
}
# Families whose causal language model is made from a part of their config.
PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}

# Hybrid families, with settings that leave attention layers only; released models of some have them (Granite 4.0 350M, 1B, Micro).
FULL_ATTENTION = {"layer_types": ["full_attention"] * N_LAYERS}
ATTENTION_ONLY: dict[str, dict] = {
    "bailing_hybrid": FULL_ATTENTION,
    "bamba": {"attn_layer_indices": list(range(N_LAYERS))},
    "granitemoehybrid": {"layer_types": ["attention"] * N_LAYERS},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "kimi_linear": FULL_ATTENTION,
    "lara_mini": FULL_ATTENTION,
    "lfm2_moe": FULL_ATTENTION,
    "lfm3": FULL_ATTENTION,
    "minimax": FULL_ATTENTION,
    "nemotron_h": {"layer_types": ["full_attention", "mlp", "full_attention", "moe"]},
    "qwen3_5": {"text_config": FULL_ATTENTION},
    "qwen3_5_moe": {"text_config": FULL_ATTENTION},
    "qwen3_5_moe_text": FULL_ATTENTION,
    "qwen3_5_text": FULL_ATTENTION,
    "qwen3_next": FULL_ATTENTION,
    "recurrent_gemma": {"block_types": ["attention"]},
}


class NotBuilt(Exception):
    """The family has no tiny model; the message says why."""


def tiny_family_model(family: str, dtype: torch.dtype, seed: int = 0, **settings):
    """The family's causal language model in training mode, about 10^5 random parameters.

    Args:
        settings: of its config, beside the tiny ones.

    Raises:
        NotBuilt: no tiny config was found, or it stays too large.
    """
    try:
        config = tiny_config(family, **settings)
        make = AutoModelForCausalLM.from_config
        if family in PART:
            make, config = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config, getattr(config, PART[family])
        with torch.device("meta"):
            size = sum(p.numel() for p in make(config).parameters())
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {_first_line(error)}") from error
    if size > MAX_PARAMETERS:
        raise NotBuilt(f"its smallest config still has {size / 1e6:.0f} M parameters")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # grouped matrix products of experts have no float64 kernel
        model = make(config, experts_implementation="eager").to(dtype)
        with (
            torch.no_grad()
        ):  # nothing may be zero (a dead branch tests nothing) or so small that attention is uniform
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def tiny_config(family: str, **settings) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[family]
    overrides = OVERRIDES.get(family, {})
    small = _merged(shrunk(_default(config_class, overrides)), overrides)
    return config_class(**_merged(small, settings))


def shrunk(config: PreTrainedConfig) -> dict:
    """The settings of a config that must change, nested configs as nested dicts."""
    settings, plain = {}, config.to_dict()
    for name in plain:
        value = vars(config).get(name, plain[name])
        if isinstance(value, PreTrainedConfig):
            settings[name] = {**shrunk(value), "model_type": value.model_type}
        elif name in SPECIAL_TOKENS and value is not None:
            settings[name] = SPECIAL_TOKENS[name]
        elif name == "num_key_value_heads" and "kv_lora_rank" in plain:  # latent attention has a key for every head
            settings[name] = BY_NAME["num_attention_heads"]
        elif name in ("head_dim", "num_key_value_heads"):
            settings[name] = BY_NAME[name]
        elif name in BY_NAME and isinstance(value, int) and not isinstance(value, bool):
            settings[name] = min(value, BY_NAME[name]) if value > 0 else value
        elif name == "is_decoder":  # encoders of old families are causal only if told
            settings[name] = True
        elif name == "layer_types" and value:
            settings[name] = cut_layer_types(value)
        elif isinstance(value, float) and any(word in name for word in DROPOUT):
            settings[name] = 0.0
    return settings


def cut_layer_types(layer_types: list[str]) -> list[str]:
    """`N_LAYERS` entries that hold every kind of layer, in turn, and end as the list ends."""
    kinds = [kind for kind in dict.fromkeys(layer_types) if kind != layer_types[-1]] + [layer_types[-1]]
    return [kinds[(i - N_LAYERS) % len(kinds)] for i in range(N_LAYERS)]


def _default(config_class, overrides: dict) -> PreTrainedConfig:
    """The default config with its nested ones, which some classes leave out, and whose defaults some do not allow."""
    config = config_class()
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if getattr(config, name, None) is None and isinstance(nested, type) and hasattr(nested, "model_type"):
            with_nested = config_class(**{name: nested(**(overrides.get(name) or {}))})
            setattr(config, name, getattr(with_nested, name))
    return config


def _merged(settings: dict, changes: dict) -> dict:
    merged = dict(settings)
    for name, value in changes.items():
        merged[name] = _merged(merged.get(name, {}), value) if isinstance(value, dict) else value
    return merged


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
