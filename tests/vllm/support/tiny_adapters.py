"""Tiny LoRA adapters with random weights, in the form in which PEFT publishes them."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

__all__ = ["write_adapter"]

_RANK = 8


def write_adapter(model: Path, path: Path, *, seed: int, alpha: int = 16) -> Path:
    """Write an adapter of all attention and MLP matrices; replaces what is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    config = transformers.AutoConfig.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    heads = config.hidden_size // config.num_attention_heads
    key_size = config.num_key_value_heads * heads
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, key_size),
        "self_attn.v_proj": (hidden, key_size),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for module, (size_in, size_out) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(_RANK, size_in, generator=generator) / size_in**0.5
            b = torch.randn(size_out, _RANK, generator=generator) / _RANK**0.5
            weights |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": 0.3 * b}
    save_file(weights, path / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": alpha,
        "target_modules": [name.rpartition(".")[2] for name in sizes],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return path
