"""Questions to catalogs that may never be answered: each tier has a thread that asks them.

Those of a tier itself (`tier.disk.reads`) look chunks up, for which callers wait: a check of a
whole catalog would keep them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tierstore.io_pool import Mailbox
from tierstore.tier.pending_read import PendingRead
from tierstore.tier.secondary import SecondaryTier

__all__ = ["CatalogReader"]

Answer = TypeVar("Answer")

_WAITING_MAX = 64
"""Questions that wait for a catalog; further ones are not answered."""


class CatalogReader:
    """Asks all catalogs side by side. One that hangs holds its thread, and does not answer.

    One thread calls at a time. The threads start with the first question.
    """

    def __init__(self, secondaries: Sequence[SecondaryTier]) -> None:
        """The tiers stay the caller's to close, after this one."""
        self._secondaries = secondaries
        self._mailboxes: list[Mailbox[Callable[[], None]]] = []

    def ask(self, read: Callable[[SecondaryTier], Answer]) -> list[PendingRead[Answer]]:
        """Let every catalog be read; the answers come when they come."""
        if not self._mailboxes:
            self._open()
        readings = [PendingRead(partial(read, secondary)) for secondary in self._secondaries]
        for mailbox, reading in zip(self._mailboxes, readings, strict=True):
            mailbox.offer(reading.run, _WAITING_MAX)
        return readings

    def close(self, timeout_seconds: float) -> bool:
        """Stop the threads; False: one hangs. Idempotent."""
        have_ended = [mailbox.close(timeout_seconds) for mailbox in self._mailboxes]
        return all(have_ended)

    def _open(self) -> None:
        mailboxes = [Mailbox("tierstore-read", _run_all) for _ in self._secondaries]
        for mailbox in mailboxes:
            mailbox.open()
        self._mailboxes = mailboxes


def _run_all(readings: list[Callable[[], None]]) -> None:
    for run in readings:
        run()
