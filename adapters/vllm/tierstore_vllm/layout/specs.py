"""What vLLM's KV cache specs say of groups and layers, in tierstore's words."""

from typing import TYPE_CHECKING

from tierstore.errors import LayoutError
from tierstore.layout import ChunkOrder, GroupKind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = ["chunk_order", "classify_group", "kv_dtypes", "live_page_bytes"]


def classify_group(group_idx: int, group: "KVCacheGroupSpec") -> tuple[GroupKind, int]:
    """Return a group's kind and window.

    Raises:
        LayoutError: the group cannot be cached; the message says why.
    """
    from vllm.v1.kv_cache_interface import iter_layer_specs

    specs = list(iter_layer_specs(group.kv_cache_spec))
    kinds = {_classify_spec(spec) for spec in specs}
    names = ", ".join(sorted({type(spec).__name__ for spec in specs}))
    where = f"KV cache group {group_idx} (layer {group.layer_names[0]} and others: {names})"
    if group.host_resident or not group.enable_kv_transfer:
        raise LayoutError(f"{where} is not kept in device memory")
    if len(kinds) != 1:
        raise LayoutError(f"{where} mixes kinds of attention")
    kind, window_tokens = kinds.pop()
    if kind is GroupKind.UNCACHED or not group.kv_cache_spec.prefix_cacheable:
        raise LayoutError(f"{where} cannot be restored from a prefix cache")
    return kind, window_tokens


def _classify_spec(spec: "KVCacheSpec") -> tuple[GroupKind, int]:
    """Return the kind and window of one layer; exact types, since a subclass may mean anything."""
    from vllm.v1 import kv_cache_interface as vllm_specs

    if type(spec) in (
        vllm_specs.FullAttentionSpec,
        vllm_specs.MLAAttentionSpec,
        vllm_specs.SinkFullAttentionSpec,
    ):
        # A non-causal prefix depends on what follows it, so its bytes are not those of its hash.
        return (GroupKind.UNCACHED if spec.non_causal else GroupKind.FULL), 0
    if type(spec) in (vllm_specs.SlidingWindowSpec, vllm_specs.SlidingWindowMLASpec):
        # The next token attends to itself and to the sliding_window - 1 tokens before it.
        return GroupKind.SLIDING_WINDOW, spec.sliding_window - 1 + spec.extra_retained_tokens
    if type(spec) is vllm_specs.ChunkedLocalAttentionSpec:
        return GroupKind.CHUNKED_LOCAL, spec.attention_chunk_size
    if type(spec) is vllm_specs.MambaSpec and spec.mamba_cache_mode == "align":
        return GroupKind.STATE, 0
    return GroupKind.UNCACHED, 0


def chunk_order(layout_name: str | None) -> ChunkOrder:
    """Return the order in which most pages of a chunk lie in adjacent device memory."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if layout_name in KVCacheLayout.__members__ and KVCacheLayout[layout_name].is_block_outermost:
        return ChunkOrder.BLOCK_MAJOR
    return ChunkOrder.LAYER_MAJOR


def kv_dtypes(kv_cache_config: "KVCacheConfig") -> str:
    """Name the element types and quantisation modes of each group's layers."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return "|".join(
        ",".join(sorted(set(map(_spec_dtype, iter_layer_specs(group.kv_cache_spec)))))
        for group in kv_cache_config.kv_cache_groups
    )


def _spec_dtype(spec: "KVCacheSpec") -> str:
    """Name a layer's element type; of a state, which is one opaque page, its parts."""
    from vllm.v1.kv_cache_interface import MambaSpec

    if isinstance(spec, MambaSpec):
        parts = zip(spec.dtypes, spec.shapes, strict=True)
        return "+".join(f"{dtype}{list(shape)}" for dtype, shape in parts)
    mode = spec.kv_quant_mode
    return f"{spec.dtype}/{mode.name}" if mode else str(spec.dtype)


def live_page_bytes(spec: "KVCacheSpec") -> int:
    """Return the bytes of a page without its padding, as the engine specifies them."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(spec.state_content_size_bytes if unpadded is None else unpadded)
