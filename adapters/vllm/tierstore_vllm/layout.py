"""vLLM's KV caches in tierstore's words: groups, pages, byte regions.

A registered layer is a view `[block, head, state, content]` (blocks perhaps split into kernel
blocks) of one allocation that all layers share. Nothing is assumed about its strides: the pages of
different layers may be far apart (LBHNC), adjacent (BLHNC), padded (mamba), interleaved by head
(LHBNC), or overlay those of other groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.config import StoreConfig
from tierstore.errors import ConfigError, LayoutError, ManifestError
from tierstore.layout import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
    GroupKind,
)
from tierstore.manifest import GroupManifest, Manifest
from tierstore.quoting import named
from tierstore_vllm.identity import describe_identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = ["EngineShape", "WorkerLayout", "describe_engine", "describe_worker"]

_DIMENSIONS = ("block", "head", "state", "content")
_PIECES_MAX = 256
"""Separate byte runs per page and layer; more would make every copy a crawl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What the scheduler half must know besides the manifest."""

    hash_block_tokens: int
    """Tokens per entry of `Request.block_hashes`."""
    alignment_tokens: int
    """Hit lengths are multiples of this."""
    rank_count: int
    """Workers that answer every job."""
    draft_groups: frozenset[int] = frozenset()
    """Indices of the groups that vLLM marks as those of an EAGLE or MTP draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """One worker's KV caches: whose bytes, and where they are."""

    manifest: Manifest
    caches: CanonicalKVCaches


@dataclass(frozen=True, slots=True)
class _LayerPages:
    """One layer's pages: equally spaced blocks, each of one or more equally long byte runs."""

    layer_name: str
    addresses: tuple[int, ...]
    """Of block 0's runs, in slot order."""
    stride_bytes: int
    run_bytes: int
    signature: str
    """Order of the bytes inside a page; part of their identity."""
    owner: object

    @property
    def page_bytes(self) -> int:
        return self.run_bytes * len(self.addresses)


def describe_engine(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> EngineShape:
    """Read what does not depend on memory; valid in the scheduler process.

    Raises:
        LayoutError: vLLM did not say how finely it hashes blocks.
    """
    hash_block_tokens = kv_cache_config.hash_block_size
    if not hash_block_tokens:
        raise LayoutError("vLLM resolved no hash_block_size: there are no block hashes to cache by")
    return EngineShape(
        hash_block_tokens=hash_block_tokens,
        alignment_tokens=kv_cache_config.cache_hit_alignment_tokens or hash_block_tokens,
        rank_count=vllm_config.parallel_config.world_size,
        draft_groups=frozenset(
            group_idx
            for group_idx, group in enumerate(kv_cache_config.kv_cache_groups)
            if group.is_eagle_group
        ),
    )


def describe_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: StoreConfig,
    kv_caches: "Mapping[str, torch.Tensor]",
) -> WorkerLayout:
    """Describe the registered KV caches of this rank.

    One group that cannot be kept makes every hit impossible, so nothing is kept at all then.

    Raises:
        LayoutError: a group cannot be cached; the message says which layer and why.
        ConfigError: the configuration cannot work with this engine; says what to change.
    """
    try:
        return _describe(vllm_config, kv_cache_config, config, kv_caches)
    except (ConfigError, LayoutError):
        raise
    except ManifestError as error:
        raise LayoutError(str(error)) from error
    except Exception as error:  # whatever vLLM's objects raise when they are not as expected
        raise LayoutError(
            f"the KV caches are not as vLLM 0.32 and 0.33 describe them: {named(error)}"
        ) from error


