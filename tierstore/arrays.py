"""The embedded caller's chunks as rows of bytes, and slots as runs of adjacent rows."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.layout import PAGE_BYTES
from tierstore.transfer import IntArray

__all__ = ["ByteArray", "Rows", "adjacent_runs", "byte_rows"]

ByteArray = npt.NDArray[np.uint8]
Rows = ByteArray | list[ByteArray]
"""Chunks as rows of bytes: one array of shape (n, chunk_bytes), or n arrays."""


def adjacent_runs(slots: IntArray, slot_bytes: int) -> list[tuple[int, int]]:
    """Split slots into half-open runs [start, stop) that are adjacent in the pool."""
    if len(slots) == 0:
        return []
    cuts = np.flatnonzero(np.diff(slots) != slot_bytes // PAGE_BYTES) + 1
    return list(pairwise([0, *cuts.tolist(), len(slots)]))


def byte_rows(array: object, count: int, chunk_bytes: int, *, writable: bool = False) -> Rows:
    """View the caller's chunks as rows of bytes, without a copy.

    Raises:
        ValueError: a wrong shape, not contiguous, or not writable.
    """
    if isinstance(array, (list, tuple)):
        if len(array) != count:
            raise ValueError(f"array: expected {count} buffers, one per key, got {len(array)}")
        return [_row(buffer, i, chunk_bytes, writable=writable) for i, buffer in enumerate(array)]
    if hasattr(array, "numpy"):  # a torch tensor, without importing torch
        array = array.numpy()
    if not isinstance(array, np.ndarray):
        raise TypeError(
            "array: expected a numpy array, a CPU torch tensor or a list of buffers, "
            f"got {type(array).__name__}"
        )
    if array.ndim != 2 or not array.flags.c_contiguous:  # noqa: PLR2004
        raise ValueError(
            f"array: expected a C-contiguous array of shape ({count}, {chunk_bytes}), "
            f"got shape {array.shape}"
        )
    view = array.view(np.uint8)
    if view.shape != (count, chunk_bytes):
        raise ValueError(
            f"array: expected {count} rows of {chunk_bytes} bytes, got shape {array.shape} "
            f"of {array.dtype}"
        )
    if writable and not view.flags.writeable:
        raise ValueError("out: the array is read-only")
    return view


def _row(buffer: Any, i: int, chunk_bytes: int, *, writable: bool) -> ByteArray:
    row = np.frombuffer(buffer, np.uint8)
    if len(row) != chunk_bytes:
        raise ValueError(f"array[{i}]: expected {chunk_bytes} bytes, got {len(row)}")
    if writable and not row.flags.writeable:
        raise ValueError(f"out[{i}]: the buffer is read-only")
    return row
