"""A machine whose time, threads, copies and disk go on step by step, as a seed says.

    SteppedClock     time, some of it per step
    SteppedPool      instead of `IoPool`: tasks run some steps after they were submitted, and some
                     hang in their I/O, while all else goes on
    SteppedMailbox   instead of `Mailbox`: so are items handled
    LateCopyEngine   a `CopyEngine` as that of a GPU: a copy happens steps later, unless fenced
    FailingSystem    the kernel's calls of segment files: hangs, errors and flipped bits

Everything happens in the caller's thread, or while it waits for one that hangs to stand still, so
that a seed is all there is to know about a run.
"""

import errno
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from hanging import HangingTask, stand_still

from tierstore import clock, io_pool
from tierstore.backend.opening import open_backend
from tierstore.config import real_paths
from tierstore.device.system import SystemCalls
from tierstore.dma.host import HostCopyEngine
from tierstore.dma.protocol import ComputeMark, CopyId
from tierstore.embedded import catalog_reader
from tierstore.executor import TransferExecutor
from tierstore.tier.disk import catalog_keeper, catalog_reads

__all__ = [
    "SECONDS_PER_STEP",
    "Chances",
    "LateCopyEngine",
    "Machine",
    "SteppedMailbox",
    "SteppedPool",
]

SECONDS_PER_STEP = 0.05
_SECONDS_PER_QUESTION = 1e-4
_HUNG_STEPS = 100
_LIVE_BYTES_MIN = 256
"""Of any payload: what is behind them may be padding, which nobody reads."""
_TURN_COUNT_MAX = 100_000


@dataclass(slots=True)
class Chances:
    """How likely things are."""

    copy_happens: float = 0.5
    """The next copy of a direction, in a turn."""
    mail_is_read: float = 0.5
    """In a turn."""
    task_waits: float = 0.5
    """Some steps; and what follows, each task and each call."""
    task_hangs: float = 0.0
    """Its first read or write of a segment returns many steps after it was called."""
    read_fails: float = 0.0
    read_flips: float = 0.0


class SteppedClock:
    """Time that passes by steps; a little of it with each question, so that waits do end."""

    def __init__(self) -> None:
        self.now = 1000.0

    def seconds(self) -> float:
        self.now += _SECONDS_PER_QUESTION
        return self.now


@dataclass(order=True)
class _Task:
    is_write: bool
    number: int
    due_step: int = field(compare=False)
    hung_steps: int = field(compare=False)
    run: Callable[[], None] = field(compare=False)


class SteppedPool:
    """Runs tasks in the machine's turns: reads before writes, each in order, some of them late.

    A task that hangs keeps one of the threads busy until its I/O returns.
    """

    def __init__(self, machine: "Machine", thread_count: int, name: str) -> None:
        self._machine = machine
        self._thread_count = thread_count
        self._tasks: list[_Task] = []
        self._hanging: list[HangingTask] = []
        self._number = 0
        machine.turns.append(self.turn)
        machine.undo.callback(self._end_hanging, finish=True)

    def open(self) -> None:
        """Start no thread."""

    def submit_urgent(self, task: Callable[[], None]) -> None:
        self._submit(task, is_write=False)

    def submit_deferred(self, task: Callable[[], None]) -> None:
        self._submit(task, is_write=True)

    def submit_next(self, tasks: Sequence[Callable[[], None]]) -> None:
        for task in tasks:
            self._submit(task, is_write=False)

    def _submit(self, task: Callable[[], None], *, is_write: bool) -> None:
        self._number += 1
        if self._number == 1:  # opens what the others use; its pool's owner waits for it
            task()
            return
        due_step, hung_steps = self._machine.due_step(), self._machine.hung_steps()
        self._tasks.append(_Task(is_write, self._number, due_step, hung_steps, task))

    def turn(self, *, finish: bool) -> bool:
        has_ended = self._end_hanging(finish=finish)
        ready = sorted(t for t in self._tasks if finish or t.due_step <= self._machine.step_count)
        if not finish:
            ready = ready[: self._thread_count - len(self._hanging)]
        for task in ready:
            self._tasks.remove(task)
            if task.hung_steps and not finish:
                self._hang(task)
            else:
                task.run()
        return bool(ready) or has_ended

    def _hang(self, task: _Task) -> None:
        hanging = HangingTask(task.run, self._machine.step_count + task.hung_steps)
        hanging.begin()
        if not hanging.has_ended:
            self._hanging.append(hanging)

    def _end_hanging(self, *, finish: bool) -> bool:
        """Let I/O return whose time has come; return whether there was any."""
        now = self._machine.step_count
        ending = [task for task in self._hanging if finish or task.until_step <= now]
        for task in ending:
            self._hanging.remove(task)
            task.end()
        return bool(ending)

    def close(self, timeout_seconds: float) -> bool:
        while self.turn(finish=True):
            pass
        return True


