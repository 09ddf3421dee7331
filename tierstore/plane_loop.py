"""The two planes in one process: what carries messages between them, by whose thread.

While a call is under way, its own thread does (`PlaneLoop`). What it leaves on its way is carried
on by a thread that sleeps otherwise (`IdleCarrier`): until the next call, chunks would stay
unwritten and the bytes of evicted ones withheld from other processes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.errors import BackendError
from tierstore.executor import TransferExecutor
from tierstore.io_pool import Mailbox
from tierstore.tier.reservation import LoadReservation
from tierstore.tier.stack import TierStack
from tierstore.transfer import JobId, Load, TransferDone

__all__ = ["IdleCarrier", "PendingLoad", "PlaneLoop"]

_FLUSH_STALL_SECONDS = 60.0
_FAILURES_MAX = 32
"""A device that refuses so many commands in a row, releases tried again among them, is not waited
for: about three seconds, where one that hangs is waited for until time is up."""

_POLL_SECONDS = 0.0005
_IDLE_POLL_SECONDS_MIN = 0.005
_IDLE_POLL_SECONDS_MAX = 0.1
"""Between two looks of the idle carrier: the shorter one as long as something moves."""

_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class PendingLoad:
    """A load from records into slots, and its answer once it is there."""

    reservation: LoadReservation
    done: TransferDone | None = None


class PlaneLoop:
    """Commands from the stack to the executor, answers back; runs in the caller's thread."""

    def __init__(self, stack: TierStack, executor: TransferExecutor, clock: Clock) -> None:
        """Connect the planes; both stay the caller's to close."""
        self._stack = stack
        self._executor = executor
        self._clock = clock
        self._loads: dict[JobId, PendingLoad] = {}
        self._failure_count = 0

    def pump(self) -> bool:
        """Carry messages once; True: some command was carried out.

        A failure is no progress: the releases of a dead device are tried and fail for ever.
        """
        commands = self._stack.commands()
        self._executor.submit(commands)
        answers = self._executor.poll()
        for done in answers:
            load = self._loads.pop(done.job_id, None)
            if load is not None:
                load.done = done
            else:
                known = self._stack.complete(done)
                assert known, f"answer to an unknown job: {done.job_id}"
        carried_out = any(done.ok for done in answers)
        self._failure_count = 0 if carried_out else self._failure_count + len(answers)
        return carried_out

    def has_messages(self) -> bool:
        """Say whether there is something to carry now or later, without a further call."""
        return self._stack.has_work() or any(
            secondary.has_messages() for secondary in self._stack.secondaries
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
        return {slots[index] for index in load.done.failed}

    def finish_load(self, load: PendingLoad) -> None:
        """Give the slots of an answered load back to the tiers."""
        assert load.done is not None, "the load is not answered yet"
        self._stack.finish_load(load.reservation, load.done)

    def flush(self) -> None:
        """Record all that the cascades admit, and flush it to the devices.

        Raises:
            BackendError: a tier refused, or has not moved for a minute.
        """
        stack = self._stack
        count = len(stack.primary)
        settled = self.settle(
            lambda: stack.demote_coldest(count) == 0 and not stack.has_writes(),
            _FLUSH_STALL_SECONDS,
        )
        for secondary in stack.secondaries:
            settled = secondary.wait(_FLUSH_STALL_SECONDS) and settled
        if not settled:
            raise BackendError(
                "flush: a secondary tier refuses, or has not moved for "
                f"{_FLUSH_STALL_SECONDS:.0f} s; chunks that wait for it are in memory only"
            )
        self._executor.sync()


class IdleCarrier:
    """Carries what is on its way after a call has returned, in a thread of its own."""

    def __init__(self, loop: PlaneLoop, lock: threading.RLock) -> None:
        """`lock` is held by every call to the loop."""
        self._loop = loop
        self._lock = lock
        self._is_awake = False
        self._is_stopped = threading.Event()
        self._mailbox: Mailbox[None] = Mailbox("tierstore-idle", self._carry)

    def open(self) -> None:
        """Start the thread."""
        self._mailbox.open()

    def wake(self) -> None:
        """Go on with what is on its way; the caller holds the lock and is about to leave it."""
        if not self._is_awake and not self._is_stopped.is_set() and self._loop.has_messages():
            self._is_awake = True
            self._mailbox.put(None)

    def stop(self) -> None:
        """Carry nothing more; the caller holds the lock."""
        self._is_stopped.set()

    def close(self) -> None:
        """Stop the thread, which does not wait for the lock; idempotent."""
        self.stop()
        self._mailbox.close(_CLOSE_SECONDS)

    def _carry(self, _wakes: list[None]) -> None:
        pause_seconds = _IDLE_POLL_SECONDS_MIN
        while not self._is_stopped.wait(pause_seconds):
            if not self._lock.acquire(blocking=False):
                continue  # a call is under way: its thread carries
            try:
                if self._is_stopped.is_set() or not self._loop.has_messages():
                    self._is_awake = False
                    return
                pause_seconds = (
                    _IDLE_POLL_SECONDS_MIN
                    if self._loop.pump()
                    else min(2 * pause_seconds, _IDLE_POLL_SECONDS_MAX)
                )
            finally:
                self._lock.release()
