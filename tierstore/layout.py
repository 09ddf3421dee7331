"""Shapes: what a chunk of a KV cache group is, and where the engine keeps its bytes.

Two halves that never mix:

- `GroupSpec` is what the control plane knows of a group: tokens, windows, bytes per chunk.
- `CanonicalKVCaches` is what the data plane knows: byte regions with strides, no dtype, no torch.

A chunk of group g lies in its slot (and in its record) in one of two orders:

    LAYER_MAJOR   [layer 0: block 0 .. block k-1][layer 1: block 0 .. block k-1] ...
    BLOCK_MAJOR   [block 0: layer 0 .. layer n-1][block 1: layer 0 .. layer n-1] ...

The order is part of the manifest, since it is part of the identity of the bytes.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "PAGE_BYTES",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "ChunkOrder",
    "GroupKind",
    "GroupSpec",
    "round_up",
]

PAGE_BYTES = 4096
"""Alignment of slots and records: a host memory page, and what O_DIRECT asks for."""


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not less than `value`."""
    return -(-value // unit) * unit


class GroupKind(Enum):
    """How a group's layers look back, which decides what a hit needs."""

    FULL = "full"
    """Every chunk of [0, L); also MLA."""
    SLIDING_WINDOW = "sliding_window"
    """The chunks that cover the last `window_tokens` before L."""
    CHUNKED_LOCAL = "chunked_local"
    """The chunks from the last multiple of `window_tokens` at or before L up to L."""
    STATE = "state"
    """Mamba, linear attention, short convolution: the one state at L."""
    UNCACHED = "uncached"
    """A group that tierstore cannot cache; it makes every external hit impossible."""


class ChunkOrder(Enum):
    """In which order the pages of a chunk lie in its slot and record."""

    LAYER_MAJOR = "layer_major"
    BLOCK_MAJOR = "block_major"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One KV cache group as the control plane sees it."""

    group_idx: int
    kind: GroupKind
    tokens_per_block: int
    blocks_per_chunk: int
    chunk_bytes: int
    """Live bytes of one chunk on one rank: no padding, no other group's row."""
    window_tokens: int = 0
    """Sliding window: tokens that must be restored before L, retained extra tokens included.
    Chunked local: the length of one attention chunk. Otherwise 0."""

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens whose KV one chunk holds."""
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: `chunk_bytes` rounded up to whole pages."""
        return round_up(self.chunk_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalKVCacheTensor:
    """A run of equally spaced pages in the engine's memory; block b starts at b * stride.

        address            +stride              +2*stride
        |page 0|  gap      |page 1|  gap        |page 2| ...

    Always bytes, never the model's dtype. Tensors of different groups may alias each other.
    """

    address: int
    """Of block 0, in the device's address space."""
    block_count: int
    """From the engine's configuration, never from a tensor's shape."""
    block_stride_bytes: int
    page_bytes: int
    """Live bytes of one page; at most `block_stride_bytes`."""
    owner: object
    """Keeps the memory alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalKVCacheRef:
    """One layer's pages of a group: an index into `CanonicalKVCaches.tensors`."""

    layer_name: str
    tensor_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalKVCaches:
    """All KV caches of one device: regions, and per group the layers in slot order."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]
    """Per group; empty for a group that is not cached."""
    chunk_order: ChunkOrder
    device: str
    """`cpu` or `cuda:<index>`."""

    def chunk_bytes(self, group_idx: int, blocks_per_chunk: int) -> int:
        """Return the live bytes of one chunk of a group."""
        pages = (self.tensors[ref.tensor_idx].page_bytes for ref in self.group_refs[group_idx])
        return sum(pages) * blocks_per_chunk
