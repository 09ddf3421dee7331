"""The same work for tierstore's primary tier and vLLM's manager of host memory, side by side."""

import os
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain, islice
from sys import getsizeof
from typing import Literal

from tierstore.config import PrimaryConfig
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.tier.memory.primary import PrimaryTier

__all__ = ["Eviction", "Figures", "Subject", "Tierstore", "Vllm", "measure"]

Eviction = Literal["lru", "arc"]
Requests = list[list[OffloadKey]]
Figures = dict[str, list[float]]
"""Microseconds per chunk of each run, by call."""

RUN_CHUNKS = 8192
FILL_SIZE = 256
REFILL_CHUNKS_MAX = 25_000
TRACED_CHUNKS_MAX = 200_000
"""Tracing makes filling slow; the memory of slower subjects is measured up to here only."""
KEY_PREFIX = b"namespac\0\0\0\0"


def new_requests(size: int, chunk_count: int) -> Requests:
    """Return requests with keys that were never seen."""
    return [
        [OffloadKey(KEY_PREFIX + os.urandom(32)) for _ in range(size)]
        for _ in range(max(1, chunk_count // size))
    ]


class Subject(ABC):
    """A full cache whose calls are measured."""

    name: str
    bytes_per_chunk: float | None = None
    fill_factor = 2.0
    """How many times its capacity is stored before the first measurement."""
    traced_chunks_max: float = float("inf")

    def __init__(self, eviction: Eviction, chunk_count: int) -> None:
        self.chunk_count = chunk_count
        self._stored: Requests = []
        is_traced = chunk_count <= self.traced_chunks_max
        if is_traced:
            tracemalloc.start()
        self._open(eviction)
        self.fill(int(chunk_count * self.fill_factor))
        if is_traced:
            # The lists of this class and the keys that only they hold are not the subject's.
            own_bytes = sum(
                key.__sizeof__() for keys in self._stored for key in keys if not self.has(key)
            ) + sum(map(getsizeof, self._stored))
            self.bytes_per_chunk = (tracemalloc.get_traced_memory()[0] - own_bytes) / chunk_count
            tracemalloc.stop()

    def fill(self, chunk_count: int) -> None:
        """Store new requests; use every other one once, so that ARC fills both lists."""
        for number, keys in enumerate(new_requests(FILL_SIZE, chunk_count)):
            self.store(keys)
            if number % 2:
                self.use(keys)
            self._stored.append(keys)
        excess = len(self._stored) - self.chunk_count * 2 // FILL_SIZE
        del self._stored[: max(0, excess)]

    def requests(self, size: int, *, resident: bool) -> Requests:
        """Return stored requests, of `size` chunks, that are neither young nor about to go.

        Not `resident`: those that were evicted most recently.
        """
        age = self.chunk_count // 2 if resident else self.chunk_count
        older = self._stored[: -age // FILL_SIZE]
        keys = chain.from_iterable(reversed(older))
        found = list(islice((key for key in keys if self.has(key) == resident), RUN_CHUNKS))
        return [found[first : first + size] for first in range(0, len(found), size)]

    @abstractmethod
    def _open(self, eviction: Eviction) -> None: ...

    @abstractmethod
    def has(self, key: OffloadKey) -> bool:
        """Return whether a chunk is resident."""

    @abstractmethod
    def store(self, keys: list[OffloadKey]) -> None:
        """Reserve and commit."""

    @abstractmethod
    def locate(self, keys: list[OffloadKey]) -> object:
        """Look the chunks up."""

    @abstractmethod
    def use(self, keys: list[OffloadKey]) -> None:
        """Pin, release, touch."""

    def check(self) -> Sequence[str]:
        """Return what is unsound."""
        return ()


class Tierstore(Subject):
    """`PrimaryTier`."""

    name = "tierstore"

    def _open(self, eviction: Eviction) -> None:
        config = PrimaryConfig(capacity_bytes=self.chunk_count * PAGE_BYTES, eviction=eviction)
        self._tier = PrimaryTier(config, [PAGE_BYTES])

    def has(self, key: OffloadKey) -> bool:
        return self._tier.locate([key]) != [None]

    def store(self, keys: list[OffloadKey]) -> None:
        if self._tier.reserve(0, keys) is None:
            raise RuntimeError("nothing is pinned, and yet there was no room")
        self._tier.commit(keys)

    def locate(self, keys: list[OffloadKey]) -> object:
        return self._tier.locate(keys)

    def use(self, keys: list[OffloadKey]) -> None:
        self._tier.pin(keys)
        self._tier.unpin(keys)
        self._tier.touch(keys)

    def check(self) -> Sequence[str]:
        return self._tier.check()


class Vllm(Subject):
    """vLLM's `CPUOffloadingManager`, called as its scheduler half does: lookups key by key."""

    name = "vLLM"
    fill_factor = 1.1
    traced_chunks_max = TRACED_CHUNKS_MAX

    def __init__(self, eviction: Eviction, chunk_count: int) -> None:
        # Imported first, so that it does not count as memory of the manager.
        from vllm.v1.kv_offload.base import LookupResult, ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._make = CPUOffloadingManager
        self._context = ReqContext
        self._hit = LookupResult.HIT
        self._anyone = ReqContext("anyone")
        super().__init__(eviction, chunk_count)

    def _open(self, eviction: Eviction) -> None:
        self._manager = self._make(self.chunk_count, eviction)

    def has(self, key: OffloadKey) -> bool:
        return bool(self._manager.lookup(key, self._anyone) is self._hit)

    def store(self, keys: list[OffloadKey]) -> None:
        context = self._context("request")
        prepared = self._manager.prepare_store(keys, context)
        if prepared is None:
            raise RuntimeError("nothing is pinned, and yet there was no room")
        self._manager.complete_store(prepared.keys_to_store, context)

    def locate(self, keys: list[OffloadKey]) -> object:
        lookup, context = self._manager.lookup, self._anyone
        return [lookup(key, context) for key in keys]

    def use(self, keys: list[OffloadKey]) -> None:
        context = self._context("request")
        self._manager.prepare_load(keys, context)
        self._manager.complete_load(keys, context)
        self._manager.on_request_finished(context)


def measure(subjects: Sequence[Subject], size: int, run_count: int) -> dict[str, Figures]:
    """Measure all calls with requests of `size` chunks, the subjects taking turns."""
    figures: dict[str, Figures] = {subject.name: {} for subject in subjects}
    for run in range(run_count):
        for subject in subjects if run % 2 else subjects[::-1]:
            subject.fill(min(subject.chunk_count // 4, REFILL_CHUNKS_MAX))
            known = subject.requests(size, resident=True)
            unknown = new_requests(size, RUN_CHUNKS)
            for name, call, requests in (
                ("locate, hit", subject.locate, known),
                ("locate, miss", subject.locate, unknown),
                ("pin + release + touch", subject.use, known),
                ("reserve + commit", subject.store, unknown),
                ("reserve + commit, again", subject.store, subject.requests(size, resident=False)),
            ):
                figures[subject.name].setdefault(name, []).append(_time_us(call, requests))
    for subject in subjects:
        problems = subject.check()
        if problems:
            raise RuntimeError("; ".join(problems))
    return figures


def _time_us(call: Callable[[list[OffloadKey]], object], requests: Requests) -> float:
    start = time.perf_counter()
    for keys in requests:
        call(keys)
    return (time.perf_counter() - start) / sum(map(len, requests)) * 1e6
