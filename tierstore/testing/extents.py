"""Records as a backend is asked to write and read them, for the tests of backends."""

import itertools
import mmap
from pathlib import Path

import numpy as np

from tierstore.backend.protocol import Backend, RecordIo
from tierstore.codec.record import PLACE_DTYPE
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = [
    "GARBAGE",
    "SEGMENT_BYTES",
    "SEGMENT_PAGES",
    "Extent",
    "descriptor_count",
    "disk_bytes",
    "write_extent",
]

SEGMENT_BYTES = 1 << 20
SEGMENT_PAGES = SEGMENT_BYTES // PAGE_BYTES
GARBAGE = 0xEE
"""The byte of which slots are full before they are read into."""

_SEQUENCE = itertools.count()


class Extent:
    """Records of one extent with their payload: what a backend is asked to write, then to read."""

    def __init__(
        self,
        count: int,
        payload_bytes: int,
        *,
        segment: int = 0,
        page: int = 0,
        segment_pages: int = SEGMENT_PAGES,
    ) -> None:
        """Make up `count` records at page `page`; no two extents share a key or a payload."""
        number = next(_SEQUENCE)
        hashes = spread_hashes((number, i) for i in range(count))
        self.keys = make_offload_keys(Namespace(b"conforms"), 0, hashes)
        self.segment = segment
        self.page = page
        self.payload_bytes = payload_bytes
        self.slot_bytes = round_up(payload_bytes, PAGE_BYTES)
        self.stride_pages = self.slot_bytes // PAGE_BYTES
        places = np.zeros(count, PLACE_DTYPE)
        places["segment"], places["header_page"] = segment, page
        places["index"] = np.arange(count)
        places["stride_pages"], places["payload_bytes"] = self.stride_pages, payload_bytes
        places["segment_pages"] = segment_pages
        self.places = [Place(place.tobytes()) for place in places]
        random = np.random.default_rng(number)
        self.payloads = [random.bytes(payload_bytes) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def run(self) -> PageRun:
        """All pages of the extent."""
        pages = 1 + len(self) * self.stride_pages
        return PageRun(segment=self.segment, first_page=self.page, page_count=pages)

    def to_write(self) -> list[RecordIo]:
        """Return the records with their payload in slots."""
        records = self.to_read()
        for record, payload in zip(records, self.payloads, strict=True):
            record.slot[: len(payload)] = payload
        return records

    def to_read(self) -> list[RecordIo]:
        """Return the records with garbage in their slots, which lie apart from each other."""
        spacing = self.slot_bytes + PAGE_BYTES
        pool = memoryview(mmap.mmap(-1, spacing * len(self)))
        pool[:] = bytes([GARBAGE]) * len(pool)
        return [
            RecordIo(key, place, pool[i * spacing : i * spacing + self.slot_bytes])
            for i, (key, place) in enumerate(zip(self.keys, self.places, strict=True))
        ]

    def served(self, backend: Backend) -> list[FailureReason | None]:
        """Read all; returns the failures. Asserts that every byte of the others is right."""
        records = self.to_read()
        failed = backend.read(records)
        for i, (record, payload) in enumerate(zip(records, self.payloads, strict=True)):
            if i not in failed:
                assert record.slot[: len(payload)] == payload, f"wrong bytes in record {i}"
        return [failed.get(i) for i in range(len(self))]


def write_extent(backend: Backend, *extents: Extent) -> None:
    """Write extents in one call; none may fail."""
    records = [record for extent in extents for record in extent.to_write()]
    failed = backend.write(records)
    assert failed == {}, f"write failed: {failed}"


def descriptor_count() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def disk_bytes(directory: Path) -> int:
    """Return what `du` says about a directory's files."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files)
