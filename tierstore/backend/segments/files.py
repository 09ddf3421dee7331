"""The segment files of one rank: created whole, punched in pieces, unlinked when empty.

    <directory>/<segment:08x>.seg

A bounded number of descriptors is kept open. A descriptor in use is counted, so that it is closed
neither by the cache nor by a removal while another thread still reads through it.
"""

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

from tierstore.backend.inventory import segment_name
from tierstore.backend.segments.seen_files import SeenFiles
from tierstore.device.block_units import UNSUPPORTED
from tierstore.device.directory import Directory
from tierstore.device.marker import open_below
from tierstore.device.system import IOVEC_COUNT_MAX, SystemCalls, buffer_address
from tierstore.errors import BackendError
from tierstore.layout import PAGE_BYTES

__all__ = ["Segment", "SegmentFiles"]

_OPEN_COUNT_MAX = 64
_TOO_MANY_OPEN = {errno.EMFILE, errno.ENFILE}
_FILE_BYTES_MAX = (1 << 63) - 1
_GIVEN_BACK_MAX = 1 << 14
"""Ranges of segments that are not there, of which so many are remembered; most of these segments
were removed by others and never come again."""


class Segment:
    """An open segment file; belongs to `SegmentFiles`, used between `acquire` and `release`."""

    __slots__ = ("address", "cached", "fd", "mapping", "users")

    def __init__(self, fd: int, mapping: mmap.mmap | None) -> None:
        self.fd = fd
        self.mapping = mapping
        self.address = 0 if mapping is None else buffer_address(mapping)
        self.users = 1
        self.cached = False


