"""Payload that no row names: what a catalog that is started anew finds below its path."""

from collections.abc import Mapping

from tierstore.lmdb_env import Transaction
from tierstore.tier.catalog_schema import (
    Databases,
    PendingRow,
    SegmentRow,
    StateRow,
    segment_key,
    wide_key,
)

__all__ = ["release_orphans"]

_NOBODY = 0
"""An owner who never lives: whoever recovers next takes over what is his."""


def release_orphans(
    txn: Transaction, databases: Databases, state: StateRow, segments: Mapping[int, int]
) -> None:
    """Charge segments, given with their pages on one rank, and let them be released whole.

    Until every rank has given them back they count against the capacity, as all that is evicted.
    """
    if not segments:
        return
    for segment, pages in segments.items():
        row = SegmentRow(
            _NOBODY,
            state.rank_count,
            page_count=pages,
            is_active=0,
            next_page=pages,
            charged_pages=pages,
            pending_pages=pages,
        )
        txn.put(segment_key(segment), row.pack(), db=databases.segments)
    charged_pages = sum(segments.values()) * state.rank_count
    state.charged_pages += charged_pages
    state.pending_pages += charged_pages
    pending = PendingRow(_NOBODY, empty_segments=sorted(segments))
    txn.put(wide_key(state.next_pending), pending.pack(), db=databases.pending)
    state.next_pending += 1
    state.next_segment = max(segments) + 1
