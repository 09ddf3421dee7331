"""Whose bytes an engine computes: everything but the shape of its KV cache."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tierstore.config import StoreConfig
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["EngineIdentity", "check_block_hashes", "describe_identity"]

_HARMLESS_SUFFIXES = (".json", ".jinja", ".md", ".txt")
"""Files beside the weights that decide no byte, or are digested as `hf_config`."""
_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Ways to guess tokens without a model; for them vLLM names the target as the draft model."""
_PAGE_SWITCHES = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")
_SAMPLE_COUNT, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The fields of a `Manifest` that do not depend on the KV cache configuration."""

    engine: str
    model: str
    revision: str
    quantization: str
    hash_algorithm: str
    hash_seed: str
    parallel_shape: str
    extra: tuple[tuple[str, str], ...]


def check_block_hashes(vllm_config: "VllmConfig", config: StoreConfig) -> None:
    """Refuse block hashes that differ in every process where a tier shall outlive the process.

    Raises:
        ConfigError: names the setting to change.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if config.secondary and _hash_seed(algorithm) is None:
        raise ConfigError(
            f"secondary: vLLM's prefix_caching_hash_algo={algorithm!r} starts from a random seed "
            "in every process, so nothing on disk would ever be found again; set the environment "
            "variable PYTHONHASHSEED to a fixed number for vLLM, or use "
            "--prefix-caching-hash-algo sha256, or configure no secondary tier"
        )


