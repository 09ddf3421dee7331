"""The segment files that are open: a bounded cache of descriptors, counted while they are used."""

import errno
import mmap
import os
import resource
import threading
from collections import OrderedDict
from pathlib import Path

from tierstore.device.system import buffer_address
from tierstore.native.known_file import KnownFile

__all__ = ["OpenSegments", "Segment"]

_SHARE_OF_LIMIT = 8
"""One in so many descriptors of the process is for the segments of one tier: it has its own files
to open, and engines open many."""
_OPEN_COUNT_MAX = 1 << 17
"""However high the limit is: all segments of 100 TB, at about 2 KiB of the kernel's for each."""
_MAPPED_COUNT_MAX = 1 << 10
"""Mappings of a process are few, too (vm.max_map_count)."""
_LOOKED_AT = 8
"""Files that are looked at in one turn."""


class Segment:
    """An open segment file; belongs to `OpenSegments`, used between `acquire` and `release`."""

    __slots__ = ("_status", "address", "cached", "fd", "mapping", "users")

    def __init__(self, fd: int, status: os.stat_result, mapping: mmap.mmap | None) -> None:
        self.fd = fd
        self._status = status
        self.mapping = mapping
        self.address = 0 if mapping is None else buffer_address(mapping)
        self.users = 1
        self.cached = False

    def known_file(self, path: Path, size_bytes: int) -> KnownFile:
        """Return what `is_whole_file` compares, for a call that looks at the path itself."""
        return KnownFile.of_segment(path, self._status.st_dev, self._status.st_ino, size_bytes)

    def is_whole_file(self, status: os.stat_result, size_bytes: int) -> bool:
        """Return whether a status is that of this file, which has one name and at least this size.

        A device and an inode are one file's as long as it is open.
        """
        return (
            os.path.samestat(self._status, status)
            and status.st_nlink == 1
            and status.st_size >= size_bytes
        )


class OpenSegments:
    """An LRU cache of open segments; each call is O(1), however many there are. Thread-safe.

    A segment in use is counted: neither the cache nor a removal closes its descriptor while another
    thread still reads through it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._in_turn: OrderedDict[int, None] = OrderedDict()
        """What `forget_unlinked` looks at next: all that are cached, and some that were."""
        self._count_max = _count_max(mapped=False)
        self._closed = False

    def open(self, *, mapped: bool) -> None:
        """Cache what is added from now on, as far as the limit of open files allows."""
        self._count_max = _count_max(mapped=mapped)
        self._closed = False

    def acquire(self, segment: int) -> Segment | None:
        """Return a cached segment, to be given to `release`; None: it is not cached."""
        with self._lock:
            cached = self._segments.get(segment)
            if cached is not None:
                cached.users += 1
                self._segments.move_to_end(segment)
            return cached

    def add(self, segment: int, opened: Segment) -> Segment:
        """Cache a segment that was just opened; return the one to use.

        That is another one if another thread was faster: `opened` is closed then.
        """
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
                self._in_turn[segment] = None
                if len(self._segments) > self._count_max:
                    _, oldest = self._segments.popitem(last=False)
                    oldest.cached = False
                    if oldest.users == 0:
                        unused.append(oldest.fd)
        for unused_fd in unused:
            os.close(unused_fd)
        return opened

    def release(self, segment: Segment) -> None:
        """End a use; closes the descriptor if the cache no longer holds it."""
        with self._lock:
            segment.users -= 1
            unused = segment.users == 0 and not segment.cached
        if unused:
            os.close(segment.fd)

    def forget(self, segment: int) -> None:
        """Drop a segment from the cache; its last user closes it."""
        with self._lock:
            cached = self._segments.pop(segment, None)
            if cached is None:
                return
            cached.cached = False
            unused = cached.users == 0
        if unused:
            os.close(cached.fd)

    def forget_if_unlinked(self, segment: int) -> None:
        """Drop a segment whose file was removed."""
        cached = self.acquire(segment)
        if cached is not None:
            self._forget_if_unlinked(segment, cached)

    def forget_unlinked(self) -> None:
        """Drop segments whose files were removed, of a few whose turn it is.

        Where files have no holes, what is removed keeps its blocks until it is closed; to look at
        all of them each time would take longer the more are open.
        """
        for segment, cached in self._take_turn():
            self._forget_if_unlinked(segment, cached)

    def _take_turn(self) -> list[tuple[int, Segment]]:
        """Return the next segments to look at, each to be released."""
        chosen: list[tuple[int, Segment]] = []
        with self._lock:
            for _ in range(min(_LOOKED_AT, len(self._in_turn))):
                segment, _ = self._in_turn.popitem(last=False)
                cached = self._segments.get(segment)
                if cached is not None:
                    cached.users += 1
                    chosen.append((segment, cached))
            self._in_turn.update((segment, None) for segment, _ in chosen)
        return chosen

    def _forget_if_unlinked(self, segment: int, held: Segment) -> None:
        """Look at a segment that was acquired, and release it."""
        try:
            is_unlinked = os.fstat(held.fd).st_nlink == 0
        except OSError as error:
            is_unlinked = error.errno == errno.ESTALE  # removed over NFS; others tell nothing
        with self._lock:
            if is_unlinked and self._segments.get(segment) is held:
                del self._segments[segment]
                held.cached = False
        self.release(held)

    def forget_unused(self) -> None:
        """Drop the segments that are not in use, for their descriptors."""
        with self._lock:
            unused = [number for number, held in self._segments.items() if held.users == 0]
        for segment in unused:
            self.forget(segment)

    def close(self) -> None:
        """Close what is cached and cache nothing more; what is in use is closed by `release`."""
        with self._lock:
            self._closed = True
            segments = list(self._segments)
        for segment in segments:
            self.forget(segment)


def _count_max(*, mapped: bool) -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count_max = _MAPPED_COUNT_MAX if mapped else _OPEN_COUNT_MAX
    if allowed == resource.RLIM_INFINITY:
        return count_max
    each = 2 if mapped else 1  # a mapping keeps a descriptor of its own
    return max(_LOOKED_AT, min(count_max, allowed // (_SHARE_OF_LIMIT * each)))
