"""Questions to catalogs that may take for ever: asked by threads of their own, one per tier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tierstore.errors import BackendError, TierStoreError
from tierstore.io_pool import Mailbox
from tierstore.tier.secondary import SecondaryTier

__all__ = ["CatalogReader", "PendingAnswer"]

Answer = TypeVar("Answer")

_WAITING_MAX = 64
"""Questions that wait for a catalog; who asks more has no answer."""


@dataclass(slots=True)
class PendingAnswer(Generic[Answer]):
    """What a catalog said so far; its thread writes here."""

    is_done: bool = False
    value: Answer | None = None
    error: TierStoreError | None = None

    def taken(self) -> Answer:
        """Return what it said.

        Raises:
            BackendError: it did not answer in time, or could not be read.
            CatalogError: it is damaged.
        """
        if not self.is_done:
            raise BackendError("its catalog does not answer; check the health of the device")
        if self.error is not None:
            raise self.error
        assert self.value is not None, "an answer without a value"
        return self.value


class CatalogReader:
    """Asks all catalogs side by side. A hung one keeps its thread, and gives no answers.

    One thread calls at a time. The threads start with the first question.
    """

    def __init__(self, secondaries: Sequence[SecondaryTier]) -> None:
        """The tiers stay the caller's to close, after this one."""
        self._secondaries = secondaries
        self._mailboxes: list[Mailbox[Callable[[], None]]] = []

    def ask(self, read: Callable[[SecondaryTier], Answer]) -> list[PendingAnswer[Answer]]:
        """Let every catalog be read; the answers come when they come."""
        if not self._mailboxes:
            self._open()
        answers: list[PendingAnswer[Answer]] = [PendingAnswer() for _ in self._secondaries]
        for mailbox, secondary, answer in zip(
            self._mailboxes, self._secondaries, answers, strict=True
        ):
            mailbox.offer(partial(_answer, read, secondary, answer), _WAITING_MAX)
        return answers

    def close(self, timeout_seconds: float) -> bool:
        """Stop the threads; False: one hangs. Idempotent."""
        have_ended = [mailbox.close(timeout_seconds) for mailbox in self._mailboxes]
        return all(have_ended)

    def _open(self) -> None:
        mailboxes: list[Mailbox[Callable[[], None]]] = [
            Mailbox("tierstore-read", _read_all) for _ in self._secondaries
        ]
        for mailbox in mailboxes:
            mailbox.open()
        self._mailboxes = mailboxes


def _read_all(questions: list[Callable[[], None]]) -> None:
    for question in questions:
        question()


def _answer(
    read: Callable[[SecondaryTier], Answer],
    secondary: SecondaryTier,
    answer: PendingAnswer[Answer],
) -> None:
    try:
        answer.value = read(secondary)
    except TierStoreError as error:
        answer.error = error
    answer.is_done = True
