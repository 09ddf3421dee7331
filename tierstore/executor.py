"""The data plane of one device: moves bytes as commanded and reports; decides nothing."""

from collections.abc import Iterable
from typing import Self

from tierstore.config import StoreConfig
from tierstore.layout import CanonicalKVCaches
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.transfer import Command, JobId, TransferDone

__all__ = ["TransferExecutor"]


class TransferExecutor:
    """Owns the pinned pool, the copy engine, the backends and the I/O threads of one rank.

    One thread calls it (the worker's main thread). Every command is answered by exactly one
    `TransferDone` from `poll` or `drain`, whatever happens to its bytes.
    """

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        manifest: Manifest,
        *,
        rank: int,
        rank_count: int,
        caches: CanonicalKVCaches | None,
        counters: Counters,
    ) -> Self:
        """Allocate the pool, open the backends, start the I/O threads.

        A backend that cannot be opened is logged once and answers every command with `IO_ERROR`.
        `caches` is None for embedded use: no GPU blocks, only slots.

        Raises:
            LayoutError: the copy engine cannot address the caches.
        """
        raise NotImplementedError

    def fence(self, job_ids: tuple[JobId, ...]) -> None:
        """Keep the engine's next step from writing before these offloads have left the GPU."""
        raise NotImplementedError

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands; returns at once.

        Offloads read the GPU blocks as of the work that the engine has launched so far, so they
        are submitted after the forward pass, everything else before or after.
        """
        raise NotImplementedError

    def poll(self) -> list[TransferDone]:
        """Return the answers that became known; never blocks."""
        raise NotImplementedError

    def drain(self, timeout_seconds: float) -> list[TransferDone]:
        """Wait until every submitted command is answered or time is up; return the answers."""
        raise NotImplementedError

    def slot_view(self, slot: int, size_bytes: int) -> memoryview:
        """Return the writable bytes of one slot (embedded use)."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish what was accepted, stop the threads, free the pool; idempotent."""
        raise NotImplementedError
