"""What every payload store has to do with records: a suite to inherit from.

class TestMyBackend(BackendConformance):
    def make(self, directory, rank):
        return MyBackend(directory, rank=rank)

    def overwrite(self, directory, header, damaged):
        ...  # put `damaged` in the place of the bytes `header` on disk
"""

import itertools
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.backend.protocol import Backend
from tierstore.codec.record import HEADER_BYTES
from tierstore.io_pool import IoPool
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import (
    GARBAGE,
    SEGMENT_PAGES,
    Extent,
    descriptor_count,
    disk_bytes,
    write_extent,
)
from tierstore.transfer import FailureReason, PageRun, Place

__all__ = ["BackendConformance"]

_SIZES = st.sampled_from([1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 12_288, 20_000])
_LIMITS = settings(
    max_examples=25,
    deadline=None,
    # One body runs for each backend; every example has a directory of its own.
    suppress_health_check=[HealthCheck.differing_executors],
)


class BackendConformance(ABC):
    """Inherit, name the class `Test...`, implement `make` and `overwrite`; pytest does the rest."""

    @abstractmethod
    def make(self, directory: Path, rank: int) -> Backend:
        """Return a backend over `directory`, not yet open."""

    @abstractmethod
    def overwrite(self, directory: Path, original: bytes, damaged: bytes) -> None:
        """Replace the only occurrence of some bytes in the files below a directory.

        The backend is closed meanwhile.
        """

    header_pages = 1
    """Pages in front of the payloads of an extent."""

    def run_of(self, extent: Extent, index: int) -> PageRun:
        """Return the pages of one payload."""
        return PageRun(
            segment=extent.segment,
            first_page=extent.page + self.header_pages + index * extent.stride_pages,
            page_count=extent.stride_pages,
        )

    @contextmanager
    def opened(self, directory: Path, rank: int = 0) -> Iterator[Backend]:
        """Open a backend for a block of code."""
        backend = self.make(directory, rank)
        backend.open()
        try:
            yield backend
        finally:
            backend.close()

    @_LIMITS
    @given(counts=st.lists(st.integers(1, 32), min_size=1, max_size=4), payload_bytes=_SIZES)
    def test_records_come_back_as_they_were(
        self, counts: Sequence[int], payload_bytes: int
    ) -> None:
        """Extents of any length and odd sizes, after a restart, in order and in reverse."""
        extents: list[Extent] = []
        segment, page = 0, 0
        for count in counts:
            extent = Extent(count, payload_bytes)
            if page + extent.run.page_count > SEGMENT_PAGES:
                segment, page = segment + 1, 0
            extents.append(Extent(count, payload_bytes, segment=segment, page=page))
            page += extents[-1].run.page_count
        with tempfile.TemporaryDirectory() as name:
            with self.opened(Path(name)) as backend:
                write_extent(backend, *extents)
                backend.sync()
            with self.opened(Path(name)) as backend:
                for extent in extents[::-1]:
                    assert extent.served(backend) == [None] * len(extent)
                records = [record for extent in extents for record in extent.to_read()]
                assert backend.read(records[::-1]) == {}
                payloads = [payload for extent in extents for payload in extent.payloads]
                for record, payload in zip(records, payloads, strict=True):
                    assert record.slot[: len(payload)] == payload

    @_LIMITS
    @given(chosen=st.sets(st.integers(0, 31), min_size=1), payload_bytes=_SIZES)
    def test_any_records_of_an_extent_are_read_and_their_neighbours_are_not_touched(
        self, chosen: set[int], payload_bytes: int
    ) -> None:
        """A read fills the slots that it was given and no byte beside them."""
        extent = Extent(32, payload_bytes)
        with tempfile.TemporaryDirectory() as name, self.opened(Path(name)) as backend:
            write_extent(backend, extent)
            records = extent.to_read()
            assert backend.read([records[i] for i in sorted(chosen)]) == {}
            for i, record in enumerate(records):
                pool = memoryview(record.slot.obj)
                start = i * (extent.slot_bytes + PAGE_BYTES)
                behind = pool[start + extent.slot_bytes : start + extent.slot_bytes + PAGE_BYTES]
                assert set(behind) == {GARBAGE}, "bytes behind a slot were written"
                if i in chosen:
                    assert record.slot[:payload_bytes] == extent.payloads[i]
                else:
                    assert set(record.slot) == {GARBAGE}, "a slot that was not asked for"

    @_LIMITS
    @given(data=st.data(), payload_bytes=_SIZES)
    def test_a_flipped_bit_is_never_served(self, data: st.DataObject, payload_bytes: int) -> None:
        """Anywhere in a header or payload; the other records of the extent stay readable."""
        extent = Extent(3, payload_bytes)
        victim = data.draw(st.integers(0, 2), label="record")
        in_header = data.draw(st.booleans(), label="in header")
        size = HEADER_BYTES if in_header else payload_bytes
        position = data.draw(st.integers(0, size - 1), label="byte")
        bit = data.draw(st.integers(0, 7), label="bit")
        with tempfile.TemporaryDirectory() as name:
            with self.opened(Path(name)) as backend:
                write_extent(backend, extent)
                backend.sync()
            original = self.header_of(Path(name), extent, victim)
            # A short payload occurs by chance elsewhere, so it is found behind its header.
            if not in_header:
                original = extent.payloads[victim]
                if payload_bytes <= PAGE_BYTES // 2:
                    return
            damaged = bytearray(original)
            damaged[position] ^= 1 << bit
            self.overwrite(Path(name), original, bytes(damaged))
            with self.opened(Path(name)) as backend:
                served = extent.served(backend)
            assert served[victim] is not None, "a damaged record was served"
            assert [reason for i, reason in enumerate(served) if i != victim] == [None, None]

    def header_of(self, directory: Path, extent: Extent, index: int) -> bytes:
        """Find a record's header in the files below a directory."""
        padded = extent.keys[index].ljust(76, b"\0")
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = path.read_bytes()
            found = content.find(b"TSRECORD")
            while found >= 0:
                if content[found + 16 : found + 92] == padded:
                    return content[found : found + HEADER_BYTES]
                found = content.find(b"TSRECORD", found + 1)
        raise AssertionError("the header is not on disk")

    def test_a_key_is_not_served_the_record_of_another(self, tmp_path: Path) -> None:
        """Right bytes under a wrong key are wrong bytes."""
        extent, other = Extent(2, 5000), Extent(2, 5000)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent)
            other.places = extent.places
            assert other.served(backend) == [FailureReason.CORRUPT] * 2
            assert extent.served(backend) == [None] * 2

    def test_the_record_of_another_rank_is_not_served(self, tmp_path: Path) -> None:
        """Directories that were swapped by an operator hold the other half of each chunk."""
        extent = Extent(2, 5000)
        with self.opened(tmp_path, rank=1) as backend:
            write_extent(backend, extent)
        with self.opened(tmp_path, rank=0) as backend:
            assert extent.served(backend) == [FailureReason.CORRUPT] * 2

    def test_a_record_of_another_length_is_not_served(self, tmp_path: Path) -> None:
        """No length on disk is trusted, and none that the caller got wrong."""
        extent, other = Extent(1, 5000), Extent(1, 5001)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent)
            other.keys = extent.keys
            assert other.served(backend) == [FailureReason.CORRUPT]

    def test_a_record_that_was_never_written_is_absent(self, tmp_path: Path) -> None:
        """In a segment that is not there, and in one that is."""
        with self.opened(tmp_path) as backend:
            assert Extent(2, 5000).served(backend) == [FailureReason.ABSENT] * 2
            write_extent(backend, Extent(2, 5000))
            assert Extent(2, 5000, page=64).served(backend) == [FailureReason.ABSENT] * 2

    def test_an_impossible_place_fails_alone(self, tmp_path: Path) -> None:
        """The catalog's disk is not trusted either."""
        extent = Extent(3, 5000)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent)
            extent.places[1] = Place(b"\xff" * 20)
            assert extent.served(backend) == [None, FailureReason.CORRUPT, None]
            extent.places[1] = Place(b"short")
            assert extent.served(backend) == [None, FailureReason.CORRUPT, None]

    def test_released_records_are_absent_and_their_neighbours_stay(self, tmp_path: Path) -> None:
        """Releasing twice is the same as once."""
        extent = Extent(4, 9000)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent)
            for _ in range(2):
                assert backend.release([self.run_of(extent, 1), self.run_of(extent, 2)], []) is None
                assert extent.served(backend) == [
                    None,
                    FailureReason.ABSENT,
                    FailureReason.ABSENT,
                    None,
                ]
            assert backend.release([extent.run], []) is None
            assert extent.served(backend) == [FailureReason.ABSENT] * 4

    def test_a_removed_segment_is_absent(self, tmp_path: Path) -> None:
        """Twice, and another segment stays."""
        extent, other = Extent(4, 9000), Extent(4, 9000, segment=7)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent, other)
            for _ in range(2):
                assert backend.release([], [0]) is None
                assert extent.served(backend) == [FailureReason.ABSENT] * 4
                assert other.served(backend) == [None] * 4

    def test_segments_whose_files_vanish_are_lost_and_released_ones_are_not(
        self, tmp_path: Path
    ) -> None:
        """Whether they were written or only read; each is told of once."""
        directory = tmp_path / "payload"
        directory.mkdir(mode=0o700)
        extents = [Extent(2, 9000, segment=segment) for segment in (0, 3, 7)]
        with self.opened(directory) as backend:
            write_extent(backend, *extents)
            backend.sync()
            assert backend.lost_segments() == set()
        with self.opened(directory) as backend:
            assert extents[0].served(backend) == extents[2].served(backend) == [None, None]
            write_extent(backend, Extent(1, 9000, segment=9))
            assert backend.release([], [7]) is None
            assert backend.lost_segments() == set()
            # Moved in one step: a library that closes its database meanwhile does no harm.
            directory.rename(tmp_path / "aside")
            directory.mkdir(mode=0o700)
            assert backend.lost_segments() == {0, 9}
            assert backend.lost_segments() == set()

    def test_release_of_what_is_not_there_creates_nothing(self, tmp_path: Path) -> None:
        """No file, no bytes."""
        with self.opened(tmp_path) as backend:
            before = sorted(tmp_path.rglob("*"))
            run = PageRun(segment=9, first_page=0, page_count=5)
            assert backend.release([run], [10]) is None
            assert sorted(tmp_path.rglob("*")) == before

    def test_released_bytes_are_free_for_others(self, tmp_path: Path) -> None:
        """Ten times the bytes through the same room: the disk holds no more than one round."""
        with self.opened(tmp_path) as backend:
            sizes = []
            for segment in range(10):
                extent = Extent(8, 60_000, segment=segment)
                write_extent(backend, extent)
                sizes.append(disk_bytes(tmp_path))
                assert backend.release([], [segment]) is None
        assert max(sizes) <= sizes[0] * 4

    def test_readers_beside_releases_see_their_bytes_or_nothing(self, tmp_path: Path) -> None:
        """Four readers, while record after record is released; `served` compares every byte."""
        extents = [Extent(8, 12_288, page=page) for page in range(0, 250, 25)]
        seen: list[FailureReason | None] = []
        errors: list[BaseException] = []
        with self.opened(tmp_path) as backend:
            write_extent(backend, *extents)
            done = threading.Event()
            pool = IoPool(4, "readers")

            def read() -> None:
                try:
                    while not done.is_set():
                        for extent in extents:
                            seen.extend(extent.served(backend))
                except BaseException as error:  # noqa: BLE001 - the test's own thread reports it
                    errors.append(error)

            pool.open()
            for _ in range(4):
                pool.submit_urgent(read)
            for index, extent in itertools.product(range(8), extents):
                assert backend.release([self.run_of(extent, index)], []) is None
            assert backend.release([], [0]) is None
            done.set()
            assert pool.close(30)
            assert errors == []
            for extent in extents:
                assert extent.served(backend) == [FailureReason.ABSENT] * 8
        # A read that overlaps the release of its record may find a part of it; never its bytes.
        assert set(seen) <= {None, FailureReason.ABSENT, FailureReason.CORRUPT}

    def test_a_closed_backend_refuses_and_close_is_idempotent(self, tmp_path: Path) -> None:
        """Nothing is done after close, and no descriptor stays."""
        before = descriptor_count()
        extent = Extent(2, 5000)
        with self.opened(tmp_path) as backend:
            write_extent(backend, extent)
        backend.close()
        assert descriptor_count() == before
        assert backend.write(extent.to_write()) == dict.fromkeys(range(2), FailureReason.CLOSED)
        assert extent.served(backend) == [FailureReason.CLOSED] * 2
        assert backend.release([extent.run], []) is FailureReason.CLOSED

    def test_an_empty_call_does_nothing(self, tmp_path: Path) -> None:
        """No records, no failures."""
        with self.opened(tmp_path) as backend:
            assert backend.write([]) == {}
            assert backend.read([]) == {}
            assert backend.release([], []) is None
