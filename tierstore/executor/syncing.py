"""A tier's payload on its way from the system's memory to its device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.backend.protocol import LostFinder

__all__ = ["AfterSync", "PendingSync"]

AfterSync: TypeAlias = Callable[[LostFinder], None]
"""Called when the payload was flushed, or was not, with what finds the segments that were lost
(`Backend.lost_segments`); may raise `BackendError`, which counts as a failure of the flush."""


@dataclass(slots=True)
class PendingSync:
    """One flush to a device; a thread of the tier notes its end here."""

    is_done: bool = False
    why: str = ""
    """Why it failed; empty: it did not."""
