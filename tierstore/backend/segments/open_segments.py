"""The segment files that are open: a bounded cache of descriptors, counted while they are used."""

import mmap
import os
import threading
from collections import OrderedDict

from tierstore.device.system import buffer_address

__all__ = ["OpenSegments", "Segment"]

_OPEN_COUNT_MAX = 64


class Segment:
    """An open segment file; belongs to `OpenSegments`, used between `acquire` and `release`."""

    __slots__ = ("address", "cached", "fd", "mapping", "users")

    def __init__(self, fd: int, mapping: mmap.mmap | None) -> None:
        self.fd = fd
        self.mapping = mapping
        self.address = 0 if mapping is None else buffer_address(mapping)
        self.users = 1
        self.cached = False


class OpenSegments:
    """An LRU cache of open segments. Thread-safe.

    A segment in use is counted: neither the cache nor a removal closes its descriptor while another
    thread still reads through it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._closed = False

    def open(self) -> None:
        """Cache what is added from now on."""
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
                if len(self._segments) > _OPEN_COUNT_MAX:
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

    def forget_unlinked(self) -> None:
        """Drop the segments whose files were removed."""
        with self._lock:
            unlinked = [
                segment
                for segment, cached in self._segments.items()
                if os.fstat(cached.fd).st_nlink == 0
            ]
        for segment in unlinked:
            self.forget(segment)

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
