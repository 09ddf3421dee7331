"""What vLLM 0.32's build for CPUs needs to run some families at all: with tierstore or without.

Imported by the engine's process before anything else; the connector knows nothing of it.
"""

from dataclasses import replace
from typing import Any

import mamba_copies

__all__ = ["apply"]


def apply() -> None:
    """Patch vLLM in this process; the engine must run in it, too."""
    _keep_prefix_caching_for_mla()
    _rotate_correctly()
    _ask_for_no_prefill_checkpoints()
    mamba_copies.apply()


def _keep_prefix_caching_for_mla() -> None:
    """The platform switches it off without AMX, although the reference backend can do it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        original(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = classmethod(check)


def _rotate_correctly() -> None:
    """`forward_cpu` is wrong for the three-dimensional inputs of MLA."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def _ask_for_no_prefill_checkpoints() -> None:
    """The scan on the CPU does not return the states in between."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_cache_interface import MambaSpec

    original = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if isinstance(spec, MambaSpec):
            spec = replace(spec, num_prefill_checkpoint_blocks=0)
        return spec

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
