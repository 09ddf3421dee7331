"""Header pages that were read and verified, for reads that start in the middle of an extent."""

import threading
from collections import OrderedDict
from collections.abc import Collection

__all__ = ["HeaderCache"]

_PAGE_COUNT_MAX = 256


class HeaderCache:
    """A small LRU of header pages by (segment, header page). Thread-safe.

    A stale page does no harm: its checksums or tags do not fit the payload, and the record is read
    anew. Nor does a forged one, where records have tags.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def get(self, segment: int, header_page: int) -> bytes | None:
        """Return a header page, if it is held."""
        with self._lock:
            page = self._pages.get((segment, header_page))
            if page is not None:
                self._pages.move_to_end((segment, header_page))
            return page

    def put(self, segment: int, header_page: int, page: bytes) -> None:
        """Hold a header page of which a record was verified; the oldest may leave for it."""
        with self._lock:
            self._pages[segment, header_page] = page
            if len(self._pages) > _PAGE_COUNT_MAX:
                self._pages.popitem(last=False)

    def drop(self, segment: int, header_page: int) -> None:
        """Forget one header page."""
        with self._lock:
            self._pages.pop((segment, header_page), None)

    def drop_segments(self, segments: Collection[int]) -> None:
        """Forget all header pages of some segments."""
        with self._lock:
            for place in [place for place in self._pages if place[0] in segments]:
                del self._pages[place]
