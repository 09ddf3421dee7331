"""An asyncio service with a store: concurrent requests, each with a time limit.

    python examples/asyncio_service.py FOLDER

A request that loads nothing in time computes instead. SIGINT and SIGTERM flush and close.
"""

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np

from tierstore import AsyncTierStore, Manifest, OffloadKey

CHUNK_BYTES = 64 * 1024
MANIFEST = Manifest.simple("example-model", CHUNK_BYTES)
LOAD_SECONDS_MAX = 2.0
"""Longer than a load takes. A disk that hangs delays a request by no more than this."""


async def load(store: AsyncTierStore, keys: list[OffloadKey], cache: np.ndarray) -> int:
    """Fill the leading rows of `cache`; return how many."""
    try:
        async with asyncio.timeout(LOAD_SECONDS_MAX):
            return [*await store.get(keys, cache), False].index(False)
    except TimeoutError:
        return 0  # the store no longer writes to `cache`: it may be used at once


async def answer(store: AsyncTierStore, request: int) -> int:
    """Serve one request; return how many of its chunks were loaded instead of computed."""
    prompt = request % 8  # eight prompts that repeat
    keys = MANIFEST.keys([bytes([prompt, i]) * 16 for i in range(20)])
    cache = np.empty((len(keys), CHUNK_BYTES), np.uint8)
    loaded = await load(store, keys, cache)
    cache[loaded:] = prompt  # stands in for the prefill of the missing chunks
    await store.put(keys[loaded:], cache[loaded:])
    assert (cache == prompt).all()
    return loaded


async def serve(folder: Path) -> None:
    """Serve requests, 50 at a time, until there are no more or a signal arrives."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    disk = {"name": "disk", "backend": "file", "path": str(folder), "capacity": "1GiB"}
    config = {"primary": {"capacity": "64MiB"}, "secondary": [disk]}
    async with await AsyncTierStore.open(config, MANIFEST) as store:
        for first in range(0, 200, 50):
            requests = range(first, first + 50)
            counts = await asyncio.gather(*(answer(store, request) for request in requests))
            print(f"{len(counts)} requests: {sum(counts)} chunks loaded, {counts.count(0)} cold")
        await store.flush()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
