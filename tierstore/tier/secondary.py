"""The control half of one secondary tier: its catalog, behind a mailbox."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from tierstore.config import SecondaryConfig
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = ["Freed", "Placed", "Refused", "SecondaryEvent", "SecondaryStats", "SecondaryTier"]


@dataclass(frozen=True, slots=True)
class Placed:
    """Places are reserved for these keys of a request; keys already recorded are left out."""

    ticket: int
    keys: tuple[OffloadKey, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No place for a request: it is too large for the tier, or the catalog failed."""

    ticket: int
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes to give back to the file system on every rank; confirm with `released`."""

    release_id: int
    runs: tuple[PageRun, ...]
    empty_segments: tuple[int, ...]


SecondaryEvent = Placed | Refused | Freed


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryStats:
    """A glance at one tier."""

    record_count: int
    payload_bytes: int
    charged_bytes: int
    """Everything on disk that counts against the capacity, the catalog included."""
    capacity_bytes: int
    evicted_count: int


class SecondaryTier:
    """Which keys have a record, where, and in which order they leave.

    Reads (`locate`) are one LMDB read transaction in the calling thread. Everything that writes is
    queued and done by one writer thread per process in batched transactions; its answers are
    collected by `poll`. Several processes may open the same path: they share the catalog, each
    appends to segments of its own, and the capacity holds for all of them together.
    """

    @classmethod
    def open(
        cls, config: SecondaryConfig, manifest: Manifest, *, tier_idx: int, rank_count: int
    ) -> Self:
        """Open or create the catalog, recover what a killed process left, start the writer.

        Raises:
            CatalogError: the catalog cannot be opened; the message says what to do.
            ManifestError: the path holds a manifest of the same namespace with other contents.
            ConfigError: the capacity is too small for the catalog and one segment.
        """
        raise NotImplementedError

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; one read transaction, about 1.5 us per key."""
        raise NotImplementedError

    def request_places(self, ticket: int, keys: Sequence[OffloadKey], payload_bytes: int) -> None:
        """Ask for one place per key, all of `payload_bytes`; answered by `Placed` or `Refused`.

        Evicts in the tier's order as needed; waits (in the queue, not the caller) until the bytes
        of victims were given back. Keys that are recorded or being written are left out.
        """
        raise NotImplementedError

    def commit(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Publish the records of a `Placed`, but for those that could not be written (by index)."""
        raise NotImplementedError

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record one use of each key, tail first: it becomes the last to be evicted."""
        raise NotImplementedError

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records (corrupt, or absent in the file) and free their places."""
        raise NotImplementedError

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep this process from evicting records while they are read (counted)."""
        raise NotImplementedError

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""
        raise NotImplementedError

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has given the bytes back; only now they may be reused."""
        raise NotImplementedError

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call; never blocks."""
        raise NotImplementedError

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the writer has done all that is queued and doable; False: time is up."""
        raise NotImplementedError

    def stats(self) -> SecondaryStats:
        """Count records and bytes."""
        raise NotImplementedError

    def check(self) -> list[str]:
        """Verify the catalog's invariants; return the violations in words (empty: sound)."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish the queue, sync the catalog to the device, stop the writer; idempotent."""
        raise NotImplementedError
