"""Calls of coroutines that are cancelled: at once, and never a wrong byte.

Goal: from `CancelledError` on the caller uses its arrays as it likes. What a `get` finds later is
right or absent, `out` is not written any more, and nothing is left behind.

Method: the sequence of keys is read by the thread that makes the call. There it installs the trace
function of `reentry_kit`, which cancels the task at the n-th line that the thread executes in the
modules that change something, and goes on when the loop has seen to that.
"""

import asyncio
import random
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from async_kit import HungReads, call_threads, found, put, room_for, until
from open_resources import are_given_back, open_resources
from overlap_kit import CHUNKS, NEW, RECORDED, RESIDENT
from reentry_kit import LINES_MAX, AtLine
from store_kit import config_of
from waiting import within_seconds

from tierstore import AsyncTierStore

JUNK, MINE = 0x11, 0x77
CANCELLED_COUNT = 30
SETTLED_SECONDS = 0.02
"""So long the loop has for a cancellation; a copy that it has to wait for goes on after that."""


class CancellingKeys(Sequence):
    """Keys that let the thread that reads them cancel a task at its n-th line from there on."""

    def __init__(self, keys, n):
        self.keys = keys
        self.line = AtLine(n, self.cancel)
        self.loop = asyncio.get_running_loop()
        self.task = None
        self.seen = threading.Event()

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        return self.keys[index]

    def __iter__(self):
        self.line.__enter__()
        return iter(self.keys)

    def cancel(self):
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.loop.call_soon_threadsafe(self.loop.call_soon, self.seen.set)
        self.seen.wait(60)
        threading.Event().wait(SETTLED_SECONDS)

    async def run(self, call, array):
        """Return whether the call was cancelled; the array is the caller's again afterwards."""
        self.task = asyncio.ensure_future(call(self, array))
        try:
            await self.task
        except asyncio.CancelledError:
            array[:] = JUNK
            return True
        finally:
            # The thread's trace ends with the next call, or is over.
            self.line.n = LINES_MAX << 1
        return False


class Lines:
    """Chooses lines of a call by chance until enough calls were cancelled at one."""

    def __init__(self, count):
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.count = count
        self.cancelled_count = 0

    def __iter__(self):
        while self.cancelled_count < CANCELLED_COUNT:
            self.n = self.random.randint(1, self.count)
            yield self.n

    def note(self, is_cancelled):
        self.cancelled_count += is_cancelled
        if not is_cancelled:  # how often a call waits varies, and with it how many lines it has
            self.count = max(1, self.n - 1)


async def end_traces(store):
    """Let all threads that make calls end what they do, without a trace from then on."""

    class Untraced(Sequence):
        def __len__(self):
            return 0

        def __getitem__(self, index):
            raise IndexError

        def __iter__(self):
            sys.settrace(None)
            return iter(())

    await asyncio.gather(*(store.match_prefix(Untraced()) for _ in range(8)))


async def count_lines(store, call, array, keys):
    counting = CancellingKeys(keys, LINES_MAX)
    await counting.run(call, array)
    await end_traces(store)
    return counting.line.count


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_a_put_that_is_cancelled_at_any_line_stores_right_bytes_or_none(tmp_path, backend, cascade):
    config = config_of(tmp_path / "tier", backend=backend, primary="4MiB", cascade=cascade)

    async def live():
        async with await AsyncTierStore.open(config, CHUNKS.manifest, threads=2) as store:
            numbers = range(24)
            keys = CHUNKS.keys(numbers)
            count = await count_lines(store, store.put, CHUNKS.array(numbers), keys)
            lines = Lines(count)
            for i, n in enumerate(lines):
                numbers = range(100 * i + 100, 100 * i + 124)
                cancelling = CancellingKeys(CHUNKS.keys(numbers), n)
                lines.note(await cancelling.run(store.put, CHUNKS.array(numbers)))
                await found(store, numbers)  # compares what is found
                await end_traces(store)
            assert await store.check() == []
            assert await put(store, numbers) == len(numbers)
            await store.flush()
            assert await found(store, numbers) == list(numbers)
            primary = store._store._stack.primary
            assert not primary._pins
            assert not primary.arriving

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_get_that_is_cancelled_at_any_line_writes_no_more(tmp_path, backend, where):
    config = config_of(tmp_path / "tier", backend=backend, primary="4MiB")
    numbers, crowd = range(24), range(1000, 1064)

    async def live():
        async with await AsyncTierStore.open(config, CHUNKS.manifest, threads=2) as store:
            await put(store, numbers)
            keys = CHUNKS.keys(numbers)
            count = await count_lines(store, store.get, room_for(numbers), keys)
            lines = Lines(count)
            for n in lines:
                if where == "disk":
                    await put(store, crowd)
                out = room_for(numbers)
                cancelling = CancellingKeys(keys, n)
                is_cancelled = await cancelling.run(store.get, out)
                lines.note(is_cancelled)
                await end_traces(store)
                assert await found(store, numbers) == list(numbers)
                expected = JUNK if is_cancelled else CHUNKS.array(numbers)
                assert np.array_equal(out, np.broadcast_to(expected, out.shape))
            assert await store.check() == []
            await store.flush()
            primary = store._store._stack.primary
            assert not primary._pins
            assert not primary.arriving

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))


