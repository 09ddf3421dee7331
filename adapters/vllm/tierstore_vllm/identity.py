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
    from vllm.config import VllmConfig

__all__ = ["EngineIdentity", "check_block_hashes", "describe_identity"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
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
    """Say what decides the bytes of a block besides its hash and the KV cache configuration."""
    from vllm import __version__ as vllm_version

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    path = Path(model.model)
    hf_config = model.hf_config
    revision = str(getattr(hf_config, "_commit_hash", None) or model.revision or "")
    shards = (
        f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
        f"-dcp{parallel.decode_context_parallel_size}-pcp{parallel.prefill_context_parallel_size}"
    )
    return EngineIdentity(
        # Pages may change their inner order in any minor release, so a new one starts cold.
        engine="vllm-" + ".".join(vllm_version.split(".")[:2]),
        model=path.resolve().name if path.is_dir() else str(model.model),
        revision=_weights_digest(path) if path.is_dir() else revision,
        quantization=str(model.quantization or ""),
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm) or "random",
        parallel_shape=shards,
        extra=(
            ("attention_backends", _attention_backends(vllm_config)),
            ("cp_interleave", str(parallel.cp_kv_cache_interleave_size)),
            ("dtype", str(model.dtype)),
            ("hf_config", _config_digest(hf_config.to_dict())),
            ("load_format", f"{vllm_config.load_config.load_format}"),
        ),
    )


def _hash_seed(algorithm: str) -> str | None:
    """Return what vLLM's hash chain starts from; None: random bytes in every process.

    vLLM takes PYTHONHASHSEED if it is set, else a constant for sha256, and random bytes for xxhash.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    return None if algorithm.startswith("xxhash") else "vllm-none-hash"


def _attention_backends(vllm_config: "VllmConfig") -> str:
    """Name the backends, because they decide how K and V lie inside a page."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = (getattr(layer, "attn_backend", None) for layer in layers)
    return ",".join(sorted({backend.get_name() for backend in found if backend is not None}))


def _config_digest(hf_config: dict[str, object]) -> str:
    """Digest the model's configuration, overrides included; where it was found does not matter."""
    ignored = ("_name_or_path", "transformers_version")
    facts = {name: value for name, value in hf_config.items() if name not in ignored}
    return xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())


def _weights_digest(folder: Path) -> str:
    """Digest a local model's weights in milliseconds: names, sizes, times and samples.

    Reading all bytes would take longer than loading the model. An edit that keeps size, time and
    every sample goes unnoticed; a mere copy without its times counts as another model.
    """
    digest = xxhash.xxh3_64()
    for file in sorted(folder.iterdir()):
        if file.suffix not in _WEIGHT_SUFFIXES or not file.is_file():
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
