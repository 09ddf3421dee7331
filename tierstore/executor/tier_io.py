"""One secondary tier as the executor sees it: its backend and its threads."""

import threading
from functools import partial
from typing import TYPE_CHECKING

from tierstore.backend.opening import BackendOpener
from tierstore.backend.reopening import ReopeningBackend
from tierstore.catalog.owners import OwnerLocks
from tierstore.codec.places import extent_ends, segments_of
from tierstore.config import SecondaryConfig
from tierstore.executor.progress import ReadGate, TierProgress
from tierstore.executor.splitting import Splitter
from tierstore.io_pool import IoPool
from tierstore.manifest import Manifest
from tierstore.transfer import FailureReason

if TYPE_CHECKING:
    from tierstore.backend.protocol import Backend
    from tierstore.backend.record_batch import RecordBatch

__all__ = ["TierIo"]

_OPEN_SECONDS_MAX = 10.0
"""How long opening a tier waits for its device; a slower one is opened when it answers."""


class TierIo:
    """One secondary tier's backend and its own threads, so that a hung tier stalls no other."""

    def __init__(
        self,
        config: SecondaryConfig,
        manifest: Manifest,
        opener: BackendOpener,
        *,
        rank: int,
        rank_count: int,
        pool_bytes: int,
    ) -> None:
        """Start the threads and open the backend in one of them; the pool has `pool_bytes`.

        Its device is waited for a bounded time.

        Raises:
            ConfigError: the capacity is too small.
        """
        self.config = config
        backend = ReopeningBackend(
            config.name,
            partial(opener, config, manifest, rank=rank, rank_count=rank_count),
            # Below the path of another tier lies what its plug-in keeps there, if anything.
            config.path / f"rank{rank}" if config.is_on_disk else None,
            has_database=config.backend == "lmdb",
        )
        self.backend: Backend = backend
        self._reopening = backend
        self.owners = OwnerLocks(config.path) if config.is_on_disk else None
        held_bytes_max = int(pool_bytes * config.io.breaker.hung_share)  # by reads that hang
        self.splitter = Splitter(
            config.io.threads,
            held_bytes_max,
            # An extent is written by one call, and read with its header page. What a place is
            # elsewhere, only the two halves of that tier know.
            find_cuts=extent_ends if config.is_on_disk else None,
        )
        """How commands are divided into tasks."""
        self.gate = ReadGate(held_bytes_max, config.io.threads)
        self.progress = TierProgress(config.io.threads, config.io.deadline_seconds, self.gate)
        """Guarded by the executor's lock, as is the gate."""
        self.pool = IoPool(config.io.threads, f"tierstore-{config.name}")
        self.pool.open()
        first = _FirstOpening(backend, self.owners)
        self.pool.submit_urgent(first.run)
        try:
            first.wait(_OPEN_SECONDS_MAX)
        except BaseException:
            self.pool.close(_OPEN_SECONDS_MAX)
            raise

    def write(self, owner: int, records: "RecordBatch") -> dict[int, FailureReason]:
        """Write records as long as their places are the owner's; return the failed ones by index.

        Called by the tier's threads, as the backend.
        """
        if self.owners is None:
            return self.backend.write(records)
        failed = self._write_at_once(self.owners, owner, records)
        if failed is not None:
            return failed
        if self.owners.hold(owner):
            failed = self.backend.write(records)
            if self.owners.hold(owner):
                return failed
            self._take_back(records)
        return dict.fromkeys(range(len(records)), FailureReason.IO_ERROR)

    def _write_at_once(
        self, owners: OwnerLocks, owner: int, records: "RecordBatch"
    ) -> dict[int, FailureReason] | None:
        """Do as `write` by one call, which looks at the paths itself; None: nothing was written.

        Each look from here would give the interpreter away.
        """
        known = owners.known_file(owner)
        written = None if known is None else self._reopening.write_while(records, known)
        if written is None:
            return None
        # If another thread gave the lock up meanwhile, the file was open no more, and another one
        # could be taken for it.
        if (written.is_kept or owners.hold(owner)) and owners.known_file(owner) is known:
            return written.failed
        self._take_back(records)
        return dict.fromkeys(range(len(records)), FailureReason.IO_ERROR)

    def _take_back(self, records: "RecordBatch") -> None:
        """Remove what was written while the path was replaced: it is in no account."""
        self.backend.release((), segments_of(records.places))

    def close(self) -> None:
        """Close what the threads used, once they have ended."""
        self.backend.close()
        if self.owners is not None:
            self.owners.close()


class _FirstOpening:
    """The first try to open a backend, in another thread."""

    def __init__(self, backend: ReopeningBackend, owners: OwnerLocks | None) -> None:
        self._backend = backend
        self._owners = owners
        self._error: Exception | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            if self._owners is not None:
                self._owners.look()
            self._backend.open()
        except Exception as error:  # noqa: BLE001 - raised where the tier is opened
            self._error = error
        finally:
            self._is_over.set()

    def wait(self, seconds: float) -> None:
        self._is_over.wait(seconds)
        if self._error is not None:
            raise self._error