async def fail_in_group(store):
    async with asyncio.TaskGroup() as group:
        group.create_task(found(store, RECORDED))
        group.create_task(store.put(None, None))


def test_calls_that_wait_are_cancelled_while_what_they_wait_for_hangs(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened(threads=2) as store:
            reading.hang()
            keys = CHUNKS.keys(RECORDED)
            arrays = [room_for(RECORDED) for _ in range(8)]
            gets = [asyncio.create_task(store.get(keys, out)) for out in arrays]
            await until(reading.are_begun)
            for get in gets:
                get.cancel()
            for get, out in zip(gets, arrays, strict=True):
                with pytest.raises(asyncio.CancelledError):
                    await get
                out[:] = MINE
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.get(keys, room_for(RECORDED))
            # Their threads are free again, though the reads hang still.
            assert await put(store, NEW) == len(NEW)
            assert (await store.stats()).primary_chunk_count >= len(NEW)
            with pytest.raises(ExceptionGroup):
                await fail_in_group(store)
            reading.faults.heal()
            assert await found(store, [*RECORDED, *RESIDENT]) == [*RECORDED, *RESIDENT]
            assert all((out == MINE).all() for out in arrays)
            await store.flush()
            assert await store.check() == []

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))


def test_a_call_that_has_not_begun_is_cancelled_and_keeps_no_array(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened(threads=1) as store:
            reading.hang()
            first = asyncio.create_task(found(store, RECORDED))
            await until(reading.are_begun)
            rows = bytearray(CHUNKS.chunk_bytes)
            second = asyncio.create_task(store.get(CHUNKS.keys(RECORDED[:1]), [rows]))
            await asyncio.sleep(0.05)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            rows[:] = b""  # may be resized: no view of it is left
            assert not first.done()
            reading.faults.heal()
            assert await first == list(RECORDED)

    asyncio.run(live())


def test_an_open_that_is_cancelled_leaves_nothing_open(tmp_path, backend):
    config = config_of(tmp_path / "tier", backend=backend)

    async def open_for(seconds):
        async with asyncio.timeout(seconds):
            return await AsyncTierStore.open(config, CHUNKS.manifest)

    async def live(seconds):
        try:
            store = await open_for(seconds)
        except TimeoutError:
            return 1
        await store.close()
        return 0

    asyncio.run(live(60))
    before = open_resources()
    cancelled = [asyncio.run(live(seconds / 1000)) for seconds in (0, 0.2, 1, 3, 10, 30, 100)]
    assert cancelled[0] == 1
    assert within_seconds(lambda: are_given_back(before))
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, NEW) == len(NEW)
        assert store.check() == []


def test_a_close_that_is_cancelled_goes_on(tmp_path):
    async def live():
        store = await AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest)
        assert await put(store, NEW) == len(NEW)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await store.close()

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))
    with CHUNKS.open(config_of(tmp_path)) as store:
        assert CHUNKS.found(store, NEW) == list(NEW)


def test_a_coroutine_that_is_closed_takes_its_arrays_back(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened() as store:
            reading.hang()
            out = room_for(RECORDED)
            get = store.get(CHUNKS.keys(RECORDED), out)
            get.send(None)
            await until(reading.are_begun)
            get.close()
            out[:] = MINE
            reading.faults.heal()
            assert await found(store, RECORDED) == list(RECORDED)
            assert (out == MINE).all()

    asyncio.run(live())
    assert within_seconds(lambda: call_threads() == [])
