"""A device that really hangs under a store for coroutines: memory and the event loop go on.

Method: as `test_hung_device`. That the loop goes on is shown by its turns, not by a clock.
"""

import asyncio

import pytest
from fuse_directory import why_there_is_none
from store_kit import Chunks, config_of

from tierstore import AsyncTierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError

pytestmark = [
    pytest.mark.skipif(bool(why_there_is_none()), reason=f"no FUSE: {why_there_is_none()}"),
    pytest.mark.timeout(600),
]

CHUNKS = Chunks(65_536)
SLOTS = 64
ON_DISK, RESIDENT, CROWD = range(30), range(90, 100), range(2000, 2000 + SLOTS)
IMPATIENT = Patience(put_seconds=2, flush_seconds=4, close_seconds=4)


async def put(store, numbers):
    assert all(await store.put(CHUNKS.keys(numbers), CHUNKS.array(numbers)))


async def found(store, numbers):
    out = CHUNKS.array(numbers)
    out ^= 0xFF
    is_found = await store.get(CHUNKS.keys(numbers), out)
    for row, expected, hit in zip(out, CHUNKS.array(numbers), is_found, strict=True):
        assert ((row if hit else row ^ 0xFF) == expected).all()
    return [number for number, hit in zip(numbers, is_found, strict=True) if hit]


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_memory_and_the_loop_go_on_and_cancelled_calls_end(directory, backend):
    config = config_of(
        directory.path / "tier",
        backend=backend,
        primary=f"{SLOTS * 64}KiB",
        capacity="32MiB",
        io={"threads": 2, "deadline": "8s"},
    )
    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def live():
        async with await AsyncTierStore.open(
            config, CHUNKS.manifest, threads=2, patience=IMPATIENT
        ) as store:
            await put(store, [*ON_DISK, *RESIDENT])
            await put(store, CROWD)
            await store.flush()
            assert await found(store, RESIDENT) == list(RESIDENT)
            ticking = asyncio.create_task(tick())
            directory.hang()
            waiting = [asyncio.create_task(found(store, ON_DISK)) for _ in range(10)]
            turns_before = turns
            while turns < turns_before + 20:
                await asyncio.sleep(0)
                assert await found(store, RESIDENT) == list(RESIDENT)
            assert not any(task.done() for task in waiting)
            for task in waiting[:5]:
                task.cancel()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(answer) for answer in answers[:5]} == {asyncio.CancelledError}
            assert all(set(answer) <= set(ON_DISK) for answer in answers[5:])
            flush = asyncio.create_task(store.flush())
            assert await found(store, RESIDENT) == list(RESIDENT)
            directory.heal()
            await asyncio.gather(flush, return_exceptions=True)
            async with asyncio.timeout(120):
                while await found(store, ON_DISK) != list(ON_DISK):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                while not await is_sound(store):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            ticking.cancel()

    asyncio.run(live())


async def is_sound(store):
    try:
        await store.flush()
    except TierStoreError:
        return False
    return await store.check() == []
