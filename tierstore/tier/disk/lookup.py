"""Looks records up without letting the engine's step wait for a device.

All lookups are done by one thread (`catalog_reads`). For a few keys the step waits,
for longer than a sound device ever takes. A long prefix is looked up while the step goes on; the
step that asks again finds the answer here. A device that does not answer has no records until it
does.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from tierstore.errors import BackendError, CatalogError, ClosedError
from tierstore.key import OffloadKey
from tierstore.tier.disk.catalog_reads import CatalogReads
from tierstore.tier.pending_read import PendingRead
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import ASKED_AT_ONCE_MAX, STEP_SECONDS_MAX, HiddenListener
from tierstore.tier_events import Committed, Evicted, Placed, SecondaryEvent
from tierstore.transfer import FailureReason, Place

__all__ = ["Lookups"]

# A step waits for the answers about ASKED_AT_ONCE_MAX keys: about 2 us each, and 50 us for the
# thread. A lookup that makes no progress for STEP_SECONDS_MAX hangs in its device: nothing is
# recorded then, and no step waits, until it has ended.

_TURN_SECONDS_MAX = 1.0
"""Places are waited for so long if the thread makes progress, or gets no turn."""

_BATCH_KEYS_MAX = 512
"""Keys of one read transaction of the thread."""

_QUEUED_KEYS_MAX = 1 << 16
"""Keys that wait for the thread; further ones are not queued, and have to be asked for again."""

_PATIENCE_STEPS = 8
"""The thread is waited for if it got no turn for so many steps."""

_KEPT_STEPS = 32
"""An answer is kept for so many steps at least, twice as many at most: it may have changed."""


Locate = Callable[[Sequence[OffloadKey]], list[Place | None]]
Wait = Callable[[], None]


def _nothing(keys: Sequence[OffloadKey], reason: FailureReason) -> None:
    del keys, reason


@dataclass(slots=True, eq=False)
class _Question:
    keys: tuple[OffloadKey, ...]
    reset_count: int
    """Of `Lookups`, when it was asked."""
    reading: PendingRead[list[Place | None]]
    is_late: bool = False
    """It was waited for as long as `places` waits, without an answer."""


class Lookups:
    """Answers of one catalog, a few steps old at most. One thread asks.

    What this process evicts is forgotten here. A place may be out of date nevertheless: another
    process evicted its record since. Reading it fails then, which costs the request its hit; the
    same can happen between any lookup and the read.
    """

    def __init__(self, locate: Locate, reads: CatalogReads, *, places_seconds_max: float) -> None:
        """`locate` looks keys up, or raises an error of ours; the thread of `reads` calls it.

        `places_seconds_max` bounds for how long `places` waits for a lookup without progress.
        """
        self.on_hidden: HiddenListener = _nothing
        """Called with keys that are said to be absent because they could not be looked up."""
        self._locate = locate
        self._reads = reads
        self._places_seconds_max = places_seconds_max
        self._questions: deque[_Question] = deque()
        """What the thread was asked and has not been looked at yet, in order."""
        self._queued: dict[OffloadKey, int] = {}
        """Their keys, with the number of the step."""
        self._young: dict[OffloadKey, Place | None] = {}
        self._old: dict[OffloadKey, Place | None] = {}
        self._ahead_questions: list[_Question] = []
        """Those that `look_ahead` has asked, until they are answered."""
        self._ahead: list[dict[OffloadKey, Place | None]] = []
        """Their answers, the youngest last, each for one `places`: several callers may have asked
        for one record."""
        self._placed: dict[int, Sequence[OffloadKey]] = {}
        """The keys of tickets that are being written."""
        self._step_count = 0
        self._step_seconds_left = STEP_SECONDS_MAX
        self._reset_count = 0

    @property
    def is_stuck(self) -> bool:
        """Whether a lookup has hung in its device for as long as `places` waits."""
        return self._reads.is_stuck(self._places_seconds_max)

    def _is_slow(self) -> bool:
        """Return whether a lookup takes longer than a step may: nothing is found meanwhile."""
        return self._reads.is_stuck(min(STEP_SECONDS_MAX, self._places_seconds_max))

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return of each key whether it is recorded, absent, or (arriving) being looked up."""
        known, asked = self._known(keys)
        unknown = asked
        if asked and not self._is_slow():
            waits_long = self._waits_long(asked)
            self._ask(asked)
            if len(asked) <= ASKED_AT_ONCE_MAX or waits_long:
                self._wait()
                known, unknown = self._known(keys)
        missing = ChunkState.ARRIVING
        if unknown and self._is_slow():
            missing = ChunkState.ABSENT
            self.on_hidden(unknown, FailureReason.STALLED)
        if len(asked) <= ASKED_AT_ONCE_MAX:
            self.forget(asked)  # they are asked for again as easily, and then it is not outdated
        return [_state(known[key]) if key in known else missing for key in keys]

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Wait | None:
        """Begin to look up what `places` is asked for next, which waits for nothing then.

        Return what waits for the end of that, for a bounded time; any thread may call it. None:
        there is nothing to wait for.
        """
        _, unknown = self._known(keys)
        if not unknown or self.is_stuck:
            return None
        reading = self._reads.ask(partial(self._locate, tuple(unknown)))
        question = _Question(tuple(unknown), self._reset_count, reading)
        self._ahead_questions.append(question)
        return partial(self._wait_ahead, question)

    def places(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; what is not known is looked up, and waited for.

        Nothing is found where that takes too long, nor until that lookup has ended.
        """
        known, unknown = self._known(keys)
        if unknown and (self._ahead or self._ahead_questions):
            unknown = self._take_ahead(known, unknown)
        if unknown:
            known.update(zip(unknown, self._look_up(unknown), strict=True))
        return [known.get(key) for key in keys]

    def _look_up(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        if not self.is_stuck:
            reading = self._reads.ask(partial(self._locate, tuple(keys)))
            self._wait_for_places(reading)
            if reading.is_done:
                return self._answer(reading, keys)
        self.on_hidden(keys, FailureReason.STALLED)
        return [None] * len(keys)

    def _answer(
        self, reading: PendingRead[list[Place | None]], keys: Sequence[OffloadKey]
    ) -> list[Place | None]:
        try:
            return reading.answer()
        except (BackendError, CatalogError, ClosedError):
            self.on_hidden(keys, FailureReason.IO_ERROR)
            return [None] * len(keys)

    def hear(self, events: Iterable[SecondaryEvent]) -> None:
        """Drop answers about records that come or go with events, which are told in order."""
        for event in events:
            if isinstance(event, Evicted):
                self.forget(event.keys)
            elif isinstance(event, Placed):
                if event.keys:
                    self._placed[event.ticket] = event.keys
            elif isinstance(event, Committed):
                self.forget(self._placed.pop(event.ticket, ()))

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Drop answers about records that came or went."""
        for known in (self._young, self._old, *self._ahead):
            if known:
                deque(map(known.pop, keys, repeat(None)), maxlen=0)

    def reset(self) -> None:
        """Drop all answers, those on their way too."""
        self._reset_count += 1
        self._young, self._old, self._ahead = {}, {}, []

    def end_step(self) -> None:
        """Let answers grow older."""
        self._step_seconds_left = STEP_SECONDS_MAX
        self._step_count += 1
        if self._step_count % _KEPT_STEPS == 0:
            self._young, self._old = {}, self._young
            self._ahead = []  # they were not asked for

    def _known(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[dict[OffloadKey, Place | None], Sequence[OffloadKey]]:
        """Return the answers that there are, and the keys without one."""
        self._collect()
        known: dict[OffloadKey, Place | None] = {}
        for answers in (self._old, self._young):
            if answers:
                known.update((key, answers[key]) for key in keys if key in answers)
        return known, [key for key in keys if key not in known] if known else keys

    def _take_ahead(
        self, known: dict[OffloadKey, Place | None], unknown: Sequence[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """Add what was looked up ahead to what is known; return the keys that were not.

        A lookup that was waited for without an answer is not waited for again. One that another
        caller still waits for says nothing: its keys are looked up.
        """
        unanswered: set[OffloadKey] = set()
        questions, self._ahead_questions = self._ahead_questions, []
        for question in questions:
            if not question.reading.is_done:
                self._ahead_questions.append(question)
                if question.is_late:
                    unanswered.update(question.keys)
            elif question.reset_count == self._reset_count:
                places = self._answer(question.reading, question.keys)
                self._ahead.append(dict(zip(question.keys, places, strict=True)))
        missing = unknown
        for answers in self._ahead[::-1]:
            if answers.keys() == set(missing):
                known.update(answers)
                answers.clear()
                missing = ()
                break
            known.update((key, answers.pop(key)) for key in missing if key in answers)
            missing = [key for key in missing if key not in known]
        self._ahead = [answers for answers in self._ahead if answers]
        self.on_hidden([key for key in missing if key in unanswered], FailureReason.STALLED)
        return [key for key in missing if key not in unanswered]

    def _wait_ahead(self, question: _Question) -> None:
        self._wait_for_places(question.reading)
        question.is_late = not question.reading.is_done

    def _wait_for_places(self, reading: PendingRead[list[Place | None]]) -> None:
        seconds = max(self._places_seconds_max, _TURN_SECONDS_MAX)
        self._reads.wait(reading, seconds, self._places_seconds_max)

    def _waits_long(self, unknown: Sequence[OffloadKey]) -> bool:
        asked_at = self._queued.get(unknown[0], self._step_count)
        return self._step_count - asked_at >= _PATIENCE_STEPS

    def _ask(self, keys: Sequence[OffloadKey]) -> None:
        fresh = tuple(dict.fromkeys(key for key in keys if key not in self._queued))
        if len(self._queued) + len(fresh) > _QUEUED_KEYS_MAX:
            return
        self._queued.update(dict.fromkeys(fresh, self._step_count))
        for first in range(0, len(fresh), _BATCH_KEYS_MAX):
            batch = fresh[first : first + _BATCH_KEYS_MAX]
            reading = self._reads.ask(partial(self._locate, batch))
            self._questions.append(_Question(batch, self._reset_count, reading))

    def _wait(self) -> None:
        """Wait until all questions are answered, for what is left of the step's time."""
        if not self._questions or self._step_seconds_left <= 0:
            return
        began_at = time.monotonic()
        self._reads.wait(self._questions[-1].reading, self._step_seconds_left)
        self._step_seconds_left -= time.monotonic() - began_at

    def _collect(self) -> None:
        while self._questions and self._questions[0].reading.is_done:
            question = self._questions.popleft()
            for key in question.keys:
                self._queued.pop(key, None)
            if question.reset_count == self._reset_count:
                places = self._answer(question.reading, question.keys)
                self._young.update(zip(question.keys, places, strict=True))


def _state(place: Place | None) -> ChunkState:
    return ChunkState.ABSENT if place is None else ChunkState.RECORDED
