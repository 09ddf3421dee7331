"""Tiny models with random weights that real vLLM runs on a CPU.

The usual initialisation makes every output the same token. Here weights are scaled by their fan-in,
queries and keys a little more, so that attention is sharp: a wrong byte of KV changes the output.
"""

import json
import math
import zlib
from pathlib import Path

import torch
import transformers
from family_configs import CONFIGS
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["DTYPES", "build_model"]

_BFLOAT16_ONLY = (
    "qwen3_next",
    "qwen3_5",
    "olmo_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
)
DTYPES = dict.fromkeys(CONFIGS, "float32") | dict.fromkeys(_BFLOAT16_ONLY, "bfloat16")
"""float32 makes runs comparable token for token; some kernels exist for bfloat16 only."""


def build_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write configuration, weights and a byte-level tokenizer of one family; return the folder."""
    path = folder / family
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True)
    config = CONFIGS[family]()
    dtype = getattr(torch, DTYPES[family])
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    scaled = {
        name: _scaled(name, tensor, seed).to(dtype)
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name.startswith("lm_head"))
    }
    # Names and shapes as published: some models are kept differently in memory, and vLLM leaves a
    # weight that it does not know as it is.
    weights = {
        name: tensor.contiguous().clone()
        for name, tensor in revert_weight_conversion(model, scaled).items()
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
