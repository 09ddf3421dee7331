"""Records whose payload was removed from outside.

They stay in the catalog until a request names them. There may be more of them than one transaction
can take, and most of them are found absent, or evicted, in any case.
"""

from collections.abc import Collection, Sequence

from tierstore.catalog.pages.space import Space
from tierstore.catalog.transaction import CatalogTxn
from tierstore.key import OffloadKey

__all__ = ["LostPayload"]

_RELIED_ON_MAX = 1 << 16
"""Segments to look for at the next flush. Without a flush, earlier ones are forgotten."""


class LostPayload:
    """The parts of segments that were given out before their files were found gone."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        """By segment, the first page that was given out later: from there on it is a new file."""
        self._relied_on: set[int] = set()

    def rely_on(self, segments: Collection[int]) -> None:
        """Note segments whose records were found instead of being written."""
        self._relied_on.update(segments)
        if len(self._relied_on) > _RELIED_ON_MAX:
            self._relied_on = set(segments)

    @property
    def relied_on(self) -> frozenset[int]:
        """The segments to look for; in any thread."""
        return frozenset(self._relied_on)

    def note_looked_for(self, segments: Collection[int]) -> None:
        """Forget segments that the caller remembers now; in any thread."""
        self._relied_on.difference_update(segments)

    def note(self, space: Space, segments: Collection[int]) -> None:
        """Note segments whose files are gone. Those without a row are forgotten."""
        for segment in [*self._ends, *segments]:
            row = space.segments.find(segment)
            if row is None:
                self._ends.pop(segment, None)
            elif segment in segments:
                self._ends[segment] = row.next_page

    def remove_records(self, work: CatalogTxn, keys: Sequence[OffloadKey]) -> None:
        """Remove those of the records whose payload is gone."""
        if self._ends:
            work.remove_before(keys, self._ends)
