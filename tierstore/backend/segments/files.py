"""The segment files of one rank: created whole, punched in pieces, unlinked when empty."""

import errno
import mmap
import os
import threading
from collections.abc import Set as AbstractSet
from pathlib import Path

from tierstore.backend.segments.open_segments import OpenSegments, Segment
from tierstore.backend.segments.seen_files import SeenFiles
from tierstore.backend.segments.segment_directory import SegmentDirectory
from tierstore.backend.segments.vectored import move_all
from tierstore.device.block_units import UNSUPPORTED
from tierstore.device.system import SystemCalls
from tierstore.native.known_file import KnownFile

__all__ = ["TOO_MANY_OPEN", "SegmentFiles"]

TOO_MANY_OPEN = {errno.EMFILE, errno.ENFILE}
"""Errors that say: there is no descriptor for now."""
_FILE_BYTES_MAX = (1 << 63) - 1
_GIVEN_BACK_MAX = 1 << 14
"""Ranges of absent segments that are remembered at most. Most of these segments were removed by
others, and are never made again."""


class SegmentFiles:
    """Opens, creates, punches and unlinks segment files. Thread-safe.

    No lock is held over I/O, but for the one that makes the creation of segments take turns.
    """

    def __init__(self, directory: Path, *, system: SystemCalls, tier: Path | None = None) -> None:
        """Describe the files; no link is followed below `tier`, the path of the tier."""
        self._directory = SegmentDirectory(directory, system=system, tier=tier)
        self._mapped = False
        self._system = system
        self._flags = os.O_RDWR
        self._lock = threading.Lock()
        self._create_lock = threading.Lock()
        self._given_back: dict[int, list[tuple[int, int]]] = {}
        """Ranges of absent segments, which may be created and allocated whole later."""
        self._open = OpenSegments()
        self._unflushed: set[int] = set()
        self._seen = SeenFiles()

    def open(self, *, direct: bool, mapped: bool) -> None:
        """Open segments with O_DIRECT, or read them through a mapping, from now on."""
        self._flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._mapped = mapped
        self._open.open(mapped=mapped)

    @property
    def calls_the_kernel(self) -> bool:
        """Whether its system calls are those of the kernel, and no test's that let some fail."""
        return type(self._system) is SystemCalls

    def acquire(self, segment: int) -> Segment:
        """Return an existing segment for reading; to be given to `release`.

        Raises:
            OSError: it is not there (ENOENT), or cannot be opened.
        """
        cached = self._open.acquire(segment)
        if cached is not None:
            return cached
        return self._insert(segment, self._open_file(segment, self._flags))

    def acquire_open(self, segment: int) -> Segment | None:
        """Return a segment that is open, without a system call; None: it is not."""
        return self._open.acquire(segment)

    def acquire_known(self, segment: int, segment_bytes: int) -> tuple[Segment, KnownFile] | None:
        """Return an open segment for writing, and its file, which the write must find in its place.

        That is what `acquire_for_write` looks at. Without a system call; None: it is not open.
        """
        held = self._open.acquire(segment)
        if held is None:
            return None
        with self._lock:
            self._unflushed.add(segment)
        return held, held.known_file(self._directory.path_of(segment), segment_bytes)

    def acquire_for_write(self, segment: int, segment_bytes: int, *, offset: int) -> Segment:
        """Return a segment for writing at `offset`, created and allocated from there if need be.

        A cached descriptor is not used if its file was removed, replaced or moved away: its writes
        would be lost, and their blocks would count against no capacity.

        Raises:
            OSError: it cannot be created or opened; on ENOSPC nothing of a new segment stays.
        """
        try:
            held = self.acquire(segment)
        except FileNotFoundError:
            held = self._create(segment, segment_bytes, offset)
        else:
            status = self._directory.find(segment)  # one call: each gives the interpreter away
            if status is None or not held.is_whole_file(status, segment_bytes):
                self.release(held)
                self._open.forget(segment)
                held = self._create(segment, segment_bytes, offset)
        with self._lock:
            self._unflushed.add(segment)
        return held

    def release(self, segment: Segment) -> None:
        """End a use; closes the descriptor if the cache no longer holds it."""
        self._open.release(segment)

    def forget_if_unlinked(self, segment: int) -> None:
        """Drop the cached descriptor of a segment whose file was removed."""
        self._open.forget_if_unlinked(segment)

    def forget_unlinked(self) -> None:
        """Drop cached descriptors of files that were removed: a few are looked at by each call."""
        self._open.forget_unlinked()

    def punch(self, segment: int, offset: int, size_bytes: int) -> None:
        """Give a range back to the file system; an absent file has nothing to give for now.

        The range may reach behind the end of the file: the sizes of segments that an earlier run
        left differ from ours.

        Raises:
            OSError: the file system refused.
        """
        try:
            held = self.acquire(segment)
        except IsADirectoryError:
            return  # a directory with content is not ours
        except FileNotFoundError:
            with self._create_lock:
                if not self._directory.has_name(segment):
                    if sum(map(len, self._given_back.values())) < _GIVEN_BACK_MAX:
                        self._given_back.setdefault(segment, []).append((offset, size_bytes))
                    return
            held = self.acquire(segment)
        try:
            self._punch(held.fd, offset, size_bytes)
        finally:
            self.release(held)

    def _punch(self, fd: int, offset: int, size_bytes: int) -> None:
        size_bytes = min(size_bytes, os.fstat(fd).st_size - offset)
        if size_bytes > 0:
            self._system.punch_hole(fd, offset, size_bytes)

    def remove(self, segment: int) -> None:
        """Unlink a segment. Its blocks go first, in case another process has it open.

        If anything else has its name, that is removed without a change of its content.

        Raises:
            OSError: the file system refused.
        """
        try:
            self._empty(segment)
            self._directory.unlink(segment)
        except (FileNotFoundError, IsADirectoryError):
            return
        finally:
            self._open.forget(segment)
            with self._create_lock:
                self._given_back.pop(segment, None)  # an empty segment is never made again
            with self._lock:
                self._unflushed.discard(segment)
            self._seen.forget(segment)

    def _empty(self, segment: int) -> None:
        try:
            self.punch(segment, 0, _FILE_BYTES_MAX)
        except OSError as error:
            # Without holes, what others have open keeps its blocks until they close it.
            if error.errno not in UNSUPPORTED:
                raise

    def take_lost(self, relied_on: AbstractSet[int] = frozenset()) -> set[int]:
        """Return the segments whose file is gone or was cut off since it was opened; each once.

        Of those that are `relied_on` and were not opened yet, the ones without a file.
        """
        lost = self._seen.take_lost(self._directory.opened, relied_on)
        for segment in lost:
            self._open.forget(segment)  # its next use notes the file that it finds
        return lost

    @property
    def unflushed(self) -> list[int]:
        """The segments written since their last `flush`."""
        with self._lock:
            return sorted(self._unflushed)

    def flush(self, segment: int) -> None:
        """Flush one segment to the device; an absent one has nothing to flush.

        Raises:
            OSError: the device refused; the segment stays unflushed.
        """
        with self._lock:
            self._unflushed.discard(segment)
        try:
            held = self.acquire(segment)
        except FileNotFoundError:
            return
        try:
            self._system.flush(held.fd)
        except OSError:
            with self._lock:
                self._unflushed.add(segment)
            raise
        finally:
            self.release(held)

    def read(self, segment: Segment, buffers: list[memoryview], offset: int) -> int:
        """Fill buffers from a segment; returns the bytes read, fewer at the file's end.

        Fewer elsewhere, too, if the device stops there without an error (`reaches`).

        Raises:
            OSError: the device failed.
        """
        mapping = segment.mapping
        size_bytes = sum(map(len, buffers))
        if mapping is None or offset + size_bytes > len(mapping):
            return self.read_unmapped(segment, buffers, offset)
        mapping.madvise(mmap.MADV_WILLNEED, offset, size_bytes)
        return move_all(self._system.copy_mapped, segment.address, buffers, offset)

    def read_unmapped(self, segment: Segment, buffers: list[memoryview], offset: int) -> int:
        """Do as `read`, always by a file read: its errors say what is wrong."""
        return move_all(self._system.preadv, segment.fd, buffers, offset)

    def reaches(self, segment: Segment, end: int) -> bool:
        """Return whether a segment has bytes up to `end`: a read that stopped before has failed.

        Raises:
            OSError: the device does not tell.
        """
        return os.fstat(segment.fd).st_size >= end

    def write(self, segment: Segment, buffers: list[memoryview], offset: int) -> int:
        """Write buffers to a segment; returns the bytes written, fewer only if the device stalls.

        Raises:
            OSError: the device failed, or is full.
        """
        return move_all(self._system.pwritev, segment.fd, buffers, offset)

    def close(self) -> None:
        """Close what is open; descriptors in use are closed by their `release`."""
        self._open.close()

    def _open_file(self, segment: int, flags: int) -> int:
        try:
            return self._directory.open_file(segment, flags)
        except OSError as error:
            if error.errno not in TOO_MANY_OPEN:
                raise
        # What is cached can be opened again; what is asked for now cannot wait.
        self._open.forget_unused()
        return self._directory.open_file(segment, flags)

    def _insert(self, segment: int, fd: int) -> Segment:
        """Put a fresh descriptor into the cache, unless another thread was faster."""
        try:
            opened = Segment(fd, os.fstat(fd), _map(fd) if self._mapped else None)
        except BaseException:
            os.close(fd)
            raise
        self._seen.note(segment, fd)
        self._open.forget_unlinked()
        return self._open.add(segment, opened)

    def _create(self, segment: int, segment_bytes: int, offset: int) -> Segment:
        """Open a segment, creating it or restoring its size; one at a time.

        Pages before `offset` were given out earlier. If their writes failed, they were released and
        are not charged, so nothing is allocated for them; other writes allocate as they go.
        """
        with self._create_lock:
            fd = self._open_file(segment, self._flags | os.O_CREAT)
            size_bytes = os.fstat(fd).st_size
            self._seen.note(segment, fd)
            try:
                if size_bytes < segment_bytes:
                    self._extend(fd, max(size_bytes, offset), segment_bytes)
                for given_back in self._given_back.get(segment, ()):
                    self._punch(fd, *given_back)
            except OSError:
                os.close(fd)
                if size_bytes == 0:
                    self._directory.unlink(segment)
                    self._seen.drop(segment)
                raise
            return self._insert(segment, fd)

    def _extend(self, fd: int, first: int, end: int) -> None:
        try:
            self._system.allocate(fd, first, end - first)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._system.truncate(fd, end)  # blocks come with the bytes, then


def _map(fd: int) -> mmap.mmap | None:
    size_bytes = os.fstat(fd).st_size
    return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) if size_bytes else None
