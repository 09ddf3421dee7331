"""Shutdown of an engine whose two halves live in one process: what later steps would have done.

    offloads that ended   -> resident -> places asked for -> demotes -> records published

Each arrow is one message, and vLLM takes no step any more to carry it.
"""

import time

from tierstore_vllm.scheduler import SchedulerHalf
from tierstore_vllm.worker import WorkerHalf

__all__ = ["drain"]

_DRAIN_SECONDS = 30.0


def drain(worker: WorkerHalf, scheduler: SchedulerHalf) -> None:
    """Carry messages between the halves until nothing is outstanding or time is up."""
    until = time.monotonic() + _DRAIN_SECONDS
    scheduler.take_missed_reports(worker.recent_reports)
    while scheduler.has_work() and time.monotonic() < until:
        step = scheduler.plan_idle_step()
        worker.start_transfers(step)
        worker.take_results()
        report = worker.take_report()
        if report is not None:
            scheduler.take_report(report)
        else:
            worker.wait()
