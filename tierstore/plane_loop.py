"""The two planes in one process: what carries messages between them, in the caller's thread.

What a call leaves on its way is carried on by `idle_carrier`.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tierstore.clock import Clock
from tierstore.errors import BackendError
from tierstore.metrics import Counters, Metric
from tierstore.tier.reservation import LoadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import Command, Demote, JobId, Load, Release, TransferDone

__all__ = ["DataPlane", "PendingLoad", "PlaneLoop"]

_logger = logging.getLogger(__name__)

_FLUSH_STALL_SECONDS = 60.0
_FAILURES_MAX = 32
"""A device that refuses so many commands in a row, releases tried again among them, is not waited
for: about three seconds, where one that hangs is waited for until time is up."""

_POLL_SECONDS = 0.0005


class DataPlane(Protocol):
    """What the loop asks of a `TransferExecutor`; tests give a stand-in."""

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands; each is answered by `poll`."""

    def poll(self) -> list[TransferDone]:
        """Return the answers since the last call; never blocks."""

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until something was answered, or time is up."""

    def sync(self, tier_indices: Sequence[int], timeout_seconds: float) -> dict[int, str]:
        """Flush payload to the devices; return why not, by tier."""


@dataclass(slots=True)
class PendingLoad:
    """A load from records into slots, and its answers so far."""

    reservation: LoadReservation
    answers: list[TransferDone] = field(default_factory=list)
    """In order: one, or two where the first says of some chunks that they are late. The second may
    come before the caller has looked at the first."""
    is_left: bool = False
    """The caller does not wait for it any more: the loop finishes it."""

    @property
    def done(self) -> TransferDone | None:
        """The answer that the caller waits for, once it is there."""
        return self.answers[0] if self.answers else None


@dataclass(slots=True)
class _Pace:
    """How one tier gets on with what it was told."""

    moved_at: float
    failure_count: int = 0
    stands_still: bool = False
    """It was waited for in vain, and has not moved since."""


class PlaneLoop:
    """Commands from the stack to the executor, answers back; runs in the caller's thread."""

    def __init__(
        self,
        stack: TierStack,
        executor: DataPlane,
        clock: Clock,
        counters: Counters | None = None,
    ) -> None:
        """Connect the planes; both stay the caller's to close."""
        self._stack = stack
        self._executor = executor
        self._clock = clock
        self._counters = Counters() if counters is None else counters
        self._loads: dict[JobId, PendingLoad] = {}
        self._answers: deque[TransferDone] = deque()
        self._tier_of: dict[JobId, int] = {}
        self._paces = [_Pace(clock.seconds()) for _ in stack.secondaries]
        self._failure_count = 0

    def pump(self) -> bool:
        """Carry messages once; True: some command was carried out.

        A failure is no progress: the releases of a dead device are tried and fail for ever.
        """
        commands = self._stack.commands()
        for command in commands:
            if isinstance(command, Demote | Release):
                self._tier_of[command.job_id] = command.tier_idx
        self._executor.submit(commands)
        # An answer that cannot be taken must not take the others with it.
        self._answers.extend(self._executor.poll())
        carried_out = False
        while self._answers:
            done = self._answers.popleft()
            carried_out = done.ok or carried_out
            self._note_pace(done)
            self._take(done)
        return carried_out

    def has_messages(self) -> bool:
        """Return whether there is something to carry now or later, without a further call."""
        return bool(
            self._answers
            or self._loads
            or self._stack.has_work()
            or self._stack.is_healing()
            or any(secondary.has_messages() for secondary in self._stack.secondaries)
        )

    def settle(self, condition: Callable[[], bool], stall_seconds: float) -> bool:
        """Pump until the condition holds; False: the device does not let it.

        Either nothing has moved for `stall_seconds`, or command after command failed.
        """
        moved_at = self._clock.seconds()
        self._failure_count = 0
        while not condition():
            if self.pump():
                moved_at = self._clock.seconds()
            elif (
                self._failure_count > _FAILURES_MAX
                or self._clock.seconds() - moved_at > stall_seconds
            ):
                return False
            else:
                self._executor.wait(_POLL_SECONDS)
        return True

    def settle_tiers(
        self,
        conditions: Mapping[int, Callable[[], bool]],
        stall_seconds: float,
        seconds_max: float = math.inf,
    ) -> set[int]:
        """Pump until the conditions of all tiers hold; return the tiers that do not let it.

        Each tier has its own time, and is given up for itself: what stands still is no reason not
        to wait for what moves, for `seconds_max` in all. A tier that stood still before and has
        not moved since is not waited for again.
        """
        started_at = self._clock.seconds()
        given_up: set[int] = set()
        for pace in self._paces:
            pace.failure_count = 0
        while True:
            # All of them each time: what was carried for one tier may undo what held for another.
            lagging = {i for i, holds in conditions.items() if i not in given_up and not holds()}
            given_up |= {
                i for i in lagging if self._stands_still(i, started_at, stall_seconds, seconds_max)
            }
            if not lagging - given_up:
                return given_up
            if not self.pump():
                self._executor.wait(_POLL_SECONDS)

    def make_room(self, group_idx: int, count: int, need_bytes: int, stall_seconds: float) -> None:
        """Wait until every tier that moves can take `count` new chunks, of `need_bytes` in all.

        Its write queue has room for them, and it has recorded the chunks that they will evict.
        """
        stack = self._stack

        def has_room(tier_idx: int) -> bool:
            cascade = stack.cascades[tier_idx]
            is_free = cascade.room_bytes() >= need_bytes or not cascade.has_work()
            return is_free and stack.demote_victims(tier_idx, group_idx, count) == 0

        conditions = {i: partial(has_room, i) for i in range(len(self._paces))}
        self.settle_tiers(conditions, stall_seconds)

    def record_victims(self, group_idx: int, count: int, stall_seconds: float) -> None:
        """Let what `count` new chunks will evict be recorded first, by every tier that moves."""
        self.make_room(group_idx, count, 0, stall_seconds)

    def start_load(self, reservation: LoadReservation) -> PendingLoad:
        """Fill the slots of a reservation; they are the caller's to read until `finish_load`."""
        load = self._loads[reservation.job_id] = PendingLoad(reservation)
        command = Load(job_id=reservation.job_id, parts=(), promotes=reservation.promotes)
        self._executor.submit([command])
        return load

    def wait_for(self, load: PendingLoad) -> set[int]:
        """Wait for the answer, which the deadline bounds; return the slots that were not filled."""
        while load.done is None:
            if not self.pump():
                self._executor.wait(_POLL_SECONDS)
        slots = [slot for promote in load.reservation.promotes for slot in promote.slots.tolist()]
        return {slots[index] for index in load.done.failed if index < len(slots)}

    def finish_load(self, load: PendingLoad) -> None:
        """Give the slots of an answered load back to the tiers."""
        assert load.answers, "the load is not answered yet"
        del self._loads[load.reservation.job_id]
        first, *late = load.answers
        self._stack.finish_load(load.reservation, first)
        for done in late:
            self._complete(done)

    def leave(self, load: PendingLoad) -> None:
        """Give a load up, answered or not: its slots go back when nobody writes to them."""
        load.is_left = True
        if load.answers and load.reservation.job_id in self._loads:
            self.finish_load(load)

    def finish_left(self) -> None:
        """Wait for the loads that were left, which the deadline bounds: their chunks arrive."""
        while any(load.is_left for load in self._loads.values()):
            if not self.pump():
                self._executor.wait(_POLL_SECONDS)

    def flush(
        self, stall_seconds: float = _FLUSH_STALL_SECONDS, seconds_max: float = math.inf
    ) -> None:
        """Record all that the cascades admit, and flush it to the devices.

        What could not be written before is tried again, once. Every tier is flushed as far as it
        goes, whatever became of the others; it is given up when it has not moved for
        `stall_seconds`, or after `seconds_max`.

        Raises:
            BackendError: chunks in memory are not in a tier that should have them: which tier, how
                many, and why.
        """
        stack = self._stack
        count = len(stack.primary)
        for tier_idx, cascade in enumerate(stack.cascades):
            cascade.begin_retry()
            self._paces[tier_idx].stands_still = False  # who flushes wants to know it now

        def is_flushed(tier_idx: int) -> bool:
            is_asked = stack.demote_coldest(count, tier_idx) == 0
            return is_asked and not stack.cascades[tier_idx].has_work()

        def missing_count(tier_idx: int) -> int:
            held_count = stack.cascades[tier_idx].held_count()
            return max(held_count, stack.demote_coldest(count, tier_idx))

        indices = range(len(self._paces))
        conditions = {i: partial(is_flushed, i) for i in indices}
        given_up = self.settle_tiers(conditions, stall_seconds, seconds_max)
        # Evicted bytes that cannot be given back are no chunks that are missing.
        standing = [i for i in given_up if missing_count(i)]
        moving = [i for i in indices if i not in standing]
        deaf = [i for i in moving if not stack.secondaries[i].wait(stall_seconds)]
        unsynced = self._executor.sync([i for i in moving if i not in deaf], stall_seconds)
        problems: list[str] = []
        for i in indices:
            cascade = stack.cascades[i]
            complaints = cascade.complaints()
            if i in standing:
                complaints.append(
                    f"it refuses, or has not moved for {stall_seconds:g} s, and "
                    f"{missing_count(i)} chunks wait for it"
                )
            if i in deaf:
                complaints.append("its catalog does not answer")
            if i in unsynced:
                complaints.append(unsynced[i])
            if complaints:
                problems.append(f"tier {cascade.name}: {', '.join(complaints)}")
        if problems:
            raise BackendError(
                f"flush: {'; '.join(problems)}. What was not written is in memory only, and tried "
                "again by the next flush"
            )

    def _stands_still(
        self, tier_idx: int, since: float, stall_seconds: float, seconds_max: float
    ) -> bool:
        """Return whether a tier has been waited for long enough, and note it."""
        pace = self._paces[tier_idx]
        now = self._clock.seconds()
        pace.stands_still = (
            pace.stands_still
            or pace.failure_count > _FAILURES_MAX
            or now - max(since, pace.moved_at) > stall_seconds
            or now - since > seconds_max
        )
        return pace.stands_still

    def _note_pace(self, done: TransferDone) -> None:
        self._failure_count = 0 if done.ok else self._failure_count + 1
        tier_idx = self._tier_of.pop(done.job_id, None)
        if tier_idx is None:
            return
        pace = self._paces[tier_idx]
        if done.ok:
            pace.moved_at = self._clock.seconds()
            pace.failure_count = 0
            pace.stands_still = False
        else:
            pace.failure_count += 1

    def _take(self, done: TransferDone) -> None:
        load = self._loads.get(done.job_id)
        if load is None:
            self._complete(done)
            return
        load.answers.append(done)
        if load.is_left:
            self.finish_load(load)

    def _complete(self, done: TransferDone) -> None:
        if not self._stack.complete(done):
            _logger.error("answer to an unknown job: job=%d ok=%s", done.job_id, done.ok)
            self._counters.add(Metric.STRAY_ANSWERS)
