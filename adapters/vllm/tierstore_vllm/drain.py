"""Shutdown of an engine whose two halves live in one process: what later steps would have done.

    offloads that ended   -> resident -> places asked for -> demotes -> records published

Each arrow is one message, and vLLM takes no step any more to carry it. With places
reserved before the bytes are there, the worker could finish alone, but they would hold room for
chunks that may never come.
"""

from tierstore.clock import Clock, MonotonicClock
from tierstore_vllm.scheduler import SchedulerHalf
from tierstore_vllm.worker import DRAIN_SECONDS, WorkerHalf

__all__ = ["drain"]

_STALL_SECONDS = 10.0
"""A device that carries out nothing for so long is given up: what else moves has been drained."""


def drain(worker: WorkerHalf, scheduler: SchedulerHalf, *, clock: Clock | None = None) -> None:
    """Carry messages between the halves until nothing is outstanding or time is up.

    That is `DRAIN_SECONDS` in all, and less if nothing moves. `clock` is another one in tests.
    """
    clock = clock or MonotonicClock()
    started_at = moved_at = now = clock.seconds()
    scheduler.take_missed_reports(worker.recent_reports)
    while scheduler.has_work() and now < min(started_at + DRAIN_SECONDS, moved_at + _STALL_SECONDS):
        step = scheduler.plan_idle_step()
        worker.start_transfers(step)
        worker.take_results()
        report = worker.take_report()
        if report is not None:
            scheduler.take_report(report)
            moved_at = clock.seconds()
        else:
            worker.wait()
        now = clock.seconds()
