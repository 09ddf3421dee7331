"""The pages of registered layers, measured on the views that vLLM hands over."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import LayoutError
from tierstore_vllm.layout.specs import live_page_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

__all__ = ["LayerPages", "group_pages"]

_DIMENSIONS = ("block", "head", "state", "content")
_PIECES_MAX = 256
"""Separate byte runs per page and layer; more would make every copy a crawl."""


@dataclass(frozen=True, slots=True)
class LayerPages:
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
        """Bytes of one block."""
        return self.run_bytes * len(self.addresses)


def group_pages(
    group: "KVCacheGroupSpec", block_count: int, kv_caches: "Mapping[str, torch.Tensor]"
) -> list[LayerPages]:
    """Measure the pages of a group's layers; a layer that shares another's pages adds nothing."""
    layers: dict[tuple[tuple[int, ...], int, int], LayerPages] = {}
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for layer_name in group.layer_names:
        if layer_name not in kv_caches:
            raise LayoutError(f"layer {layer_name} was not registered by vLLM")
        layer = _layer_pages(layer_name, kv_caches[layer_name], block_count)
        expected_bytes = live_page_bytes(per_layer.get(layer_name, group.kv_cache_spec))
        if layer.page_bytes != expected_bytes:
            raise LayoutError(
                f"layer {layer_name}: vLLM specifies {expected_bytes} bytes per block, but the "
                f"registered memory has {layer.page_bytes}"
            )
        layers.setdefault((layer.addresses, layer.stride_bytes, layer.run_bytes), layer)
    return list(layers.values())


def _layer_pages(layer_name: str, view: "torch.Tensor", block_count: int) -> LayerPages:
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
    return LayerPages(
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