class SteppedMailbox:
    """Handles what has gathered in the machine's turns, or when somebody waits for it."""

    def __init__(self, machine: "Machine", name: str, handle: Callable[[list[Any]], None]) -> None:
        self._machine = machine
        self._handle = handle
        self._items: list[Any] = []
        machine.turns.append(self.turn)

    def open(self) -> None:
        """Start no thread."""

    def put(self, item: Any) -> None:
        self._items.append(item)

    def offer(self, item: Any, waiting_max: int) -> bool:
        if len(self._items) >= waiting_max:
            return False
        self.put(item)
        return True

    def turn(self, *, finish: bool) -> bool:
        if not self._items or not (
            finish or self._machine.acts(self._machine.chances.mail_is_read)
        ):
            return False
        batch, self._items = self._items, []
        self._handle(batch)
        return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        while self.turn(finish=True):
            pass
        return True

    def close(self, timeout_seconds: float) -> bool:
        return self.wait_idle(timeout_seconds)


class LateCopyEngine:
    """Copies as a GPU does: in order per direction, steps later, or when a fence asks for it.

    Until then a copy has read nothing and written nothing: what is overwritten too early shows.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._engine = HostCopyEngine()
        self._offloads: deque[tuple[CopyId, Callable[[], None]]] = deque()
        self._loads: deque[tuple[CopyId, Callable[[], None]]] = deque()
        self._complete: list[CopyId] = []
        self.fenced_count = 0
        machine.turns.append(self.turn)

    def register(self, *where: Any) -> None:
        self._engine.register(*where)

    def submit_offload(self, copy_id: CopyId, *where: Any) -> None:
        copy = partial(self._engine.submit_offload, copy_id, *where)
        self._offloads.append((copy_id, copy))

    def submit_load(
        self,
        copy_id: CopyId,
        *where: Any,
        after: ComputeMark | None = None,
        urgent: bool = False,
    ) -> None:
        copy = partial(self._engine.submit_load, copy_id, *where)
        self._loads.append((copy_id, copy))

    def mark_compute(self) -> ComputeMark:
        return ComputeMark()

    def turn(self, *, finish: bool) -> bool:
        is_busy = False
        for queue in (self._offloads, self._loads):
            while queue and (finish or self._machine.acts(self._machine.chances.copy_happens)):
                self._copy_first(queue)
                is_busy = True
        return is_busy

    def _copy_first(self, queue: "deque[tuple[CopyId, Callable[[], None]]]") -> None:
        copy_id, copy = queue.popleft()
        copy()
        self._complete.append(copy_id)

    def poll(self) -> list[CopyId]:
        self._engine.poll()
        complete, self._complete = self._complete, []
        return complete

    def take_failed(self) -> list[CopyId]:
        return []

    def fence(self, copy_ids: Sequence[CopyId]) -> None:
        wanted = set(copy_ids)
        while not wanted.isdisjoint(copy_id for copy_id, _ in self._offloads):
            self._copy_first(self._offloads)
            self.fenced_count += 1

    def close(self) -> None:
        self.turn(finish=True)
        self._engine.close()


class FailingSystem(SystemCalls):
    """Reads of segment files that hang or fail, or give bytes with one bit flipped."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _hang(fd)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _hang(fd)
        if self._machine.acts(self._machine.chances.read_fails):
            raise OSError(errno.EIO, "injected fault: read")
        count = super().preadv(fd, buffers, offset)
        if self._machine.acts(self._machine.chances.read_flips):
            buffer = buffers[-1]
            buffer[self._machine.random.randrange(min(len(buffer), _LIVE_BYTES_MIN))] ^= 4
        return count