def _describe(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: StoreConfig,
    kv_caches: "Mapping[str, torch.Tensor]",
) -> WorkerLayout:
    if not kv_cache_config.kv_cache_groups:
        raise LayoutError("the model has no KV cache")
    groups: list[GroupManifest] = []
    pages_of_group: list[list[_LayerPages]] = []
    order = _chunk_order(kv_cache_config.kv_cache_layout)
    context_shards = vllm_config.parallel_config.decode_context_parallel_size
    for group_idx, group in enumerate(kv_cache_config.kv_cache_groups):
        kind, window_tokens = _classify_group(group_idx, group)
        pages = _group_pages(group, kv_cache_config.num_blocks, kv_caches)
        if order is ChunkOrder.BLOCK_MAJOR:
            pages.sort(key=lambda layer: layer.addresses)
        spec = group.kv_cache_spec
        groups.append(
            GroupManifest(
                kind=kind,
                tokens_per_block=spec.block_size * (context_shards if spec.dcp_sharded else 1),
                layer_names=tuple(layer.layer_name for layer in pages),
                page_bytes=tuple(layer.page_bytes for layer in pages),
                window_tokens=window_tokens,
            )
        )
        pages_of_group.append(pages)
    _check_chunks(config, groups)
    signatures = (sorted({layer.signature for layer in pages}) for pages in pages_of_group)
    identity = describe_identity(vllm_config)
    manifest = Manifest(
        engine=identity.engine,
        model=identity.model,
        revision=identity.revision,
        kv_dtype=_kv_dtypes(kv_cache_config),
        quantization=identity.quantization,
        layout=kv_cache_config.kv_cache_layout or "",
        chunk_order=order,
        blocks_per_chunk=config.offload.blocks_per_chunk,
        hash_algorithm=identity.hash_algorithm,
        hash_seed=identity.hash_seed,
        parallel_shape=identity.parallel_shape,
        groups=tuple(groups),
        extra=tuple(
            sorted(
                (
                    *identity.extra,
                    ("hash_block_tokens", str(kv_cache_config.hash_block_size)),
                    ("pages", "|".join(",".join(names) for names in signatures)),
                )
            )
        ),
    )
    device = next(iter(kv_caches.values())).device
    caches = _canonicalize(pages_of_group, kv_cache_config.num_blocks, order, str(device))
    return WorkerLayout(manifest=manifest, caches=caches)


def _classify_group(group_idx: int, group: "KVCacheGroupSpec") -> tuple[GroupKind, int]:
    """Return a group's kind and window."""
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


def _check_chunks(config: StoreConfig, groups: Sequence[GroupManifest]) -> None:
    """Refuse chunks of several blocks where a block is a state: only its last one exists."""
    if config.offload.blocks_per_chunk > 1 and any(g.kind is GroupKind.STATE for g in groups):
        raise ConfigError(
            f"offload.blocks_per_chunk: a model with mamba or linear attention layers needs 1, "
            f"got {config.offload.blocks_per_chunk}"
        )


def _chunk_order(layout_name: str | None) -> ChunkOrder:
    """Return the order in which most pages of a chunk lie in adjacent device memory."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if layout_name in KVCacheLayout.__members__ and KVCacheLayout[layout_name].is_block_outermost:
        return ChunkOrder.BLOCK_MAJOR
    return ChunkOrder.LAYER_MAJOR


def _kv_dtypes(kv_cache_config: "KVCacheConfig") -> str:
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


def _group_pages(
    group: "KVCacheGroupSpec", block_count: int, kv_caches: "Mapping[str, torch.Tensor]"
) -> list[_LayerPages]:
    """Measure the pages of a group's layers; a layer that shares another's pages adds nothing."""
    layers: dict[tuple[tuple[int, ...], int, int], _LayerPages] = {}
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for layer_name in group.layer_names:
        if layer_name not in kv_caches:
            raise LayoutError(f"layer {layer_name} was not registered by vLLM")
        layer = _layer_pages(layer_name, kv_caches[layer_name], block_count)
        expected_bytes = _live_page_bytes(per_layer.get(layer_name, group.kv_cache_spec))
        if layer.page_bytes != expected_bytes:
            raise LayoutError(
                f"layer {layer_name}: vLLM specifies {expected_bytes} bytes per block, but the "
                f"registered memory has {layer.page_bytes}"
            )
        layers.setdefault((layer.addresses, layer.stride_bytes, layer.run_bytes), layer)
    return list(layers.values())


def _live_page_bytes(spec: "KVCacheSpec") -> int:
    """Return the bytes of a page without its padding, as the engine specifies them."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(spec.state_content_size_bytes if unpadded is None else unpadded)


