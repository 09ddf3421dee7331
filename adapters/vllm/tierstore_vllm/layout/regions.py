"""Pages as byte regions of device memory: what copies address."""

from collections.abc import Sequence

from tierstore.layout import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
)
from tierstore_vllm.layout.pages import LayerPages

__all__ = ["canonicalize"]


def canonicalize(
    pages_of_group: Sequence[Sequence[LayerPages]],
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
    pages: Sequence[LayerPages], order: ChunkOrder
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
