"""Configurations of the model families, small enough for a CPU: what matters is their KV caches."""

from collections.abc import Callable
from typing import Any

import transformers

__all__ = ["CONFIGS", "VOCABULARY"]

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


def _mla(config_class: type, **changes: Any) -> transformers.PretrainedConfig:
    return config_class(
        **(_COMMON | {"num_key_value_heads": 4}),
        num_hidden_layers=3,
        intermediate_size=256,
        **{
            # Dense: transformers stores experts in one tensor, vLLM loads them one by one.
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
    "llama": lambda: transformers.LlamaConfig(
        **_COMMON, num_hidden_layers=3, intermediate_size=256
    ),
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
}
