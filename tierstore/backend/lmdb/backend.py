"""Payload in LMDB values, one environment per rank.

    (segment, page)         -> body: as much of the payload as fills whole pages of LMDB
    (segment, page) + 0x01  -> header, and the rest of the payload: a small item in a leaf

A value needs adjacent free pages, and what a transaction frees is free from the next but one on,
if no reader looks at it any more. So reads are short, and every release ends with two small
transactions. Simple, two files, good for small chunks and small stores. The map is read by this
process itself: unlike segment files, a data file that is truncated or unreadable under it ends the
process. A file that is damaged when it is opened is started anew, and its records are absent.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.protocol import RecordIo
from tierstore.bounded_log import bounded
from tierstore.codec.plain import PlainCodec, ReadBatch, RecordCodec
from tierstore.codec.record import EXTENT_RECORDS_MAX, HEADER_BYTES, parse_places
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import (
    BackendCorruptError,
    BackendFullError,
    BackendMapFullError,
    ClosedError,
    TierStoreError,
)
from tierstore.geometry import lmdb_body_bytes
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Cursor, ViewTransaction
from tierstore.transfer import FailureReason, PageRun

__all__ = ["LmdbBackend"]

_logger = bounded(logging.getLogger(__name__))

_REASONS: dict[type[TierStoreError], FailureReason] = {
    BackendFullError: FailureReason.FULL,
    BackendMapFullError: FailureReason.CROWDED,
    BackendCorruptError: FailureReason.CORRUPT,
    ClosedError: FailureReason.CLOSED,
}

_PAGE_LIMIT = 1 << 32
_HEADER_SUFFIX = b"\x01"
_GENERATION_KEY = b"\xff" * 16
"""Behind all records: rewritten where only the number of transactions matters."""

_SEEN_MAX = 1 << 16
"""Segments that are remembered: others may have emptied most of them."""

_DELETE_COUNT_MAX = 1024
"""Items that one transaction deletes: two of each record."""

_READ_BYTES_MAX = 1 << 20
"""Payload that one read transaction copies: as long as it lasts, nothing freed is used again."""


class LmdbBackend:
    """Payload of one rank in one LMDB environment. See `Backend`."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        map_bytes: int,
        durable: bool = False,
        tier: Path | None = None,
        codec: RecordCodec | None = None,
        system: SystemCalls = SYSTEM,
    ) -> None:
        """Describe the backend; `durable` flushes what `write` wrote before it returns.

        `tier` is the path of the tier, marked as one, below which no link is followed. `codec`
        makes and verifies the records (None: with checksums).
        """
        self._system = system
        self._tier = tier
        self._directory = directory
        self._rank = rank
        self._map_bytes = map_bytes
        self._durable = durable
        self._codec = PlainCodec() if codec is None else codec
        self._failures = FailureLog(directory)
        self._lock = threading.Lock()
        self._env: LmdbEnv | None = None
        self._user_count = 0
        self._seen: dict[int, None] = {}
        """Segments that were written or read, in order."""
        self._opened = False

    def open(self) -> None:
        """Open or create the environment; idempotent.

        Raises:
            BackendError: it cannot be opened; the message says what to change.
        """
        with self._lock:
            if self._env is None:
                self._env = LmdbEnv.open(
                    self._directory,
                    map_bytes=self._map_bytes,
                    readahead=True,
                    durable=self._durable,
                    tier=self._tier,
                    system=self._system,
                )
                _logger.info(
                    "lmdb backend open: directory=%s map_bytes=%d", self._directory, self._map_bytes
                )
            self._opened = True

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write records in one transaction, or as many as their codec needs. See `Backend.write`.

        If the map is full, they are written one by one.

        A record whose place is impossible, or whose slot is too short, fails with `LAYOUT`.
        """
        places = parse_places([record.place for record in records])
        fits = _fits(records, places)
        failed = dict.fromkeys(np.flatnonzero(~fits).tolist(), FailureReason.LAYOUT)
        indices = np.flatnonzero(fits).tolist()
        places = places[fits]
        self._note_seen(set(places["segment"].tolist()))
        for start, stop in self._codec.spans([len(records[index].slot) for index in indices]):
            chosen = indices[start:stop]
            refused = self._write_values([records[index] for index in chosen], places[start:stop])
            failed |= {chosen[position]: reason for position, reason in refused.items()}
        return failed

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Copy values to slots in short read transactions, and verify. See `Backend.read`."""
        places = parse_places([record.place for record in records])
        fits = _fits(records, places)
        failed = dict.fromkeys(np.flatnonzero(~fits).tolist(), FailureReason.CORRUPT)
        causes = Counter({"impossible place": len(failed)} if failed else {})
        indices = np.flatnonzero(fits).tolist()
        places = places[fits]
        self._note_seen(set(places["segment"].tolist()))
        sizes = places["payload_bytes"].tolist()
        batch = ReadBatch(
            keys=[records[index].key for index in indices],
            payload_bytes=places["payload_bytes"],
            payloads=[
                records[index].slot[:size] for index, size in zip(indices, sizes, strict=True)
            ],
            rows=np.zeros((len(indices), HEADER_BYTES), np.uint8),
        )
        check = self._codec.check(batch, rank=self._rank)
        db_keys = _db_keys(places)
        try:
            with self._environment() as env:
                for start, stop in _spans(sizes):
                    with env.read_views() as txn:
                        for position in range(start, stop):
                            found = _copy_record(txn, db_keys[position], batch.payloads[position])
                            if found == b"":
                                failed[indices[position]] = FailureReason.CORRUPT
                                causes["payload length"] += 1
                            elif found is not None:
                                batch.rows[position] = np.frombuffer(found, np.uint8)
                    check.examine(start, stop)
        except TierStoreError as error:
            return dict.fromkeys(range(len(records)), self._fail("read", error, len(records)))
        for position in np.flatnonzero(~check.verified()).tolist():
            index = indices[position]
            if index in failed:
                continue
            mismatch = self._codec.explain(
                batch.rows[position].tobytes(),
                batch.payloads[position],
                batch.keys[position],
                rank=self._rank,
            )
            if mismatch is not None:
                failed[index] = mismatch.reason
                causes[mismatch.cause] += 1
        for cause, count in causes.items():
            self._failures.report("read", cause, record_count=count)
        return failed

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Delete the values in the runs and segments, and make their pages usable at once."""
        bounds = [(run.segment, run.first_page, run.first_page + run.page_count) for run in runs]
        bounds += [(segment, 0, _PAGE_LIMIT) for segment in empty_segments]
        try:
            with self._environment() as env:
                try:
                    _delete(env, bounds)
                except BackendFullError:
                    # Fewer deletions at once need fewer new pages of the tree.
                    _age_free_pages(env)
                    for bound in bounds:
                        _delete(env, [bound])
                _age_free_pages(env)
        except TierStoreError as error:
            return self._fail("release", error, 0)
        with self._lock:
            for segment in empty_segments:
                self._seen.pop(segment, None)
        return None

    def sync(self) -> None:
        """Flush everything written.

        Raises:
            BackendError: the device refused.
        """
        with self._environment() as env:
            env.sync()

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return the segments in a database that is gone. See `Backend.lost_segments`."""
        try:
            with self._environment() as env:
                if not env.is_lost():
                    absent = _absent_segments(env, relied_on - set(self._seen))
                    self._note_seen(relied_on - absent)
                    return absent
        except ClosedError:
            return frozenset()
        with self._lock:
            lost, self._seen = frozenset(self._seen), {}
        return lost | relied_on

    def close(self) -> None:
        """Close the environment when the calls under way have ended; idempotent."""
        with self._lock:
            self._opened = False
            self._close_unused()

    def _note_seen(self, segments: AbstractSet[int]) -> None:
        with self._lock:
            for segment in segments:
                self._seen.pop(segment, None)
                self._seen[segment] = None
            while len(self._seen) > _SEEN_MAX:
                del self._seen[next(iter(self._seen))]

    def _write_values(
        self, records: Sequence[RecordIo], places: npt.NDArray[np.void]
    ) -> dict[int, FailureReason]:
        sizes = places["payload_bytes"].tolist()
        try:
            encoded = self._codec.encode(
                [record.key for record in records],
                [record.slot for record in records],
                places["payload_bytes"],
                rank=self._rank,
            )
        except OSError as error:
            self._failures.report("write", name_of(error), record_count=len(records))
            return dict.fromkeys(range(len(records)), reason_of(error))
        headers = encoded.headers.tobytes()
        payloads = [slot[:size] for slot, size in zip(encoded.slots, sizes, strict=True)]
        values = [
            (db_key, headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES], payload)
            for i, (db_key, payload) in enumerate(zip(_db_keys(places), payloads, strict=True))
        ]
        failed: dict[int, FailureReason] = {}
        try:
            with self._environment() as env:
                try:
                    _put(env, values)
                except BackendFullError:
                    _age_free_pages(env)
                    failed = self._write_each(env, values)
                if self._durable:
                    env.sync()
        except TierStoreError as error:
            return dict.fromkeys(range(len(records)), self._fail("write", error, len(records)))
        return failed

    def _write_each(
        self, env: LmdbEnv, values: Sequence[tuple[bytes, bytes, memoryview]]
    ) -> dict[int, FailureReason]:
        """Write records one by one; return those for which no adjacent pages are free."""
        failed: dict[int, FailureReason] = {}
        for position, value in enumerate(values):
            try:
                _put(env, [value])
            except BackendFullError as error:
                failed[position] = self._fail("write", error, 1)
        return failed

    def _fail(self, action: str, error: TierStoreError, record_count: int) -> FailureReason:
        foreign = error.__cause__ or error
        # The library's classes say less than its words, of which there are few as well.
        cause = name_of(foreign) if isinstance(foreign, OSError) else str(foreign)
        self._failures.report(action, cause, record_count=record_count)
        return _REASONS.get(type(error), FailureReason.IO_ERROR)

    @contextmanager
    def _environment(self) -> Iterator[LmdbEnv]:
        """Use the environment; it is not closed before the last use has ended.

        Raises:
            ClosedError: after `close`.
        """
        with self._lock:
            env = self._env
            if env is None or not self._opened:
                raise ClosedError(f"{self._directory}: the backend is closed")
            self._user_count += 1
        try:
            yield env
        except BackendCorruptError as error:
            env.distrust(str(error))
            raise
        finally:
            with self._lock:
                self._user_count -= 1
                self._close_unused()

    def _close_unused(self) -> None:
        if not self._opened and self._user_count == 0 and self._env is not None:
            self._env.close()
            self._env = None