class SegmentFiles:
    """Opens, creates, punches and unlinks segment files. Thread-safe.

    No lock is held over I/O, but for the one that makes the creation of segments take turns.
    """

    def __init__(self, directory: Path, *, system: SystemCalls, tier: Path | None = None) -> None:
        """Describe the files; no link is followed below `tier`, the path of the tier."""
        self._directory = directory
        self._tier = tier
        self._mapped = False
        self._system = system
        self._flags = os.O_RDWR
        self._lock = threading.Lock()
        self._create_lock = threading.Lock()
        self._given_back: dict[int, list[tuple[int, int]]] = {}
        """Ranges of segments that are not there, which may yet be created and allocated whole."""
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._unflushed: set[int] = set()
        self._seen = SeenFiles()
        self._closed = False

    def open(self, *, direct: bool, mapped: bool) -> None:
        """Open segments with O_DIRECT, or read them through a mapping, from now on."""
        self._flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._mapped = mapped
        self._closed = False

    def acquire(self, segment: int) -> Segment:
        """Return an existing segment for reading; to be given to `release`.

        Raises:
            OSError: it is not there (ENOENT), or cannot be opened.
        """
        with self._lock:
            cached = self._segments.get(segment)
            if cached is not None:
                cached.users += 1
                self._segments.move_to_end(segment)
                return cached
        return self._insert(segment, self._open_file(segment, self._flags))

    def acquire_for_write(self, segment: int, segment_bytes: int, *, offset: int) -> Segment:
        """Return a segment for writing at `offset`, created and allocated from there if need be.

        A cached descriptor whose file somebody removed, replaced or moved away is not used: what it
        writes would be lost, and the blocks would count against no capacity.

        Raises:
            OSError: it cannot be created or opened; on ENOSPC nothing of a new segment stays.
        """
        try:
            held = self.acquire(segment)
        except FileNotFoundError:
            held = self._create(segment, segment_bytes, offset)
        else:
            status = os.fstat(held.fd)
            if not self._lies_there(segment, status) or status.st_size < segment_bytes:
                self.release(held)
                self._forget(segment)
                held = self._create(segment, segment_bytes, offset)
        with self._lock:
            self._unflushed.add(segment)
        return held

    def release(self, segment: Segment) -> None:
        """End a use; closes the descriptor if the cache no longer holds it."""
        with self._lock:
            segment.users -= 1
            unused = segment.users == 0 and not segment.cached
        if unused:
            os.close(segment.fd)

    def forget_unlinked(self) -> None:
        """Drop the cached descriptors of files that somebody removed."""
        with self._lock:
            unlinked = [
                segment
                for segment, cached in self._segments.items()
                if os.fstat(cached.fd).st_nlink == 0
            ]
        for segment in unlinked:
            self._forget(segment)

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
            return  # with content: nothing of ours
        except FileNotFoundError:
            with self._create_lock:
                if not os.path.lexists(self._path(segment)):
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

        What has its name and is no file of ours is removed and not touched otherwise.

        Raises:
            OSError: the file system refused.
        """
        try:
            self._empty(segment)
            self._unlink(segment)
        except (FileNotFoundError, IsADirectoryError):
            return
        finally:
            self._forget(segment)
            with self._create_lock:
                self._given_back.pop(segment, None)  # a segment that is empty never comes again
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
        """Return the segments that had a file which is not there any more, or is cut off; once.

        Of those that are `relied_on` and were not opened yet, the ones without a file.
        """
        lost = self._seen.take_lost(self._opened, relied_on)
        for segment in lost:
            self._forget(segment)  # who uses it again takes note of what he finds
        return lost

    @property
    def unflushed(self) -> list[int]:
        """The segments written since their last `flush`."""
        with self._lock:
            return sorted(self._unflushed)

    def flush(self, segment: int) -> None:
        """Flush one segment to the device; one that is gone has nothing to flush.

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
        return _transfer(self._system.copy_mapped, segment.address, buffers, offset)

    def read_unmapped(self, segment: Segment, buffers: list[memoryview], offset: int) -> int:
        """Do as `read`, always by a file read: its errors say what is wrong."""
        return _transfer(self._system.preadv, segment.fd, buffers, offset)

    def reaches(self, segment: Segment, end: int) -> bool:
        """Return whether a segment has bytes up to `end`: a read that stopped before has failed.

        Raises:
            OSError: nobody can tell.
        """
        return os.fstat(segment.fd).st_size >= end

    def write(self, segment: Segment, buffers: list[memoryview], offset: int) -> int:
        """Write buffers to a segment; returns the bytes written, fewer only if the device stalls.

        Raises:
            OSError: the device failed, or is full.
        """
        return _transfer(self._system.pwritev, segment.fd, buffers, offset)

    def close(self) -> None:
        """Close what is open; descriptors in use are closed by their `release`."""
        with self._lock:
            self._closed = True
            segments = list(self._segments)
        for segment in segments:
            self._forget(segment)

    def _path(self, segment: int) -> Path:
        return self._directory / segment_name(segment)

    def _unlink(self, segment: int) -> None:
        with self._opened() as directory:
            directory.unlink(segment_name(segment))

    def _lies_there(self, segment: int, status: os.stat_result) -> bool:
        try:
            return status.st_nlink == 1 and os.path.samestat(self._path(segment).lstat(), status)
        except FileNotFoundError:
            return False

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[Directory]:
        """Open the directory for as long as the block lasts: who replaces it is followed at once.

        Raises:
            OSError: it cannot be opened, or what is asked of it fails; EISDIR for a directory with
                content in the place of a segment, EPERM for what else belongs to somebody else.
        """
        try:
            with self._open_directory(create=create) as directory:
                yield directory
        except BackendError as error:
            code = errno.EISDIR if isinstance(error.__cause__, OSError) else errno.EPERM
            raise OSError(code, str(error)) from error

    def _open_directory(self, *, create: bool) -> Directory:
        if self._tier is not None or not create:
            return open_below(self._tier, self._directory, create=create, system=self._system)
        # Not its parents: a path that vanished is in use again when somebody makes it.
        with Directory.open(self._directory.parent, system=self._system) as parent:
            return parent.subdirectory(self._directory.name, create=True)

    def _open_file(self, segment: int, flags: int) -> int:
        try:
            return self._open_file_once(segment, flags)
        except OSError as error:
            if error.errno not in _TOO_MANY_OPEN:
                raise
        # What is cached can be opened again; what is asked for now cannot wait.
        self._forget_unused()
        return self._open_file_once(segment, flags)

    def _open_file_once(self, segment: int, flags: int) -> int:
        with self._opened(create=bool(flags & os.O_CREAT)) as directory:
            return directory.open_file(segment_name(segment), flags)

    def _forget_unused(self) -> None:
        with self._lock:
            unused = [number for number, held in self._segments.items() if held.users == 0]
        for segment in unused:
            self._forget(segment)

    def _insert(self, segment: int, fd: int) -> Segment:
        """Put a fresh descriptor into the cache, unless another thread was faster."""
        try:
            opened = Segment(fd, _map(fd) if self._mapped else None)
        except BaseException:
            os.close(fd)
            raise
        self._seen.note(segment, fd)
        self.forget_unlinked()
        unused = []
        with self._lock:
            cached = self._segments.get(segment)
            if cached is not None:
                cached.users += 1
                unused.append(opened.fd)
                opened = cached
            elif not self._closed:
                opened.cached = True
                self._segments[segment] = opened
                if len(self._segments) > _OPEN_COUNT_MAX:
                    _, oldest = self._segments.popitem(last=False)
                    oldest.cached = False
                    if oldest.users == 0:
                        unused.append(oldest.fd)
        for unused_fd in unused:
            os.close(unused_fd)
        return opened

    def _forget(self, segment: int) -> None:
        with self._lock:
            cached = self._segments.pop(segment, None)
            if cached is None:
                return
            cached.cached = False
            unused = cached.users == 0
        if unused:
            os.close(cached.fd)

    def _create(self, segment: int, segment_bytes: int, offset: int) -> Segment:
        """Open a segment, creating it or restoring its size; one at a time.

        What lies before `offset` was given out before. Writes there that failed were released,
        and count no more, so nothing is allocated for them; others bring their own blocks.
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
                    self._unlink(segment)
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


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    target: int,
    buffers: list[memoryview],
    offset: int,
) -> int:
    """Repeat a vectored call until all buffers are moved or nothing moves any more.

    Continues at page boundaries only, as O_DIRECT demands; what lies behind the last one is moved
    once more. Of two calls in turn that move less than a page the second is the last: what stopped
    the first may have passed, or it says now what it was.
    """
    size_bytes = sum(map(len, buffers))
    moved_bytes = 0
    is_stuck = False
    while moved_bytes < size_bytes:
        moved = call(target, buffers[:IOVEC_COUNT_MAX], offset + moved_bytes)
        if moved_bytes + moved == size_bytes:
            return size_bytes
        was_stuck, is_stuck = is_stuck, moved < PAGE_BYTES
        if moved <= 0 or (is_stuck and was_stuck):
            break
        moved -= moved % PAGE_BYTES
        moved_bytes += moved
        buffers = _behind(buffers, moved)
    return moved_bytes


def _behind(buffers: list[memoryview], moved_bytes: int) -> list[memoryview]:
    """Return what is left of the buffers behind their first `moved_bytes`."""
    for position, buffer in enumerate(buffers):
        if moved_bytes < len(buffer):
            return [buffer[moved_bytes:], *buffers[position + 1 :]]
        moved_bytes -= len(buffer)
    return []
