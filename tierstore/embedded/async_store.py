"""AsyncTierStore: a TierStore for asyncio services.

Nothing that may take long happens in the event loop: threads make the calls (`async_calls`), and
the loop hears of the answer.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tierstore.arrays import ChunkRows, WritableChunkRows
from tierstore.backend.opening import BackendOpener
from tierstore.config import StoreConfig
from tierstore.embedded.answers import PrefixMatch, StoreStats
from tierstore.embedded.async_calls import Lanes
from tierstore.embedded.planes import Patience
from tierstore.embedded.store import TierStore
from tierstore.faults import SystemOpener, open_system
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.quoting import quoted

__all__ = ["THREADS", "AsyncTierStore"]

Answer = TypeVar("Answer")

THREADS = 16
"""Calls that may wait for a tier at the same time, if nothing else is asked for."""

_THREADS_MAX = 256


class AsyncTierStore:
    """A `TierStore` whose calls are awaited: same arguments, answers and errors.

    ```
    async with await AsyncTierStore.open(config, manifest) as store:
        are_stored = await store.put(keys, rows)
    ```

    Calls run side by side as those of `TierStore` do. One thread makes the calls that wait for no
    tier; `threads` more make those that do, and further ones wait for their turn. So chunks in
    memory are found whatever hangs. The threads end with `close`.

    The store belongs to no event loop: tasks of several loops, in several threads, may use it. In a
    forked process each call raises `ClosedError`.

    A cancelled call raises `CancelledError` at once, but for the copy of a batch (4 MiB at most)
    that may be under way: it is waited for. From then on the store neither reads nor writes the
    arrays of that call, so that they may be used again; a `bytearray` may be resized some
    milliseconds later. A cancelled `get` has filled any rows of `out`, or none; a cancelled `put`
    has stored any of the chunks, each with the bytes that it was given, or none. A cancelled
    `flush`, `check` or `stats` ends; a cancelled `reset` or `close` that has begun goes on. A loop
    that is closed without cancelling its tasks (`asyncio.run` cancels them) takes no array back.

    An open store that is dropped warns and closes, as a `TierStore` does.
    """

    def __init__(self, store: TierStore, lanes: Lanes) -> None:
        """Take over a store and the threads that call it; use `open`."""
        self._store = store
        self._lanes = lanes
        weakref.finalize(self, lanes.abandon).atexit = False

    @classmethod
    async def open(
        cls,
        config: StoreConfig | Mapping[str, Any] | str | Path,
        manifest: Manifest,
        *,
        threads: int = THREADS,
        open_backend: BackendOpener | None = None,
        open_system: SystemOpener = open_system,
        patience: Patience | None = None,
    ) -> Self:
        """Open the tiers, as `TierStore.open` does, with the same errors.

        If it is cancelled, what was opened is closed by a thread.

        Raises:
            ValueError: `threads` is not 1 to 256.
        """
        if type(threads) is not int or not 1 <= threads <= _THREADS_MAX:
            raise ValueError(f"threads: expected 1 to {_THREADS_MAX}, got {quoted(threads)}")
        lanes = Lanes(threads)
        lanes.open()
        opened: list[TierStore] = []

        def open_store() -> None:
            lanes.open_waiting()
            opened.append(
                TierStore.open(
                    config,
                    manifest,
                    open_backend=open_backend,
                    open_system=open_system,
                    patience=patience,
                )
            )

        def close_store() -> None:
            for store in opened:
                store.close()

        call = lanes.begin(open_store)
        try:
            await _done(call.answer)
            call.take()
        except BaseException:
            call.withdraw()
            # The same thread runs it, after `open_store`.
            lanes.begin_close(close_store)
            raise
        return cls(opened[0], lanes)

    async def put(self, keys: Sequence[OffloadKey], array: ChunkRows) -> list[bool]:
        """Store chunks; returns for each key whether the store has it now (`TierStore.put`).

        `array` is read until the call ends, and must not change before that.
        """
        return await self._answer(partial(self._store.put, keys, array))

    async def get(self, keys: Sequence[OffloadKey], out: WritableChunkRows) -> list[bool]:
        """Load chunks; returns for each key whether its row was filled (`TierStore.get`).

        `out` is written until the call ends.
        """
        return await self._answer(partial(self._store.get, keys, out))

    async def match_prefix(self, keys: Sequence[OffloadKey]) -> PrefixMatch:
        """Count the leading keys for which `get` would answer True (`TierStore.match_prefix`)."""
        return await self._answer(partial(self._store.match_prefix, keys))

    async def flush(self) -> None:
        """Bring every accepted chunk to the tiers and their devices (`TierStore.flush`)."""
        await self._answer(self._store.flush, waits=True)

    async def reset(self) -> None:
        """Forget all chunks of this manifest in all tiers (`TierStore.reset`)."""
        await self._answer(self._store.reset)

    async def stats(self) -> StoreStats:
        """Count what the store holds and what it did (`TierStore.stats`)."""
        return await self._answer(self._store.stats, waits=True)

    async def check(self) -> list[str]:
        """Verify the invariants of all tiers; returns the problems in words (`TierStore.check`)."""
        return await self._answer(self._store.check, waits=True)

    async def close(self) -> None:
        """Flush, stop the threads, release the memory; idempotent (`TierStore.close`).

        Calls that wait then raise `ClosedError`, as do later ones. If it is cancelled, the threads
        go on with it, and another `close` waits until they have ended.
        """
        ended = self._lanes.begin_close(self._store.close)
        await _done(ended)
        ended.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _answer(self, call: Callable[[], Answer], *, waits: bool = False) -> Answer:
        """Let a thread make a call; a cancellation takes the caller's arrays back."""
        begun = self._lanes.begin(call, waits=waits)
        try:
            await _done(begun.answer)
        except asyncio.CancelledError:
            untouched = begun.withdraw()
            while not untouched.done():
                with suppress(asyncio.CancelledError):  # once more: one batch is copied soon
                    await _done(untouched)
            raise
        except BaseException:  # the coroutine is closed: nothing can be awaited
            begun.withdraw_now()
            raise
        return begun.take()


async def _done(future: Future[Any]) -> None:
    """Wait until threads have done something, which a cancellation of the wait does not change."""
    loop = asyncio.get_running_loop()
    is_done = loop.create_future()
    future.add_done_callback(partial(_wake, loop, is_done))
    await is_done


def _wake(loop: asyncio.AbstractEventLoop, is_done: asyncio.Future[None], _: Future[Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed: its tasks do not wait any more
        loop.call_soon_threadsafe(_note, is_done)


def _note(is_done: asyncio.Future[None]) -> None:
    if not is_done.done():
        is_done.set_result(None)
