"""The caller's arrays after a call of a coroutine: no view of them is left, collected or not.

Method: the garbage collector is off, so that what keeps an array in a circle keeps it for ever.
"""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from async_kit import SECONDS_MAX, HungReads, found, until
from overlap_kit import CHUNKS, NEW, RECORDED
from store_kit import config_of

from tierstore import AsyncTierStore
from tierstore.errors import ClosedError


@pytest.fixture(autouse=True)
def _uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def is_free(row):
    """Return whether no view of a bytearray is left: it can be resized."""
    try:
        row.append(0)
    except BufferError:
        return False
    row.pop()
    return True


async def fails(call, kind):
    """Return whether a call raises, and keep nothing of it, as `pytest.raises` would."""
    try:
        await call
    except kind:
        return True
    return False


def rows_for(numbers):
    return [bytearray(CHUNKS.chunk_bytes) for _ in numbers]


def test_what_a_cancelled_get_was_given_is_free_again(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened(threads=2) as store:
            reading.hang()
            rows = rows_for(RECORDED)
            get = asyncio.create_task(store.get(CHUNKS.keys(RECORDED), rows))
            await until(reading.are_begun)
            get.cancel()
            assert await fails(get, asyncio.CancelledError)
            del get
            await until(lambda: all(map(is_free, rows)), SECONDS_MAX)
            reading.faults.heal()
            assert await found(store, RECORDED) == list(RECORDED)
            assert all(map(is_free, rows))

    asyncio.run(live())


def test_what_a_call_that_fails_was_given_is_free_again(tmp_path):
    async def live():
        store = await AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest)
        array = np.zeros((3, CHUNKS.chunk_bytes), np.uint8)
        is_left = weakref.ref(array)
        for call in (store.put, store.get):
            assert await fails(call(CHUNKS.keys(NEW), array), ValueError)
        del array
        await until(lambda: is_left() is None)
        rows = rows_for(NEW)
        assert all(await store.put(CHUNKS.keys(NEW), rows))
        await until(lambda: all(map(is_free, rows)))
        await store.close()
        array = CHUNKS.array(NEW)
        is_left = weakref.ref(array)
        assert await fails(store.put(CHUNKS.keys(NEW), array), ClosedError)
        del array
        await until(lambda: is_left() is None)

    asyncio.run(live())


def test_what_a_call_that_ends_by_a_close_was_given_is_free_again(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened(threads=1) as store:
            reading.hang()
            rows = [rows_for(RECORDED) for _ in range(4)]
            gets = [asyncio.create_task(store.get(CHUNKS.keys(RECORDED), each)) for each in rows]
            await until(reading.are_begun)
            await store.close()
            errors = await asyncio.gather(*gets, return_exceptions=True)
            assert {type(error) for error in errors} == {ClosedError}
            del gets, errors
            await until(lambda: all(is_free(row) for each in rows for row in each))

    asyncio.run(live())
