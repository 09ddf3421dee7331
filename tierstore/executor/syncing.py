"""A tier's payload on its way from the system's memory to its device."""

from dataclasses import dataclass

__all__ = ["PendingSync"]


@dataclass(slots=True)
class PendingSync:
    """What became of it so far; a thread of the tier writes here."""

    is_done: bool = False
    why: str = ""
    """Why it failed; empty: it did not."""
