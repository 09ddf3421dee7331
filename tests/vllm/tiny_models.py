"""Tiny models with random weights that real vLLM runs on a CPU.

The usual initialisation makes every output the same token. Here weights are scaled by their fan-in,
queries and keys a little more, so that attention is sharp: a wrong byte of KV changes the output.
"""

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

__all__ = ["DTYPES", "build_model"]

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


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**_COMMON, num_hidden_layers=3, intermediate_size=256)


def _mistral() -> transformers.PretrainedConfig:
    return transformers.MistralConfig(
        **_COMMON, num_hidden_layers=3, intermediate_size=256, sliding_window=128
    )


def _gemma3() -> transformers.PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **(_COMMON | {"tie_word_embeddings": True}),
        num_hidden_layers=6,
        intermediate_size=256,
        sliding_window=128,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )


def _qwen3_next() -> transformers.PretrainedConfig:
    return transformers.Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=256,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )


_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "qwen3_next": _qwen3_next,
}

DTYPES = dict.fromkeys(_CONFIGS, "float32") | {"qwen3_next": "bfloat16"}
"""float32 makes runs comparable token for token; some kernels exist for bfloat16 only."""


def build_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write configuration, weights and a byte-level tokenizer of one family; return the folder."""
    path = folder / family
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True)
    config = _CONFIGS[family]()
    dtype = getattr(torch, DTYPES[family])
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {
        name: _scaled(name, tensor, seed).to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name.startswith("lm_head"))
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path)
    stated = config.to_dict() | {
        "architectures": [type(model).__name__],
        "torch_dtype": DTYPES[family],
    }
    (path / "config.json").write_text(json.dumps(stated, indent=1))
    return path


def _scaled(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() < 2 or "conv1d" in name:
        return tensor + 0.1 * noise
    if "embed" in name:
        return noise
    # Expert weights of some families are stored (expert, in, out), all others (out, in).
    fan_in = tensor.shape[-2] if tensor.dim() == 3 else tensor.shape[-1]
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "lm_head" in name else 1.0
    return noise * gain / math.sqrt(fan_in)


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
