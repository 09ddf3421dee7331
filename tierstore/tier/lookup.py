"""Looking for many records without keeping the engine's step waiting.

A catalog gives the interpreter away with every single key, so a long prefix that is looked up while
other threads compute costs a step many times what the lookups cost. The step asks for a few keys
itself; more of them are looked up by a thread, and the step that asks again finds the answer here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierstore.io_pool import Mailbox
from tierstore.key import OffloadKey
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import Place

__all__ = ["ASKED_AT_ONCE_MAX", "Lookups"]

ASKED_AT_ONCE_MAX = 16
"""Keys that a step looks up itself; about 2 us each."""

_BATCH_KEYS_MAX = 512
"""Keys of one read transaction of the thread."""

_QUEUED_KEYS_MAX = 1 << 16
"""Keys that wait for the thread; whoever asks for more is told to ask again, and not queued."""

_PATIENCE_STEPS = 8
"""A thread that got no turn for so many steps is not waited for: the step looks up all itself."""

_KEPT_STEPS = 32
"""An answer is kept for so many steps at least, twice as many at most: it may have changed."""

Locate = Callable[[Sequence[OffloadKey]], list[Place | None]]


@dataclass(frozen=True, slots=True)
class _Question:
    keys: tuple[OffloadKey, ...]
    reset_count: int
    """Of `Lookups`, when it was asked."""


@dataclass(frozen=True, slots=True)
class _Answer:
    question: _Question
    places: list[Place | None]


class Lookups:
    """Answers of one catalog, a few steps old at most; one thread asks, another looks up.

    What this process evicts is forgotten here. A place may be out of date nevertheless: another
    process evicted its record since. Reading it fails then, which costs the request its hit; the
    same can happen between any lookup and the read.
    """

    def __init__(self, locate: Locate, name: str) -> None:
        """`locate` looks keys up and must not raise; both threads call it."""
        self._locate = locate
        self._mailbox: Mailbox[_Question] = Mailbox(f"lookup-{name}", self._look_up)
        self._answers: deque[_Answer] = deque()
        self._queued: dict[OffloadKey, int] = {}
        """What the thread was asked and did not answer yet, with the number of the step."""
        self._young: dict[OffloadKey, Place | None] = {}
        self._old: dict[OffloadKey, Place | None] = {}
        self._step_count = 0
        self._reset_count = 0

    def open(self) -> None:
        """Start the thread."""
        self._mailbox.open()

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Say of each key whether it is recorded, absent, or (arriving) being looked up."""
        known, unknown = self._known(keys)
        if len(unknown) <= ASKED_AT_ONCE_MAX or self._waits_long(unknown):
            if unknown:
                known.update(zip(unknown, self._locate(unknown), strict=True))
            return [_state(known[key]) for key in keys]
        self._ask(unknown)
        return [_state(known[key]) if key in known else ChunkState.ARRIVING for key in keys]

    def places(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; what is not known is looked up at once."""
        known, unknown = self._known(keys)
        if not known:
            return self._locate(keys)
        if unknown:
            known.update(zip(unknown, self._locate(unknown), strict=True))
        return [known[key] for key in keys]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Drop answers about records that came or went."""
        for known in (self._young, self._old):
            if known:
                for key in keys:
                    known.pop(key, None)

    def reset(self) -> None:
        """Drop all answers, those on their way too."""
        self._reset_count += 1
        self._young, self._old = {}, {}

    def end_step(self) -> None:
        """Let answers grow older."""
        self._step_count += 1
        if self._step_count % _KEPT_STEPS == 0:
            self._young, self._old = {}, self._young

    def close(self, timeout_seconds: float) -> bool:
        """Stop the thread; False: it hangs in its catalog."""
        return self._mailbox.close(timeout_seconds)

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

    def _waits_long(self, unknown: Sequence[OffloadKey]) -> bool:
        asked_at = self._queued.get(unknown[0], self._step_count)
        return self._step_count - asked_at >= _PATIENCE_STEPS

    def _ask(self, keys: Sequence[OffloadKey]) -> None:
        fresh = tuple(key for key in keys if key not in self._queued)
        if len(self._queued) + len(fresh) > _QUEUED_KEYS_MAX:
            return
        self._queued.update(dict.fromkeys(fresh, self._step_count))
        for first in range(0, len(fresh), _BATCH_KEYS_MAX):
            batch = fresh[first : first + _BATCH_KEYS_MAX]
            self._mailbox.put(_Question(batch, self._reset_count))

    def _look_up(self, questions: list[_Question]) -> None:
        for question in questions:
            self._answers.append(_Answer(question, self._locate(question.keys)))

    def _collect(self) -> None:
        while self._answers:
            answer = self._answers.popleft()
            for key in answer.question.keys:
                self._queued.pop(key, None)
            if answer.question.reset_count == self._reset_count:
                self._young.update(zip(answer.question.keys, answer.places, strict=True))


def _state(place: Place | None) -> ChunkState:
    return ChunkState.ABSENT if place is None else ChunkState.RECORDED
