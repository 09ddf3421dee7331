"""Configurations of the model families, small enough for a CPU: what matters is their KV caches."""

import math
from collections.abc import Callable
from typing import Any

import transformers

__all__ = ["CONFIGS", "ENGINE_ARGUMENTS", "VOCABULARY"]

VOCABULARY = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TIED = _COMMON | {"tie_word_embeddings": True}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**_COMMON, num_hidden_layers=3, intermediate_size=256)


def _mla(config_class: type, **changes: Any) -> transformers.PretrainedConfig:
    return config_class(
        **(_COMMON | {"num_key_value_heads": 4, "head_dim": 64}),
        num_hidden_layers=3,
        intermediate_size=256,
        **{
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 512,  # with 64 for positions: what the kernels are built for
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            **changes,
        },
    )


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, num_hidden_layers=3, intermediate_size=256
    ),
    "mistral": lambda: transformers.MistralConfig(
        **_COMMON, num_hidden_layers=3, intermediate_size=256, sliding_window=128
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_TIED,
        num_hidden_layers=4,
        intermediate_size=256,
        sliding_window=128,
        query_pre_attn_scalar=32,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=[_SLIDING, _FULL] * 2,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_TIED,
        num_hidden_layers=6,
        intermediate_size=256,
        sliding_window=128,
        query_pre_attn_scalar=32,
        layer_types=[_SLIDING] * 5 + [_FULL],
    ),
    "cohere2": lambda: transformers.Cohere2Config(
        **_TIED,
        num_hidden_layers=4,
        intermediate_size=256,
        sliding_window=128,
        layer_types=[_SLIDING] * 3 + [_FULL],
    ),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **_TIED,
        num_hidden_layers=10,
        intermediate_size=256,
        sliding_window=128,
        layer_types=([_SLIDING] * 4 + [_FULL]) * 2,
        num_kv_shared_layers=5,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 10,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **_TIED,
        num_hidden_layers=6,
        intermediate_size=256,
        sliding_window=128,
        layer_types=[_SLIDING] * 5 + [_FULL],
        global_head_dim=64,
        num_global_key_value_heads=1,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=128,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=128,
        layer_types=["chunked_attention"] * 3 + [_FULL],
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_COMMON,
        **_EXPERTS,
        **_LINEAR,
        num_hidden_layers=4,
        intermediate_size=256,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **_COMMON, **_LINEAR, num_hidden_layers=4, intermediate_size=256
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **_TIED,
        num_hidden_layers=4,
        intermediate_size=256,
        block_multiple_of=32,
        block_dim=128,
        block_ff_dim=256,
        conv_dim=128,
        layer_types=["conv", _FULL] * 2,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_COMMON,
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"],
        intermediate_size=256,
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        expand=2,
        chunk_size=64,
    ),
    "deepseek_v2": lambda: _mla(transformers.DeepseekV2Config),
    "deepseek_v3": lambda: _mla(
        transformers.DeepseekV3Config, q_lora_rank=64, n_group=1, topk_group=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **_COMMON, num_hidden_layers=3, intermediate_size=256
    ),
    "llama_fp8": _llama,
    "exaone4": lambda: transformers.Exaone4Config(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=256,
        sliding_window=128,
        layer_types=[_SLIDING] * 3 + [_FULL],
    ),
    "mimo_v2_flash": lambda: transformers.MiMoV2FlashConfig(
        # Full layers have four KV heads, sliding ones two. A narrower V would need Triton.
        **(_COMMON | {"num_key_value_heads": 4}),
        v_head_dim=32,
        num_hidden_layers=4,
        intermediate_size=256,
        sliding_window=128,
        layer_types=[_FULL, _SLIDING, _SLIDING, _FULL],
        mlp_layer_types=["dense"] * 4,
        # How the published configuration says the same, and vLLM reads it.
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 0, 0, 0],
        layernorm_epsilon=1e-5,
        sliding_window_size=128,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        swa_v_head_dim=32,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **_COMMON, **_LINEAR, num_hidden_layers=4, intermediate_size=256
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **_COMMON,
        num_hidden_layers=3,
        intermediate_size=256,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_chunk_size=64,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **(_TIED | {"num_key_value_heads": 4, "head_dim": 64}),
        num_hidden_layers=4,
        intermediate_size=256,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=32,
        chunk_size=64,
    ),
    "granite_moe_hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=128,
        shared_intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        position_embedding_type="rope",
        attention_multiplier=1 / math.sqrt(32),
        mamba_n_heads=8,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_chunk_size=64,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=256,
        num_experts=1,
        num_experts_per_tok=1,
        attn_layer_period=4,
        attn_layer_offset=3,
    ),
    "glm4_moe_lite": lambda: _mla(
        transformers.Glm4MoeLiteConfig,
        q_lora_rank=64,
        first_k_dense_replace=2,
        mlp_layer_types=["dense", "dense", "sparse"],
    ),
}

ENGINE_ARGUMENTS: dict[str, dict[str, Any]] = {"llama_fp8": {"kv_cache_dtype": "fp8_e5m2"}}
"""Further arguments of `vllm.LLM` that make a family."""
