"""Stores for coroutines, on a real disk, whose reads can be made to hang; and what they leave."""

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
from overlap_kit import CHUNKS, PATIENCE, RECORDED, RESIDENT
from store_kit import config_of

from tierstore import AsyncTierStore
from tierstore.testing.faults import ReadFaults, unreadable_opener

SECONDS_MAX = 120


async def until(condition, seconds_max=SECONDS_MAX):
    """Wait until a condition holds; the loop goes on meanwhile."""
    async with asyncio.timeout(seconds_max):
        while not condition():  # noqa: ASYNC110 - threads make it hold, and set no event
            await asyncio.sleep(0.005)


def room_for(numbers):
    """Return an array that shows which of its rows were written."""
    return np.full((len(numbers), CHUNKS.chunk_bytes), 0xA5, np.uint8)


async def found(store, numbers):
    """Return the numbers that `get` finds, having compared every byte."""
    numbers = list(numbers)
    out = room_for(numbers)
    is_found = await store.get(CHUNKS.keys(numbers), out)
    for row, expected, hit in zip(out, CHUNKS.array(numbers), is_found, strict=True):
        assert np.array_equal(row, expected) if hit else (row == 0xA5).all()
    return [number for number, hit in zip(numbers, is_found, strict=True) if hit]


async def put(store, numbers):
    """Return how many of the chunks the store has now."""
    return sum(await store.put(CHUNKS.keys(numbers), CHUNKS.array(numbers)))


def call_threads():
    """Return the threads that make calls for coroutines."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("tierstore-call", "tierstore-wait"))
    ]


class HungReads:
    """A tier with `RECORDED` on disk, whose reads hang when told to."""

    def __init__(self, path, backend="file", *, deadline="3600s", **options):
        self.config = config_of(
            path, backend=backend, io={"threads": 4, "deadline": deadline}, **options
        )
        with CHUNKS.open(self.config) as store:
            assert CHUNKS.put(store, RECORDED) == len(RECORDED)
        self.faults = ReadFaults()

    def hang(self, numbers=RECORDED):
        self.faults.hang(CHUNKS.keys(numbers))

    def are_begun(self, numbers=RECORDED):
        return any(self.faults.read_count(key) for key in CHUNKS.keys(numbers))

    @asynccontextmanager
    async def opened(self, threads=4):
        """Open the tier, with `RESIDENT` in memory, and heal it in the end."""
        opener = unreadable_opener({"disk": self.faults})
        try:
            async with await AsyncTierStore.open(
                self.config,
                CHUNKS.manifest,
                threads=threads,
                open_backend=opener,
                patience=PATIENCE,
            ) as store:
                assert await put(store, RESIDENT) == len(RESIDENT)
                yield store
                self.faults.heal()
        finally:
            self.faults.heal()
