"""What the data plane asks of a secondary tier's payload store."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tierstore.key import OffloadKey
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = ["Backend", "LostFinder", "PoolRegion", "RecordIo"]

LostFinder: TypeAlias = Callable[[AbstractSet[int]], AbstractSet[int]]
"""`Backend.lost_segments`."""


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """The memory of all slots, for backends that register it with a device (RDMA)."""

    address: int
    """Virtual address of the first byte, a multiple of 4 KiB."""
    length: int
    """In bytes. The memory stays mapped until the backend's `close` has returned."""


@dataclass(frozen=True, slots=True)
class RecordIo:
    """One record to write or read."""

    key: OffloadKey
    place: Place
    slot: memoryview
    """The whole slot: format `B`, writable, page-aligned, whole pages; the payload is its first
    `payload_bytes`. Owned by the caller, who keeps it until the call returns."""


class Backend(Protocol):
    """Payload bytes of one rank in one secondary tier. Blocking; called from I/O threads.

    Thread-safe: calls for different records run side by side. Calls raise nothing but
    `BackendError`, and only where documented. What goes wrong with a record is a `FailureReason`,
    so that one bad record never hides the good ones.
    """

    def open(self) -> None:
        """Make the directories and probe what the file system can do.

        Raises:
            BackendError: the path cannot be used; the message says what to change.
        """

    def write(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Write records with their headers; return the failed ones by index.

        The executor hands over a `RecordBatch`, which has the records as arrays, too.

        In a tier on this machine, records of one extent are adjacent, in order, and complete: an
        extent is written by one call, header page included. A failed extent fails all its records.
        Elsewhere the records of a command are divided anywhere.
        """

    def read(self, records: Sequence[RecordIo]) -> dict[int, FailureReason]:
        """Read records into their slots and verify length, key and checksum.

        Returns the failed ones by index; their slots hold garbage. Adjacent records are read with
        one vectored call. The executor hands over a `RecordBatch`.
        """

    def release(
        self, runs: Sequence[PageRun], empty_segments: Sequence[int]
    ) -> FailureReason | None:
        """Give bytes back to the file system; idempotent."""

    def sync(self) -> None:
        """Flush written payload to the device.

        Raises:
            BackendError: the device refused.
        """

    def lost_segments(self, relied_on: AbstractSet[int] = frozenset()) -> AbstractSet[int]:
        """Return segments that were written or read here and whose bytes are gone; each once.

        Their files were removed, moved, replaced or cut off. Segments that `release` emptied are
        not among them; those that another process emptied may be. Segments in `relied_on` are
        checked too, and watched from now on.

        A flush asks this, file by file. To read all records back would cost a page per extent; to
        forget the whole tier would lose all records for one file.

        Raises:
            BackendError: the device does not tell.
        """

    def close(self) -> None:
        """Release all descriptors; idempotent."""
