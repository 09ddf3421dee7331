"""Records as items of an LMDB database, and the transactions that store and delete them.

    (segment, page)         -> body: as much of the payload as fills whole pages of LMDB
    (segment, page) + 0x01  -> header, and the rest of the payload: a small item in a leaf

One value for both lost: 16 KiB took five pages of the map, the fifth for the header.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from tierstore.codec.record import EXTENT_RECORDS_MAX, HEADER_BYTES
from tierstore.geometry import lmdb_body_bytes
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Cursor, ViewTransaction

__all__ = [
    "PAGE_LIMIT",
    "absent_segments",
    "age_free_pages",
    "copy_record",
    "delete_runs",
    "put_records",
    "read_spans",
    "record_keys",
    "storable_places",
]

PAGE_LIMIT = 1 << 32
"""Pages of a segment are below this."""

_HEADER_SUFFIX = b"\x01"
_GENERATION_KEY = b"\xff" * 16
"""Behind all records: rewritten where only the number of transactions matters."""

_DELETE_COUNT_MAX = 1024
"""Items that one transaction deletes: two of each record."""

_READ_BYTES_MAX = 1 << 20
"""Payload that one read transaction copies: while it lasts, nothing freed is used again."""


def put_records(env: LmdbEnv, values: Sequence[tuple[bytes, bytes, memoryview]]) -> None:
    """Store records, given as database key, header and payload, in one transaction."""
    with env.write() as txn:
        for db_key, header, payload in values:
            body_bytes = lmdb_body_bytes(len(payload))
            txn.put(db_key, payload[:body_bytes])
            txn.put(db_key + _HEADER_SUFFIX, b"".join((header, payload[body_bytes:])))


def delete_runs(env: LmdbEnv, bounds: Sequence[tuple[int, int, int]]) -> None:
    """Delete the records of page ranges, given as segment, first and end page.

    In transactions of bounded size, for a range may be all that there is, and each page of the
    tree that one of them changes is copied.
    """
    left = list(bounds)
    while left:
        with env.write() as txn, txn.cursor() as cursor:
            budget = _DELETE_COUNT_MAX
            while left and budget:
                budget = _delete_run(cursor, left[-1], budget)
                if budget:
                    left.pop()


def _delete_run(cursor: Cursor, bound: tuple[int, int, int], budget: int) -> int:
    """Delete up to `budget` items of a page range; return what is left of it, 0: go on."""
    segment, first_page, end_page = bound
    end_key = ((segment << 32) + end_page).to_bytes(9, "big")
    found = cursor.set_range(((segment << 32) + first_page).to_bytes(8, "big"))
    while budget and found and b"\0" + cursor.key() < end_key:
        found = cursor.delete() and bool(cursor.key())
        budget -= 1
    return budget


def absent_segments(env: LmdbEnv, segments: AbstractSet[int]) -> AbstractSet[int]:
    """Return the segments of which the database has nothing."""
    if not segments:
        return segments
    with env.read_views() as txn, txn.cursor() as cursor:
        return {
            segment
            for segment in segments
            if not cursor.set_range((segment << 32).to_bytes(8, "big"))
            or int.from_bytes(cursor.key()[:4], "big") != segment
        }


def age_free_pages(env: LmdbEnv) -> None:
    """Let the next transaction use what the last ones freed, but for what readers look at."""
    env.forget_dead_readers()
    for _ in range(2):
        with env.write() as txn:
            txn.put(_GENERATION_KEY, b"")


def copy_record(txn: ViewTransaction, db_key: bytes, payload: memoryview) -> bytes | None:
    """Fill `payload` and return the header; None: it is absent; empty: a length is wrong."""
    body = txn.get(db_key)
    rest = txn.get(db_key + _HEADER_SUFFIX)
    if body is None and rest is None:
        return None
    if body is None or rest is None or len(rest) < HEADER_BYTES:
        return b""
    if len(body) + len(rest) != HEADER_BYTES + len(payload):
        return b""
    payload[: len(body)] = body
    payload[len(body) :] = rest[HEADER_BYTES:]
    return bytes(rest[:HEADER_BYTES])


def read_spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut records into half-open runs [start, stop) of about `_READ_BYTES_MAX`."""
    start = span_bytes = 0
    for stop, size in enumerate(sizes, 1):
        span_bytes += size
        if span_bytes >= _READ_BYTES_MAX or stop == len(sizes):
            yield start, stop
            start, span_bytes = stop, 0


def storable_places(
    places: npt.NDArray[np.void], slot_bytes: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return which places are possible and have payloads that fit their slots."""
    fits: npt.NDArray[np.bool_] = (
        (places["index"] < EXTENT_RECORDS_MAX)
        & (places["payload_bytes"] > 0)
        & (places["payload_bytes"] <= np.array(slot_bytes, np.int64))
        & (_first_pages(places) < PAGE_LIMIT)
    )
    return fits


def record_keys(places: npt.NDArray[np.void]) -> list[bytes]:
    """Return segment and page, both big-endian, so that a run of pages is a range of keys."""
    encoded = (
        (places["segment"].astype(np.uint64) << 32) + _first_pages(places).astype(np.uint64)
    ).astype(">u8")
    joined = encoded.tobytes()
    return [joined[start : start + 8] for start in range(0, len(joined), 8)]


def _first_pages(places: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    index = places["index"].astype(np.int64)
    pages: npt.NDArray[np.int64] = places["header_page"] + index * places["stride_pages"]
    return pages