def _put(env: LmdbEnv, values: Sequence[tuple[bytes, bytes, memoryview]]) -> None:
    """Store records, given as database key, header and payload, in one transaction."""
    with env.write() as txn:
        for db_key, header, payload in values:
            body_bytes = lmdb_body_bytes(len(payload))
            txn.put(db_key, payload[:body_bytes])
            txn.put(db_key + _HEADER_SUFFIX, b"".join((header, payload[body_bytes:])))


def _delete(env: LmdbEnv, bounds: Sequence[tuple[int, int, int]]) -> None:
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


def _absent_segments(env: LmdbEnv, segments: AbstractSet[int]) -> AbstractSet[int]:
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


def _age_free_pages(env: LmdbEnv) -> None:
    """Let the next transaction use what the last ones freed, but for what readers look at."""
    env.forget_dead_readers()
    for _ in range(2):
        with env.write() as txn:
            txn.put(_GENERATION_KEY, b"")


def _copy_record(txn: ViewTransaction, db_key: bytes, payload: memoryview) -> bytes | None:
    """Fill `payload` and return the header; None: nothing is there; empty: a length is wrong."""
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


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut records into half-open runs [start, stop) of about `_READ_BYTES_MAX`."""
    start = span_bytes = 0
    for stop, size in enumerate(sizes, 1):
        span_bytes += size
        if span_bytes >= _READ_BYTES_MAX or stop == len(sizes):
            yield start, stop
            start, span_bytes = stop, 0


def _fits(records: Sequence[RecordIo], places: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Say which places can exist and have room in their slots."""
    slot_bytes = np.array([len(record.slot) for record in records], np.int64)
    fits: npt.NDArray[np.bool_] = (
        (places["index"] < EXTENT_RECORDS_MAX)
        & (places["payload_bytes"] > 0)
        & (places["payload_bytes"] <= slot_bytes)
        & (_pages(places) < _PAGE_LIMIT)
    )
    return fits


def _pages(places: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    index = places["index"].astype(np.int64)
    pages: npt.NDArray[np.int64] = places["header_page"] + index * places["stride_pages"]
    return pages


def _db_keys(places: npt.NDArray[np.void]) -> list[bytes]:
    """Return segment and page, both big-endian, so that a run of pages is a range of keys."""
    encoded = (
        (places["segment"].astype(np.uint64) << 32) + _pages(places).astype(np.uint64)
    ).astype(">u8")
    joined = encoded.tobytes()
    return [joined[start : start + 8] for start in range(0, len(joined), 8)]
