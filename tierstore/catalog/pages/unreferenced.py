"""Unreferenced segments: payload without a row, of a lost catalog or a process taken for dead."""

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

__all__ = ["NO_OWNER", "release_unreferenced"]

_NO_NAMESPACE = bytes(8)
NO_OWNER = 0
"""The id of an owner that never lives: the next recovery takes over what belongs to it."""


def release_unreferenced(
    txn: Transaction, databases: Databases, state: StateRow, segments: Mapping[int, int]
) -> bool:
    """Give segments without a row one, so that they are released whole; return whether any is.

    `segments` are those below the path, listed before this transaction began, with their pages on
    one rank. They are charged until every rank has given them back, like evicted ones. A segment
    that was given back after it was listed is given back once more, which does no harm.
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
            NO_OWNER,
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
    pending = PendingRow(NO_OWNER, empty_segments=sorted(segments))
    txn.put(wide_key(state.next_pending), pending.pack(), db=databases.pending)
    state.next_pending += 1
    state.next_segment = max(state.next_segment, max(segments) + 1)
    return True
