"""A store for coroutines: the calls of TierStore, side by side, in few threads, whatever hangs."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
from async_kit import HungReads, call_threads, found, put, room_for, until
from open_resources import are_given_back, open_resources
from overlap_kit import CHUNKS, NEW, PATIENCE, RECORDED, RESIDENT, HungWrites
from python_paths import environment
from store_kit import config_of
from waiting import within_seconds

from tierstore import AsyncTierStore, ConfigError, PrefixMatch
from tierstore.errors import ClosedError


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


def test_the_calls_answer_as_those_of_a_store_do(tmp_path, backend):
    config = config_of(tmp_path / "tier", backend=backend)
    numbers = range(40)

    async def live():
        async with await AsyncTierStore.open(config, CHUNKS.manifest) as store:
            keys = CHUNKS.keys(numbers)
            assert await store.put(keys, CHUNKS.array(numbers)) == [True] * 40
            assert await store.match_prefix(keys) == PrefixMatch(chunk_count=40)
            await store.flush()
            assert (await store.stats()).secondary["disk"].record_count == 40
        async with await AsyncTierStore.open(config, CHUNKS.manifest) as store:
            assert await found(store, [*numbers, 99]) == list(numbers)
            assert await store.check() == []
            await store.reset()
            assert await store.match_prefix(keys) == PrefixMatch(chunk_count=0)
            assert await found(store, numbers) == []

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))


def test_errors_come_as_they_are(tmp_path):
    async def live():
        with pytest.raises(ConfigError, match="capacity"):
            await AsyncTierStore.open({"primary": {"capacity": "much"}}, CHUNKS.manifest)
        for threads in (0, 257, True, "4"):
            with pytest.raises(ValueError, match="threads: expected 1 to 256"):
                await AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest, threads=threads)
        store = await AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest)
        with pytest.raises(TypeError, match="keys"):
            await store.put("keys", CHUNKS.array(NEW))
        with pytest.raises(ValueError, match="out: expected shape"):
            await store.get(CHUNKS.keys(NEW), np.zeros((1, 1), np.uint8))
        await asyncio.gather(*(store.close() for _ in range(5)))
        for call in (store.flush, store.reset, store.stats, store.check):
            with pytest.raises(ClosedError):
                await call()
        await store.close()

    before = open_resources()
    asyncio.run(live())
    assert within_seconds(lambda: are_given_back(before))


def test_two_hundred_gets_at_once_find_the_right_bytes_in_few_threads(tmp_path, backend):
    numbers = range(300)
    config = config_of(tmp_path / "tier", backend=backend, primary="8MiB")
    thread_counts = []

    async def get_some(store, seed):
        chosen = random.Random(seed).sample(numbers, 5)
        assert await found(store, [*chosen, 10_000 + seed]) == chosen
        thread_counts.append(len(call_threads()))

    async def live():
        async with await AsyncTierStore.open(config, CHUNKS.manifest, threads=6) as store:
            for first in range(0, 300, 50):
                assert await put(store, range(first, first + 50)) == 50
            async with asyncio.TaskGroup() as group:
                for seed in range(200):
                    group.create_task(get_some(store, seed))
            assert await store.check() == []

    asyncio.run(live())
    assert len(thread_counts) == 200
    assert max(thread_counts) <= 7
    assert within_seconds(lambda: call_threads() == [])


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_memory_is_used_and_the_loop_goes_on_whatever_waits_for_a_read(tmp_path, cascade):
    """More calls wait than there are threads for them. The tick counts turns of the loop."""
    reading = HungReads(tmp_path, cascade=cascade)
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def live():
        async with reading.opened(threads=2) as store:
            ticking = asyncio.create_task(tick())
            reading.hang()
            waiting = [asyncio.create_task(found(store, RECORDED)) for _ in range(20)]
            await until(reading.are_begun)
            for _ in range(20):
                assert await found(store, RESIDENT) == list(RESIDENT)
                assert await put(store, RESIDENT) == len(RESIDENT)
            assert (await store.match_prefix(CHUNKS.keys(RESIDENT))).chunk_count == len(RESIDENT)
            assert await put(store, NEW) == len(NEW)
            turns_before = turns
            await until(lambda: turns > turns_before + 20)
            assert not any(task.done() for task in waiting)
            assert len(call_threads()) == 3
            reading.faults.heal()
            assert await asyncio.gather(*waiting) == [list(RECORDED)] * 20
            ticking.cancel()
            assert await store.check() == []

    asyncio.run(live())


def test_a_put_that_comes_to_wait_for_a_tier_uses_each_chunk_once(tmp_path):
    """More than memory holds: in the end the tier is asked for what was evicted meanwhile.

    A second use would bring a chunk to this tier, and so would its second arrival.
    """
    numbers = range(200)
    config = config_of(tmp_path, cascade="second_touch")

    async def live():
        async with await AsyncTierStore.open(config, CHUNKS.manifest) as store:
            stored = await store.put(CHUNKS.keys(numbers), CHUNKS.array(numbers))
            await store.flush()
            stats = await store.stats()
        assert 0 < sum(stored) == stats.primary_chunk_count < len(numbers)
        assert stats.counters["offloaded_chunks_total"] == len(numbers)
        assert stats.secondary["disk"].record_count == 0

    asyncio.run(live())


def test_memory_is_read_while_more_calls_wait_for_a_write_than_there_are_threads(tmp_path):
    hung = HungWrites()
    config = config_of(tmp_path, primary="4MiB", io={"write_queue": "512KiB"})

    async def live():
        async with await AsyncTierStore.open(
            config, CHUNKS.manifest, threads=2, open_backend=hung.open, patience=PATIENCE
        ) as store:
            assert await put(store, RESIDENT) == len(RESIDENT)
            await until(hung.began.is_set)
            waiting = [
                asyncio.create_task(put(store, range(first, first + 10)))
                for first in range(300, 350, 10)
            ]
            for _ in range(20):
                assert await found(store, RESIDENT) == list(RESIDENT)
            assert not all(task.done() for task in waiting)
            waiting[0].cancel()
            hung.goes_on.set()
            assert sum(await asyncio.gather(*waiting[1:])) == 40
            await store.flush()
            assert await store.check() == []

    try:
        asyncio.run(live())
    finally:
        hung.goes_on.set()


def test_a_close_ends_the_calls_that_wait_and_those_that_have_not_begun(tmp_path):
    reading = HungReads(tmp_path)

    async def live():
        async with reading.opened(threads=2) as store:
            reading.hang()
            waiting = [asyncio.create_task(found(store, RECORDED)) for _ in range(6)]
            await until(reading.are_begun)
            await store.close()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(answer) for answer in answers} == {ClosedError}

    asyncio.run(live())
    assert within_seconds(lambda: call_threads() == [])


def test_tasks_of_several_loops_use_one_store(tmp_path):
    config = config_of(tmp_path)
    store = asyncio.run(AsyncTierStore.open(config, CHUNKS.manifest))
    errors = []

    async def play(first):
        for number in range(first, first + 20):
            assert await put(store, [number]) == 1
            assert await found(store, [number]) == [number]

    def run(first):
        try:
            asyncio.run(play(first))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert asyncio.run(store.check()) == []
    asyncio.run(store.close())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_refused_and_has_nothing_to_close(tmp_path):
    store = asyncio.run(AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest))

    async def use():
        for call in (
            lambda: store.put(CHUNKS.keys(NEW), CHUNKS.array(NEW)),
            lambda: store.get(CHUNKS.keys(NEW), room_for(NEW)),
            lambda: store.match_prefix(CHUNKS.keys(NEW)),
            store.flush, store.reset, store.stats, store.check,
        ):  # fmt: skip
            with pytest.raises(ClosedError, match="forked"):
                await call()
        await store.close()

    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(use())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(put(store, NEW)) == len(NEW)
    asyncio.run(store.close())


def test_a_store_that_is_dropped_warns_and_closes(tmp_path):
    before = open_resources()
    store = asyncio.run(AsyncTierStore.open(config_of(tmp_path), CHUNKS.manifest))
    assert asyncio.run(put(store, NEW)) == len(NEW)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del store
        gc.collect()
    assert any(issubclass(each.category, ResourceWarning) for each in caught)
    assert within_seconds(lambda: are_given_back(before))
    with CHUNKS.open(config_of(tmp_path)) as store:
        assert CHUNKS.found(store, NEW) == list(NEW)


INTERRUPTED = """
    import asyncio, signal, sys
    from store_kit import Chunks, config_of
    from tierstore import AsyncTierStore

    chunks = Chunks(65_536)

    async def serve():
        store = await AsyncTierStore.open(config_of(sys.argv[1]), chunks.manifest)
        number = 0
        CLOSING
            while True:
                numbers = range(number, number + 4)
                await store.put(chunks.keys(numbers), chunks.array(numbers))
                number += 4
                print(number, flush=True)

    # A shell that starts the tests in its background lets them ignore it, and they hand that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(serve())
"""


@pytest.mark.parametrize("closing", ["async with store:", "if True:"])
def test_a_service_that_is_interrupted_ends_and_has_stored_what_it_said(tmp_path, closing):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED).replace("CLOSING", closing), tmp_path],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        try:
            for _ in range(10):
                last = int(service.stdout.readline())
            service.send_signal(signal.SIGINT)
            rest, errors = service.communicate(timeout=120)
        finally:
            service.kill()
    assert service.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert "Fatal" not in errors
    stored = range(int(rest.split()[-1]) if rest.split() else last)
    with CHUNKS.open(config_of(tmp_path)) as store:
        assert CHUNKS.found(store, stored) == list(stored)
        assert store.check() == []
