"""The embedded caller's chunks: of one group, as rows of bytes; and slots as adjacent rows."""

from collections.abc import Sequence
from itertools import pairwise
from mmap import mmap
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import TierStoreError
from tierstore.key import OffloadKey, offload_group_indices
from tierstore.layout import PAGE_BYTES, GroupKind, GroupSpec
from tierstore.quoting import escaped, named, quoted
from tierstore.transfer import IntArray

__all__ = [
    "ByteArray",
    "ChunkRows",
    "CpuTensor",
    "Rows",
    "WritableChunkRows",
    "adjacent_runs",
    "byte_rows",
    "one_group",
    "slot_rows",
]


class _Buffer(Protocol):
    """As `collections.abc.Buffer`, which Python 3.11 does not have."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class CpuTensor(Protocol):
    """A tensor that numpy can view: a dense `torch.Tensor` on the CPU, for one."""

    def numpy(self) -> npt.NDArray[Any]:
        """Return an array that shares the memory of the tensor."""


ChunkRows: TypeAlias = (
    npt.NDArray[Any] | CpuTensor | Sequence[_Buffer | npt.NDArray[Any] | CpuTensor]
)
"""One row of a group's chunk bytes per key: a C-contiguous array or tensor of shape
(n, chunk_bytes), any dtype of 1 byte, or a sequence of n buffers."""

WritableChunkRows: TypeAlias = (
    npt.NDArray[Any]
    | CpuTensor
    | Sequence[bytearray | memoryview | mmap | npt.NDArray[Any] | CpuTensor]
)
"""As `ChunkRows`, to be written into: any other buffer is given as `memoryview(buffer)`."""

ByteArray = npt.NDArray[np.uint8]
Rows = ByteArray | list[ByteArray]
"""Chunks as rows of bytes: one array of shape (n, chunk_bytes), or n arrays."""


def adjacent_runs(slots: IntArray, slot_bytes: int, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Split slots into half-open runs [start, stop) that are adjacent in the pool.

    So are the rows of the caller's array that they belong to, one for each.
    """
    if len(slots) == 0:
        return []
    are_apart = np.diff(slots) != slot_bytes // PAGE_BYTES
    if not isinstance(rows, range):
        are_apart |= np.diff(rows) != 1
    cuts = np.flatnonzero(are_apart) + 1
    return list(pairwise([0, *cuts.tolist(), len(slots)]))


def slot_rows(pool: ByteArray, spec: GroupSpec, slot: int, count: int) -> ByteArray:
    """View `count` adjacent slots of a group as an array (count, chunk_bytes)."""
    start = slot * PAGE_BYTES
    flat = pool[start : start + count * spec.slot_bytes]
    return flat.reshape(count, spec.slot_bytes)[:, : spec.chunk_bytes]


def one_group(keys: Sequence[OffloadKey], specs: Sequence[GroupSpec]) -> int:
    """Return the index of the one group that the keys are of; 0 if there are none.

    Raises:
        ValueError: they are of several groups, or of one that is not cached.
    """
    group_indices = offload_group_indices(keys) or {0}
    if len(group_indices) > 1:
        raise ValueError(f"keys: expected one group per call, got {quoted(sorted(group_indices))}")
    (group_idx,) = group_indices
    if group_idx >= len(specs) or specs[group_idx].kind is GroupKind.UNCACHED:
        raise ValueError(f"keys: group {group_idx} is not cached by this manifest")
    return group_idx


def byte_rows(array: object, count: int, chunk_bytes: int, *, writable: bool = False) -> Rows:
    """View the caller's chunks as rows of bytes, without a copy.

    Raises:
        TypeError: no array, or one of objects.
        ValueError: a wrong shape, not contiguous, or not writable.
    """
    name = "out" if writable else "array"
    try:
        if issubclass(type(array), (list, tuple)):
            rows: Rows = _rows(list(array), name, count, chunk_bytes)  # type: ignore[call-overload]
        else:
            rows = _matrix(array, name, count, chunk_bytes)
    except (TypeError, ValueError, TierStoreError):
        raise
    except Exception as error:  # whatever the caller's own classes raise
        raise TypeError(f"{name}: cannot be viewed as an array: {named(error)}") from error
    parts = [rows] if isinstance(rows, np.ndarray) else rows
    if writable and not all(part.flags.writeable for part in parts):
        raise ValueError(f"{name}: is read-only, and the chunks are written into it")
    return rows


def _rows(buffers: list[object], name: str, count: int, chunk_bytes: int) -> list[ByteArray]:
    if len(buffers) != count:
        raise ValueError(f"{name}: expected {count} buffers, one per key, got {len(buffers)}")
    return [_row(buffer, f"{name}[{i}]", chunk_bytes) for i, buffer in enumerate(buffers)]


def _matrix(array: object, name: str, count: int, chunk_bytes: int) -> ByteArray:
    array = _untensored(array, name)
    if issubclass(type(array), np.ndarray):
        array = np.asarray(array)  # a class of the caller's may say anything of its shape
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = f"one of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(
            f"{name}: expected a numpy array of bytes, a CPU torch tensor or a list of buffers, "
            f"got {escaped(kind)}"
        )
    size_bytes = array.shape[1] * array.itemsize if array.ndim == 2 else -1  # noqa: PLR2004
    if (len(array) if array.ndim else 0, size_bytes) != (count, chunk_bytes):
        raise ValueError(
            f"{name}: expected shape ({count}, {chunk_bytes}), a row of bytes per key, got "
            f"{quoted(array.shape)} of {escaped(array.dtype)}"
        )
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: is not C-contiguous; give np.ascontiguousarray({name})")
    return array.view(np.uint8)


def _row(buffer: object, name: str, chunk_bytes: int) -> ByteArray:
    buffer = _untensored(buffer, name)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        is_usable = view.c_contiguous and "O" not in view.format
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected a buffer of bytes: {escaped(error)}") from error
    if not is_usable or view.nbytes != chunk_bytes:
        raise ValueError(
            f"{name}: expected {chunk_bytes} adjacent bytes, got {view.nbytes} of format "
            f"{quoted(view.format)}" + ("" if view.c_contiguous else ", not contiguous")
        )
    return np.frombuffer(view, np.uint8)


def _untensored(array: object, name: str) -> object:
    """Return the numpy view of a torch tensor, without importing torch; others as they are."""
    if not hasattr(array, "numpy"):
        return array
    try:
        return array.numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{name}: numpy cannot view this tensor ({escaped(error)}); give one that is dense and "
            "on the CPU, of bytes: tensor.detach().view(torch.uint8)"
        ) from error
