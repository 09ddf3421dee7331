"""A tiny hybrid model with an MTP layer whose guesses are right often enough to matter.

The residual stream of the target is mostly the embedding of its last token, and the MTP layer
passes on the embedding of the token that it is given: so both mostly choose the same next token.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_model

__all__ = ["build_mtp_model"]

_EMBEDDING_GAIN = 4.0
_DRAFT_LAYER_GAIN = 0.2
_COPIED_LAYER = "model.layers.3."


def build_mtp_model(folder: Path) -> Path:
    """Write a Qwen3-Next of linear and full attention with one MTP layer; return its folder."""
    path = build_model("qwen3_next", folder)
    config_file, weights_file = path / "config.json", path / "model.safetensors"
    config = json.loads(config_file.read_text())
    if "num_nextn_predict_layers" in config:
        return path
    weights = load_file(weights_file)
    size = config["hidden_size"]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * _EMBEDDING_GAIN
    for name in [name for name in weights if name.startswith(_COPIED_LAYER)]:
        gain = _DRAFT_LAYER_GAIN if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        copied = name.replace(_COPIED_LAYER, "mtp.layers.0.")
        weights[copied] = (weights[name] * gain).to(weights[name].dtype)
    dtype = weights["model.norm.weight"].dtype
    # The token's embedding goes through, the target's hidden state a little.
    passed = torch.cat([torch.eye(size), 0.1 * torch.eye(size)], dim=1)
    weights["mtp.fc.weight"] = passed.to(dtype)
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    weights["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(size, dtype=dtype)
    weights["mtp.pre_fc_norm_hidden.weight"] = torch.zeros(size, dtype=dtype)
    save_file(weights, weights_file, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=1))
    return path
