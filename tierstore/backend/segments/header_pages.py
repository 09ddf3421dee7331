"""Header pages in memory: a thread's room for them, and those that were verified.

A read that starts in the middle of an extent needs the header page before it. Reading it each time
would cost a page of I/O for every such read.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from tierstore.codec.record import HEADER_BYTES
from tierstore.layout import PAGE_BYTES

__all__ = ["ROOM_PAGES", "HeaderCache", "HeaderRoom"]

ROOM_PAGES = 64
"""Header pages that a thread has room for: the most extents that one pass of a read touches."""

_CACHED_PAGES_MAX = 1 << 12
"""16 MiB of one tier. Each serves up to 32 records: 8 GiB in chunks of 64 KiB are read in any order
by one call to the device for each."""


class HeaderRoom(threading.local):
    """Page-aligned room for `ROOM_PAGES` header pages, one per thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, ROOM_PAGES * PAGE_BYTES))
        self.rows = np.frombuffer(self._buffer, np.uint8).reshape(-1, HEADER_BYTES)
        """The same bytes, one row per header."""

    def page(self, number: int) -> memoryview:
        """Return one page of the room."""
        return self._buffer[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


class HeaderCache:
    """A bounded LRU of verified header pages by (segment, header page). Thread-safe.

    A stale page does no harm: its checksums or tags do not fit the payload, and the record is read
    again with its header page. Nor does a forged one, where records have tags.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._of_segment: dict[int, set[int]] = {}
        """The header pages of each segment that are cached: a release looks at no others."""

    def get(self, segment: int, header_page: int) -> bytes | None:
        """Return a header page, if it is cached."""
        with self._lock:
            page = self._pages.get((segment, header_page))
            if page is not None:
                self._pages.move_to_end((segment, header_page))
            return page

    def put(self, segment: int, header_page: int, page: bytes) -> None:
        """Cache a header page of which a record was verified; evicts the oldest if need be."""
        with self._lock:
            self._pages[segment, header_page] = page
            self._of_segment.setdefault(segment, set()).add(header_page)
            if len(self._pages) > _CACHED_PAGES_MAX:
                self._drop(*next(iter(self._pages)))

    def drop(self, segment: int, header_page: int) -> None:
        """Forget one header page."""
        with self._lock:
            self._drop(segment, header_page)

    def drop_segments(self, segments: Collection[int]) -> None:
        """Forget all header pages of some segments."""
        with self._lock:
            for segment in segments:
                for header_page in self._of_segment.pop(segment, ()):
                    del self._pages[segment, header_page]

    def _drop(self, segment: int, header_page: int) -> None:
        """Forget one header page, if it is cached; the lock is held."""
        if self._pages.pop((segment, header_page), None) is None:
            return
        pages = self._of_segment[segment]
        pages.remove(header_page)
        if not pages:
            del self._of_segment[segment]
