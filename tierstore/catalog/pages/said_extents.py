"""What the rows of extents say, of all of them as one array."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.extent_row import ExtentRow
from tierstore.catalog.rows import Databases, RowArray
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import VerifyPace

__all__ = ["ROWS_AT_ONCE", "SAID", "halves", "read_extents"]

ROWS_AT_ONCE = 1024
"""Rows of one step; those of a tier may be too many for the memory."""

SAID = np.dtype([("key", "<u8"), ("live", "<i8"), ("count", "<i8"), ("stride", "<i8")])
"""Key of an extent, its records, those that were written, and the pages of each."""


def read_extents(txn: Transaction, databases: Databases, pace: VerifyPace) -> RowArray:
    """Return what all rows say (`SAID`), in the order of their keys.

    Raises:
        CatalogDamagedError: a row cannot be decoded.
        ClosedError: see `VerifyPace.step`.
    """
    parts = [np.empty(0, SAID)]
    with txn.cursor(db=databases.extents) as cursor:
        rows = iter(cursor)
        while block := list(islice(rows, ROWS_AT_ONCE)):
            said = []
            for key, value in block:
                row = ExtentRow.unpack(value)
                number = int.from_bytes(key[:8], "big")
                said.append((number, row.live_count, row.record_count, row.stride_pages))
            parts.append(np.array(said, SAID))
            pace.step()
    extents = np.concatenate(parts)
    return extents[np.argsort(extents["key"])]


def halves(extents: RowArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return segment and header page of each extent (`SAID`)."""
    keys = extents["key"]
    return (keys >> np.uint64(32)).astype(np.int64), (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
