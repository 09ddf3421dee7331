"""What the engine's own Python feels while a tier moves bytes in the same process.

A *victim* is a thread that runs small operations of Python, as an engine's step does. The time
that it loses while a call moves bytes is the call's time, less the time that the victim needs for
as much work when it is alone. On few cores a part of it is processor time, not the interpreter's
lock: compare parties, not with zero.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

__all__ = ["Sample", "Victim", "take"]

WINDOW_SECONDS = 0.05
_BATCH_OPERATIONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured call."""

    gigabytes_per_second: float
    cpu_seconds_per_gigabyte: float
    """Of the whole process, without the victim's."""
    lost_seconds_per_gigabyte: float | None
    """What the victim lost; None: it was not there."""


class Victim:
    """A busy Python thread, from `with` until its end."""

    def __init__(self) -> None:
        self._batches = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="victim", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    @property
    def batches(self) -> int:
        """Return the work done."""
        return self._batches

    @property
    def cpu_seconds(self) -> float:
        """Return the processor time that it took."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def pace(self) -> float:
        """Return its batches per second while nothing else happens."""
        before, start = self._batches, time.perf_counter()
        time.sleep(WINDOW_SECONDS)
        return (self._batches - before) / (time.perf_counter() - start)

    def _work(self) -> None:
        held: dict[int, tuple[int, str]] = {}
        number = 0
        while not self._stopped:
            for _ in range(_BATCH_OPERATIONS):
                number += 1
                held[number & 1023] = (number, str(number & 255))
                held.get(number & 511)
            self._batches += 1


def take(call: Callable[[], object], size_bytes: int, *, beside_victim: bool) -> Sample:
    """Measure a call that moves `size_bytes`, alone or beside a victim."""
    gigabytes = size_bytes / 1e9
    if not beside_victim:
        seconds, cpu = _timed(call)
        return Sample(
            gigabytes_per_second=gigabytes / seconds,
            cpu_seconds_per_gigabyte=cpu / gigabytes,
            lost_seconds_per_gigabyte=None,
        )
    with Victim() as victim:
        pace_before = victim.pace()
        batches, victim_cpu = victim.batches, victim.cpu_seconds
        seconds, cpu = _timed(call)
        batches, victim_cpu = victim.batches - batches, victim.cpu_seconds - victim_cpu
        pace = (pace_before + victim.pace()) / 2  # other programs slow it more and less
    return Sample(
        gigabytes_per_second=gigabytes / seconds,
        cpu_seconds_per_gigabyte=max(0.0, cpu - victim_cpu) / gigabytes,
        lost_seconds_per_gigabyte=(seconds - batches / pace) / gigabytes,
    )


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu_start
