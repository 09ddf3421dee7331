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

from tierstore.bounded_log import Causes, bounded
from tierstore.clock import Clock
from tierstore.embedded.flush import Flush
from tierstore.embedded.tier_pace import TierPace, TierWait
from tierstore.executor.syncing import AfterSync, PendingSync
from tierstore.key import OffloadKey
from tierstore.metrics import Counters, Metric
from tierstore.tier.reservation import NONE_TRIED, LoadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import Command, Demote, JobId, Load, Release, TransferDone

__all__ = ["DataPlane", "PendingLoad", "PlaneLoop"]

_logger = bounded(logging.getLogger(__name__))

_FLUSH_STALL_SECONDS = 30.0

_POLL_SECONDS = 0.0005
_POLL_SECONDS_MAX = 0.05
"""Between two looks of a call that waits: for each of those that wait, so that many of them look no
more often than one does."""


class DataPlane(Protocol):
    """What the loop asks of a `TransferExecutor`; tests give a stand-in."""

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands; each is answered by `poll`."""

    def poll(self) -> list[TransferDone]:
        """Return the answers since the last call; never blocks."""

    def wait(self, timeout_seconds: float) -> None:
        """Sleep until something was answered, or time is up."""

    def begin_sync(self, tier_idx: int, also: AfterSync) -> PendingSync:
        """Flush a tier's payload to its device, then call `also`; returns at once."""


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

    def failed_slots(self) -> set[int]:
        """Return the slots that were not filled; the load is answered."""
        failed = self.answers[0].failed
        if not failed:
            return set()
        slots = [slot for promote in self.reservation.promotes for slot in promote.slots.tolist()]
        return {slots[index] for index in failed if index < len(slots)}