def _hang(fd: int) -> None:
    """Hang in I/O of a segment; a backend that opens holds a lock over the I/O of its probe."""
    if ".seg" in Path(f"/proc/self/fd/{fd}").readlink().name:
        stand_still()


class Machine:
    """What tierstore runs on: install it before anything of tierstore is opened."""

    def __init__(self, seed: int, chances: Chances) -> None:
        self.random = Random(seed)
        self.chances = chances
        self.clock = SteppedClock()
        self.step_count = 0
        self.turns: list[Callable[..., bool]] = []
        self.copy_engine: LateCopyEngine | None = None
        self.undo = ExitStack()
        """What ends with the run, however it ends."""

    def acts(self, chance: float) -> bool:
        """Draw; a chance of 0 draws nothing."""
        return chance > 0 and self.random.random() < chance

    def due_step(self) -> int:
        """Draw when a task that is submitted now runs."""
        return self.step_count + (
            self.random.randrange(1, 4) if self.acts(self.chances.task_waits) else 0
        )

    def hung_steps(self) -> int:
        """Draw for how long the I/O of a task hangs."""
        return self.random.randrange(1, _HUNG_STEPS) if self.acts(self.chances.task_hangs) else 0

    def turn(self) -> None:
        """Let some of what is waiting go on."""
        for turn in self.turns:
            turn(finish=False)

    def step(self) -> None:
        """Let time pass, and some of what is waiting go on."""
        self.step_count += 1
        self.clock.now += SECONDS_PER_STEP
        self.turn()

    def finish(self) -> None:
        """Let all go on that is waiting."""
        for _ in range(_TURN_COUNT_MAX):
            if not sum(turn(finish=True) for turn in self.turns):
                return
        raise AssertionError("the machine does not come to rest")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this machine's parts in place of the real ones, wherever tierstore names them."""
        from tierstore_vllm.worker import half

        parts = {
            id(io_pool.IoPool): partial(SteppedPool, self),
            id(io_pool.Mailbox): partial(SteppedMailbox, self),
            id(clock.MonotonicClock): lambda: self.clock,
        }
        opener = partial(open_backend, system=FailingSystem(self))
        opening = SimpleNamespace(open=partial(TransferExecutor.open, open_backend=opener))
        with self.undo, ExitStack() as patches:
            for module in self._modules():
                for name, value in list(vars(module).items()):
                    if id(value) in parts:
                        patches.enter_context(patch.object(module, name, parts[id(value)]))
            where = sys.modules[TransferExecutor.__module__]
            patches.enter_context(patch.object(where, "open_copy_engine", self._open_copy_engine))
            patches.enter_context(patch.object(half, "TransferExecutor", opening))
            yield

    def _modules(self) -> list[ModuleType]:
        """Return those that took a part by name; one that is imported later takes the real one.

        Threads whose answers are waited for in real time stay threads.
        """
        kept = (clock, io_pool, catalog_keeper, catalog_reader, catalog_reads, real_paths)
        return [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("tierstore") and module not in kept
        ]

    def _open_copy_engine(self, *_: Any, **__: Any) -> LateCopyEngine:
        self.copy_engine = LateCopyEngine(self)
        return self.copy_engine
