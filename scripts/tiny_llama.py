"""Make a small Llama with random weights and a byte-level tokenizer, without any download.

The weights are drawn so that the model is sensitive: with the usual initialisation every prompt
yields the same token, and a wrong byte in the KV cache would go unnoticed.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["make_byte_tokenizer", "make_sensitive", "make_tiny_llama"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_llama(folder: Path, *, hidden_size: int = 512, layer_count: int = 8) -> Path:
    """Write a model for contexts of up to 8192 tokens into `folder`; the same one every time."""
    tokenizer = make_byte_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layer_count,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    make_sensitive(model, seed=0)
    model.save_pretrained(folder)
    return folder


def make_byte_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer whose tokens are single bytes, with a plain chat template."""
    vocabulary = {
        byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<end>")  # noqa: S106 - no password
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_sensitive(model: torch.nn.Module, seed: int) -> None:
    """Draw new matrices, scaled by their fan-in so that signals neither fade nor explode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in sorted(model.named_parameters()):
            if weights.dim() > 1:
                fan_in = 1 if "embed" in name else weights.shape[1]
                weights.normal_(0.0, 2.0 / fan_in**0.5, generator=generator)
