"""Payload that no row names: of a catalog that is no more, or of a process taken for dead."""

from collections.abc import Mapping

from tierstore.catalog.rows import (
    Databases,
    PendingRow,
    SegmentRow,
    SegmentState,
    StateRow,
    segment_key,
    wide_key,
)
from tierstore.lmdb_env.library import Transaction

__all__ = ["NOBODY", "release_orphans"]

_NO_NAMESPACE = bytes(8)
NOBODY = 0
"""An owner who never lives: whoever recovers next takes over what is his."""


def release_orphans(
    txn: Transaction, databases: Databases, state: StateRow, segments: Mapping[int, int]
) -> bool:
    """Charge the segments without a row, and let them be released whole; return whether any is.

    `segments` are those below the path, listed before this transaction began, with their pages on
    one rank. Until every rank has given them back they count against the capacity, as all that is
    evicted. One that was given back since it was listed is given back again.
    """
    segments = {
        segment: pages
        for segment, pages in segments.items()
        if txn.get(segment_key(segment), db=databases.segments) is None
    }
    if not segments:
        return False
    for segment, pages in segments.items():
        row = SegmentRow(
            NOBODY,
            state.rank_count,
            page_count=pages,
            namespace=_NO_NAMESPACE,
            state=SegmentState.DEAD,  # rows may still name it, which a reset has forgotten
            next_page=pages,
            charged_pages=pages,
            pending_pages=pages,
        )
        txn.put(segment_key(segment), row.pack(), db=databases.segments)
    charged_pages = sum(segments.values()) * state.rank_count
    state.charged_pages += charged_pages
    state.pending_pages += charged_pages
    pending = PendingRow(NOBODY, empty_segments=sorted(segments))
    txn.put(wide_key(state.next_pending), pending.pack(), db=databases.pending)
    state.next_pending += 1
    state.next_segment = max(state.next_segment, max(segments) + 1)
    return True