class PlaneLoop:
    """Commands from the stack to the executor, answers back; runs in the caller's thread.

    Each method but those that say so returns at once. While one waits, others may be called by
    other threads, as far as `step_out` lets them: what both planes hold is consistent then.
    """

    def __init__(
        self,
        stack: TierStack,
        executor: DataPlane,
        clock: Clock,
        counters: Counters | None = None,
        *,
        step_out: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Connect the planes; both stay the caller's to close.

        `step_out` runs what waits, and lets others call meanwhile (None: there are none).
        """
        self._stack = stack
        self._executor = executor
        self._clock = clock
        self._counters = Counters() if counters is None else counters
        self._step_out = step_out
        self._loads: dict[JobId, PendingLoad] = {}
        self._answers: deque[TransferDone] = deque()
        self._orders: dict[JobId, Demote | Release] = {}
        self._pace = TierPace(clock.seconds())
        """Of all tiers, and of the loads."""
        self._resting_count = 0
        self._paces = [TierPace(clock.seconds()) for _ in stack.secondaries]
        self._causes = Causes()

    def pump(self) -> bool:
        """Carry messages once; True: some command was carried out.

        A failure is no progress: the releases of a dead device are tried and fail for ever.
        """
        commands = self._stack.commands()
        for command in commands:
            if isinstance(command, Demote | Release):
                self._orders[command.job_id] = command
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
        """Wait until a condition holds; False: the devices do not let it.

        Either nothing has moved for `stall_seconds`, or command after command failed.
        """
        wait = TierWait.begin(self._pace, self._clock.seconds(), stall_seconds)
        return self._wait_until(condition, lambda: wait.is_vain(self._clock.seconds()))

    def settle_within(self, condition: Callable[[], bool], seconds_max: float) -> bool:
        """Wait until a condition holds; False: time is up."""
        until = self._clock.seconds() + seconds_max
        return self._wait_until(condition, lambda: self._clock.seconds() > until)

    def wait_for_loads(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, or no load is under way: their deadlines bound it."""
        self._wait_until(lambda: not self._loads or condition())

    def look_ahead(
        self, keys: Sequence[OffloadKey], tried: Mapping[OffloadKey, int] = NONE_TRIED
    ) -> None:
        """Wait until the tiers have said which chunks they have, or do not answer in time.

        Whoever asks the stack for these chunks next waits for no tier. `tried`: as
        `Locator.look_ahead`.
        """
        for wait in self._stack.look_ahead(keys, tried):
            if self._step_out is None:
                wait()
            else:
                self._step_out(wait)

    def make_room(
        self,
        group_idx: int,
        count: int,
        need_bytes: int,
        stall_seconds: float,
        is_clear: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until every tier that moves can take `count` new chunks, of `need_bytes` in all.

        Its write queue has room for them, and it has recorded the chunks that they will evict. A
        tier that has not moved for `stall_seconds` is waited for no more until it moves again.
        `is_clear` has to hold, too, but is waited for no longer than that either.
        """
        stack = self._stack
        waits: dict[int, TierWait] = {}
        until = math.inf

        def has_room(tier_idx: int) -> bool:
            cascade = stack.cascades[tier_idx]
            is_free = cascade.room_bytes() >= need_bytes or not cascade.demotes.has_work()
            return is_free and stack.demote_victims(tier_idx, group_idx, count) == 0

        def is_over() -> bool:
            nonlocal until
            # All of them each time: what was carried for one tier may undo what held for another.
            lagging = [i for i in range(len(self._paces)) if not has_room(i)]
            blocked = not is_clear()
            if not lagging and not blocked:
                return True
            now = self._clock.seconds()
            if blocked:
                until = min(until, now + stall_seconds)
            for i in lagging:
                if i not in waits:
                    waits[i] = TierWait.begin(self._paces[i], now, stall_seconds)
                if waits[i].is_vain(now):
                    self._paces[i].stands_still = True
            return (not blocked or now > until) and not any(map(self._is_awaited, lagging))

        self._wait_until(is_over)

    def record_victims(self, group_idx: int, count: int, stall_seconds: float) -> None:
        """Let what `count` new chunks will evict be recorded first, by every tier that moves."""
        self.make_room(group_idx, count, 0, stall_seconds)

    @property
    def load_count(self) -> int:
        """How many loads are under way, of all callers, and of those who have left."""
        return len(self._loads)

    def start_load(self, reservation: LoadReservation) -> PendingLoad:
        """Fill the slots of a reservation; they are the caller's to read until `finish_load`."""
        load = self._loads[reservation.job_id] = PendingLoad(reservation)
        command = Load(job_id=reservation.job_id, parts=(), promotes=reservation.promotes)
        self._executor.submit([command])
        return load

    def wait_for(self, load: PendingLoad) -> set[int]:
        """Wait for the answer, which the deadline bounds; return the slots that were not filled."""
        return self.wait_for_any([load]).failed_slots()

    def wait_for_any(self, loads: Sequence[PendingLoad]) -> PendingLoad:
        """Wait until one of some loads is answered, which the deadlines bound; return it."""
        self.pump()  # enough for what is in memory
        while True:
            for load in loads:
                if load.answers:
                    return load
            self._wait_until(lambda: any(load.answers for load in loads))

    def finish_load(self, load: PendingLoad) -> None:
        """Give the slots of an answered load back to the tiers."""
        assert load.answers, "the load is not answered yet"
        del self._loads[load.reservation.job_id]
        first, *late = load.answers
        self._stack.finish_load(load.reservation, first)
        for done in late:
            self._complete(done)

    def leave(self, load: PendingLoad) -> None:
        """Give a load up, answered or not: its slots go back when nothing writes to them."""
        load.is_left = True
        if load.answers and load.reservation.job_id in self._loads:
            self.finish_load(load)

    def flush(
        self, stall_seconds: float = _FLUSH_STALL_SECONDS, seconds_max: float = math.inf
    ) -> None:
        """Record all that the cascades admit, and flush it to the devices.

        What could not be written before is tried again, once. What others store meanwhile is not
        waited for. Every tier is flushed as far as it goes, whatever became of the others; it is
        given up when it has not moved for `stall_seconds`, or after `seconds_max`.

        Raises:
            BackendError: chunks in memory are not in a tier that should have them, or may not be on
                its device: which tier, how many, and why.
        """
        now = self._clock.seconds()
        waits = [TierWait.begin(pace, now, stall_seconds, seconds_max) for pace in self._paces]
        flush = Flush(self._stack, self._executor.begin_sync, waits)
        self._wait_until(lambda: flush.is_over(self._clock.seconds()))
        flush.raise_complaints()

    def _wait_until(
        self, condition: Callable[[], bool], is_vain: Callable[[], bool] = lambda: False
    ) -> bool:
        """Carry until a condition holds; False: it does not, and to wait any longer is in vain."""
        while not condition():
            if not self.pump():
                if is_vain():
                    return False
                self._rest()
        return True

    def _rest(self) -> None:
        """Sleep until something may have been answered, and let others call meanwhile."""
        self._resting_count += 1
        try:
            seconds = min(self._resting_count * _POLL_SECONDS, _POLL_SECONDS_MAX)
            sleep = partial(self._executor.wait, seconds)
            if self._step_out is None:
                sleep()
            else:
                self._step_out(sleep)
        finally:
            self._resting_count -= 1

    def _is_awaited(self, tier_idx: int) -> bool:
        """Return whether a call waits for a tier at all."""
        return not self._paces[tier_idx].stands_still and self._stack.cascades[tier_idx].is_awaited

    def _note_pace(self, done: TransferDone) -> None:
        order = self._orders.pop(done.job_id, None)
        now = self._clock.seconds()
        self._pace.note(done, order, now)
        if order is not None:
            self._paces[order.tier_idx].note(done, order, now)

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
            if self._causes.is_new("unknown job"):
                _logger.error(
                    "answer to an unknown job (further ones are only counted): job=%d ok=%s",
                    done.job_id,
                    done.ok,
                )
            self._counters.add(Metric.STRAY_ANSWERS)
