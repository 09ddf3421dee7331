"""The table from which the copy kernel reads its runs: rows of (target, source, bytes)."""

import ctypes

import numpy as np
import numpy.typing as npt

from tierstore.dma.gpu.cuda_api import DirectedRuns
from tierstore.transfer import IntArray

__all__ = ["ROW_BYTES", "fill_table", "table_at"]

ROW_BYTES = 24


def table_at(address: int, row_count: int) -> IntArray:
    """View memory of `CudaApi.alloc_host` as a table; the caller keeps the memory."""
    buffer = (ctypes.c_byte * (row_count * ROW_BYTES)).from_address(address)
    table: npt.NDArray[np.int64] = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.int64)
    return table.reshape(row_count, 3)


def fill_table(table: IntArray, runs: DirectedRuns) -> None:
    """Write runs to the first rows of a table."""
    row_count = len(runs)
    table[:row_count, 0] = runs.targets
    table[:row_count, 1] = runs.sources
    table[:row_count, 2] = runs.sizes_bytes