def describe_identity(vllm_config: "VllmConfig") -> EngineIdentity:
    """Return what decides the bytes of a block besides its hash and the KV cache configuration."""
    from vllm import __version__ as vllm_version

    parallel = vllm_config.parallel_config
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    model = _describe_model(vllm_config.model_config)
    shards = (
        f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
        f"-dcp{parallel.decode_context_parallel_size}-pcp{parallel.prefill_context_parallel_size}"
    )
    return EngineIdentity(
        # Pages may change their inner order in any minor release, so a new one starts cold.
        engine="vllm-" + ".".join(vllm_version.split(".")[:2]),
        model=model.name,
        revision=model.revision,
        quantization=model.quantization,
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm) or "random",
        parallel_shape=shards,
        extra=(
            ("attention_backends", _attention_backends(vllm_config)),
            # Two fp8 formats are one element type to the KV cache: uint8.
            ("cache_dtype", str(vllm_config.cache_config.cache_dtype)),
            ("cp_interleave", str(parallel.cp_kv_cache_interleave_size)),
            ("draft_model", _describe_draft(vllm_config)),
            ("indexer_dtype", str(vllm_config.attention_config.indexer_kv_dtype)),
            ("load_format", _describe_loading(vllm_config)),
            ("model", model.facts),
            ("switches", _switches()),
            *_describe_lookahead(vllm_config),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelIdentity:
    """What one model, target or draft, is."""

    name: str
    revision: str
    quantization: str
    facts: str
    """What else decides the numbers it computes, as `name=value` in words or as a digest."""


def _describe_model(model: "ModelConfig") -> _ModelIdentity:
    # Weights that were fetched from object storage keep their address in `model_weights`.
    source = str(model.model_weights or model.model)
    path = Path(source)
    hf_config = model.hf_config
    facts = {
        "class_overrides": _digest(model.model_class_overrides),
        "code_revision": str(model.code_revision or ""),
        "dtype": str(model.dtype),
        "hf_config": _config_digest(hf_config.to_dict()),
        "implementation": str(model.model_impl),
        "multimodal": _describe_multimodal(model),
        "quantization_config": _digest(model.quantization_config),
        "rope_length": _rope_length(model),
    }
    return _ModelIdentity(
        name=path.resolve().name if path.exists() else source,
        revision=_weights_digest(path) if path.exists() else _commit(model),
        quantization=str(model.quantization or ""),
        facts=" ".join(f"{name}={fact}" for name, fact in facts.items() if fact),
    )


def _commit(model: "ModelConfig") -> str:
    """Return the commit of weights on a hub; a mere branch where vLLM knows no better."""
    resolved = getattr(model.revision, "resolved", None)
    if not resolved and model.hf_config_path in (None, model.model):
        # The configuration came with the weights. One from elsewhere has a commit of its own.
        resolved = getattr(model.hf_config, "_commit_hash", None)
    return str(resolved or model.revision or "")


def _describe_draft(vllm_config: "VllmConfig") -> str:
    """Name the model whose layers lie in the KV cache beside those of the target; often none."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or speculative.method in _DRAFTS_WITHOUT_LAYERS:
        return ""
    model = _describe_model(draft)
    return f"{speculative.method} {model.name}@{model.revision} {model.quantization} {model.facts}"


def _describe_loading(vllm_config: "VllmConfig") -> str:
    """Name where weights come from; dummy weights come from the seed."""
    load_format = str(vllm_config.load_config.load_format)
    seed = f" seed={vllm_config.model_config.seed}" if load_format == "dummy" else ""
    return load_format + seed


def _describe_multimodal(model: "ModelConfig") -> str:
    """Digest how images and sounds become embeddings; vLLM's hashes name them, not their way."""
    multimodal = model.multimodal_config
    if multimodal is None:
        return ""
    names = (
        "language_model_only",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "video_pruning_method",
        "mm_encoder_attn_dtype",
    )
    return _digest({name: getattr(multimodal, name, None) for name in names})


def _rope_length(model: "ModelConfig") -> str:
    """Return the context length where it decides the rotation of all keys, short ones included.

    vLLM takes the long factors of `longrope` for every position as soon as the engine may run
    longer than the model was trained for. Both lengths count: an automatic one is shortened to the
    memory only after the rotation was chosen.
    """
    if "longrope" not in json.dumps(model.hf_config.to_dict(), default=str):
        return ""
    return f"{model.original_max_model_len}/{model.max_model_len}"


def _hash_seed(algorithm: str) -> str | None:
    """Return what vLLM's hash chain starts from; None: random bytes in every process.

    vLLM takes PYTHONHASHSEED if it is set, else a constant for sha256, and random bytes for xxhash.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    return None if algorithm.startswith("xxhash") else "vllm-none-hash"


def _describe_lookahead(vllm_config: "VllmConfig") -> tuple[tuple[str, str], ...]:
    """Tell how many tokens behind a block its hash covers; nothing where it covers the block alone.

    vLLM 0.33 has such hashes for EAGLE, but not with a connector; 0.32 does not know them.
    """
    tokens = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    return (("hash_lookahead_tokens", str(tokens)),) if tokens else ()


def _switches() -> str:
    """Name the environment's settings that reorder the bytes within a page of the same shape."""
    from vllm import envs

    return " ".join(f"{name}={getattr(envs, name, None)}" for name in _PAGE_SWITCHES)


def _attention_backends(vllm_config: "VllmConfig") -> str:
    """Name the backends, because they decide how K and V lie inside a page."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = (getattr(layer, "attn_backend", None) for layer in layers)
    return ",".join(sorted({backend.get_name() for backend in found if backend is not None}))


def _config_digest(hf_config: dict[str, object]) -> str:
    """Digest the model's configuration, overrides included; where it was found does not matter."""
    ignored = ("_name_or_path", "transformers_version")
    return _digest({name: value for name, value in hf_config.items() if name not in ignored})


def _digest(facts: object) -> str:
    """Digest plain data and objects with a readable name; the same in every process."""
    if not facts:
        return ""
    return xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True, default=_plain).encode())


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    text = str(value)
    # Objects without words of their own show their address, which is new in every process.
    return type(value).__qualname__ if " at 0x" in text else text


def _weights_digest(path: Path) -> str:
    """Digest a local model's weights in milliseconds: names, sizes, times and samples.

    Every file counts but those known to be harmless. With a list of suffixes of weights instead, a
    new format, a single file, or the model's own code would go unnoticed. Reading all bytes would
    take longer than loading the model. An edit that keeps size, time and every sample goes
    unnoticed; a mere copy without its times counts as another model.
    """
    digest = xxhash.xxh3_64()
    for file in sorted(path.iterdir()) if path.is_dir() else (path,):
        is_harmless = file.suffix in _HARMLESS_SUFFIXES or file.name.startswith(".")
        if is_harmless or not file.is_file():
            continue
        stat = file.stat()
        # In a hub cache the file is a link to a blob that is named by the digest of its bytes.
        digest.update(f"{file.name}/{file.resolve().name}/{stat.st_size}/".encode())
        if not file.is_symlink():
            digest.update(str(stat.st_mtime_ns).encode())
        with file.open("rb") as weights:
            for number in range(_SAMPLE_COUNT):
                weights.seek(stat.st_size * number // _SAMPLE_COUNT)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()
