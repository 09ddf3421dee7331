"""What the rows of clusters say, of all of them as one array."""

from itertools import islice

import numpy as np
import numpy.typing as npt

from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.rows import Databases, RowArray
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import VerifyPace

__all__ = ["CLUSTERS_AT_ONCE", "SAID", "halves", "read_clusters"]

CLUSTERS_AT_ONCE = 16
"""Rows of one step, of up to 128 records each; those of a tier may be too many for the memory."""

SAID = np.dtype(
    [
        ("key", "<u8"),
        ("live", "<i8"),
        ("held", "<i8"),
        ("pages", "<i8"),
        ("stride", "<i8"),
        ("payload_bytes", "<i8"),
        ("segment_pages", "<i8"),
        ("count", "<i8"),
        ("extent_records", "<i8"),
    ]
)
"""Number of a cluster, its living records, the pages that they hold with their headers, the pages
that were given out to it; then what its row says."""


def read_clusters(
    txn: Transaction, databases: Databases, header_pages: int, pace: VerifyPace
) -> RowArray:
    """Return what all rows say (`SAID`), in the order of their keys.

    Raises:
        CatalogDamagedError: a row cannot be decoded.
        ClosedError: see `VerifyPace.step`.
    """
    parts = [np.empty(0, SAID)]
    with txn.cursor(db=databases.clusters) as cursor:
        rows = iter(cursor)
        while block := list(islice(rows, CLUSTERS_AT_ONCE)):
            said = []
            for key, value in block:
                row, number = ClusterRow.unpack(value), int.from_bytes(key[:8], "big")
                runs = row.page_runs(number, row.live_bits, 0, header_pages)
                held_pages = sum(page_count for _, _, page_count in runs)
                said.append(
                    (
                        number,
                        row.live_bits.bit_count(),
                        held_pages,
                        row.page_count(header_pages),
                        row.stride_pages,
                        row.payload_bytes,
                        row.segment_pages,
                        row.record_count,
                        row.extent_records,
                    )
                )
            parts.append(np.array(said, SAID))
            pace.step()
    clusters = np.concatenate(parts)
    return clusters[np.argsort(clusters["key"])]


def halves(clusters: RowArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return segment and first page of each cluster (`SAID`)."""
    keys = clusters["key"]
    return (keys >> np.uint64(32)).astype(np.int64), (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
