"""Payload in LMDB values, one environment per rank.

Simple, two files, good for small chunks and small stores. A value needs adjacent free pages. Pages
that a transaction frees can be used by the next but one, unless a reader still sees them: so reads
are short, and every release ends with two small transactions. This process itself reads the map:
unlike with segment files, a data file that is truncated or unreadable ends the process. A file that
is damaged when it is opened is replaced by an empty one, and its records are absent.
"""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.backend.failure import FailureLog, name_of, reason_of
from tierstore.backend.lmdb.records import (
    PAGE_LIMIT,
    absent_segments,
    age_free_pages,
    copy_record,
    delete_runs,
    put_records,
    read_spans,
    record_keys,
    storable_places,
)
from tierstore.backend.lmdb.shared_env import SharedEnv
from tierstore.backend.protocol import RecordIo
from tierstore.bounded_log import bounded
from tierstore.codec.plain import PlainCodec, ReadBatch, RecordCodec
from tierstore.codec.record import HEADER_BYTES, parse_places
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import (
    BackendCorruptError,
    BackendFullError,
    BackendMapFullError,
    ClosedError,
    TierStoreError,
)
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.transfer import FailureReason, PageRun

__all__ = ["LmdbBackend"]

_logger = bounded(logging.getLogger(__name__))

_REASONS: dict[type[TierStoreError], FailureReason] = {
    BackendFullError: FailureReason.FULL,
    BackendMapFullError: FailureReason.CROWDED,
    BackendCorruptError: FailureReason.CORRUPT,
    ClosedError: FailureReason.CLOSED,
}

_SEEN_MAX = 1 << 16
"""Segments that are remembered; other processes may have emptied most of them."""


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
        self._env = SharedEnv(directory)
        self._seen: dict[int, None] = {}
        """Segments that were written or read, in order."""

    def open(self) -> None:
        """Open or create the environment; idempotent.

        Raises:
            BackendError: it cannot be opened; the message says what to change.
        """
        self._env.open(self._open_env)

    def _open_env(self) -> LmdbEnv:
        env = LmdbEnv.open(
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
        return env

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write records in one transaction, or as many as their codec needs. See `Backend.write`.

        If the map is full, they are written one by one.

        A record whose place is impossible, or whose slot is too short, fails with `LAYOUT`.
        """
        places = parse_places([record.place for record in records])
        fits = storable_places(places, [len(record.slot) for record in records])
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
        fits = storable_places(places, [len(record.slot) for record in records])
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
        db_keys = record_keys(places)
        try:
            with self._env.used() as env:
                for start, stop in read_spans(sizes):
                    with env.read_views() as txn:
                        for position in range(start, stop):
                            found = copy_record(txn, db_keys[position], batch.payloads[position])
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
        bounds += [(segment, 0, PAGE_LIMIT) for segment in empty_segments]
        try:
            with self._env.used() as env:
                try:
                    delete_runs(env, bounds)
                except BackendFullError:
                    # Fewer deletions at once need fewer new pages of the tree.
                    age_free_pages(env)
                    for bound in bounds:
                        delete_runs(env, [bound])
                age_free_pages(env)
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
        with self._env.used() as env:
            env.sync()

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return the segments in a database that is gone. See `Backend.lost_segments`."""
        try:
            with self._env.used() as env:
                if not env.is_lost():
                    absent = absent_segments(env, relied_on - set(self._seen))
                    self._note_seen(relied_on - absent)
                    return absent
        except ClosedError:
            return frozenset()
        with self._lock:
            lost, self._seen = frozenset(self._seen), {}
        return lost | relied_on

    def close(self) -> None:
        """Close the environment when the calls under way have ended; idempotent."""
        self._env.close()

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
            for i, (db_key, payload) in enumerate(zip(record_keys(places), payloads, strict=True))
        ]
        failed: dict[int, FailureReason] = {}
        try:
            with self._env.used() as env:
                try:
                    put_records(env, values)
                except BackendFullError:
                    age_free_pages(env)
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
                put_records(env, [value])
            except BackendFullError as error:
                failed[position] = self._fail("write", error, 1)
        return failed

    def _fail(self, action: str, error: TierStoreError, record_count: int) -> FailureReason:
        foreign = error.__cause__ or error
        # The library's classes say less than its words, of which there are few as well.
        cause = name_of(foreign) if isinstance(foreign, OSError) else str(foreign)
        self._failures.report(action, cause, record_count=record_count)
        return _REASONS.get(type(error), FailureReason.IO_ERROR)