def _layer_pages(layer_name: str, view: "torch.Tensor", block_count: int) -> _LayerPages:
    """Cut a layer's view into byte runs.

    Dimensions are taken from the smallest stride up: as long as each starts where the one before
    ended they form one run; the rest say where further runs of the same page are.
    """
    shape = tuple(getattr(view, "shape", ()))
    if len(shape) != len(_DIMENSIONS):
        raise LayoutError(f"layer {layer_name}: expected a view of {_DIMENSIONS}, got {shape}")
    if block_count <= 0 or shape[0] % block_count:
        raise LayoutError(f"layer {layer_name}: {shape[0]} blocks, vLLM says {block_count}")
    blocks = view.unflatten(0, (block_count, -1))
    item_bytes = view.element_size()
    stride_bytes = blocks.stride(0) * item_bytes
    inner = sorted(
        (stride * item_bytes, size)
        for stride, size in zip(blocks.stride()[1:], blocks.shape[1:], strict=True)
        if size > 1
    )
    run_bytes = item_bytes
    while inner and inner[0][0] == run_bytes:
        run_bytes *= inner.pop(0)[1]
    offsets = [0]
    for stride, size in inner:
        if stride < run_bytes:
            raise LayoutError(f"layer {layer_name}: pages overlap themselves")
        offsets = [step * stride + offset for step in range(size) for offset in offsets]
    if len(offsets) > _PIECES_MAX:
        raise LayoutError(f"layer {layer_name}: {len(offsets)} separate byte runs per block")
    storage = view.untyped_storage()
    end = view.data_ptr() + (block_count - 1) * stride_bytes + offsets[-1] + run_bytes
    if stride_bytes <= 0 or end > storage.data_ptr() + storage.nbytes():
        raise LayoutError(f"layer {layer_name}: blocks reach beyond the registered memory")
    return _LayerPages(
        layer_name=layer_name,
        addresses=tuple(view.data_ptr() + offset for offset in offsets),
        stride_bytes=stride_bytes,
        run_bytes=run_bytes,
        signature=_signature(blocks),
        owner=view,
    )


def _signature(blocks: "torch.Tensor") -> str:
    """Name the sizes of a page's dimensions from the outermost to the innermost in memory."""
    # K: the kernel's blocks within one of the scheduler's.
    dims = zip(blocks.stride()[1:], "KHNC", blocks.shape[1:], strict=True)
    return (
        "".join(f"{letter}{size}" for _, letter, size in sorted(dims, reverse=True) if size > 1)
        + f"x{blocks.element_size()}"
    )


def _canonicalize(
    pages_of_group: Sequence[Sequence[_LayerPages]],
    block_count: int,
    order: ChunkOrder,
    device: str,
) -> CanonicalKVCaches:
    """Number the distinct regions; regions that alias each other in two groups are one."""
    tensors: dict[tuple[int, int, int], CanonicalKVCacheTensor] = {}
    indices: dict[tuple[int, int, int], int] = {}
    group_refs: list[tuple[CanonicalKVCacheRef, ...]] = []
    for pages in pages_of_group:
        refs: list[CanonicalKVCacheRef] = []
        for layer_name, address, stride_bytes, run_bytes, owner in _runs(pages, order):
            region = (address, stride_bytes, run_bytes)
            if region not in tensors:
                indices[region] = len(tensors)
                tensors[region] = CanonicalKVCacheTensor(
                    address=address,
                    block_count=block_count,
                    block_stride_bytes=stride_bytes,
                    page_bytes=run_bytes,
                    owner=owner,
                )
            refs.append(CanonicalKVCacheRef(layer_name=layer_name, tensor_idx=indices[region]))
        group_refs.append(tuple(refs))
    return CanonicalKVCaches(
        tensors=tuple(tensors.values()),
        group_refs=tuple(group_refs),
        chunk_order=order,
        device=device,
    )


def _runs(
    pages: Sequence[_LayerPages], order: ChunkOrder
) -> list[tuple[str, int, int, int, object]]:
    """List a group's byte runs in slot order: (name, address, stride, bytes, owner).

    In BLOCK_MAJOR order the pages of neighbouring layers are neighbours in the slot too, so runs
    that touch each other become one: in the best case a block is a single copy.
    """
    runs: list[tuple[str, int, int, int, object]] = []
    for layer in pages:
        for address in layer.addresses:
            if runs and order is ChunkOrder.BLOCK_MAJOR:
                name, start, stride_bytes, run_bytes, owner = runs[-1]
                if start + run_bytes == address and stride_bytes == layer.stride_bytes:
                    runs[-1] = (name, start, stride_bytes, run_bytes + layer.run_bytes, owner)
                    continue
            runs.append(
                (layer.layer_name, address, layer.stride_bytes, layer.run_bytes, layer.owner)
            )
    return runs
