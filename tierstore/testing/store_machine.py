"""A Hypothesis state machine that plays with a store and compares it with a dict.

A chunk's bytes are a function of its key, as in a real KV cache, so the model only needs to know
which keys were ever accepted. What holds for every store, however small:

- a row that `get` calls found has exactly the chunk's bytes, any other row is untouched;
- nothing is found that was never accepted;
- `match_prefix` never promises more than `get` finds right after it;
- `check()` is clean at any time, and after every restart.

A roomy store (nothing has to be evicted) must also find everything that it accepted.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore.arrays import ByteArray
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.manifest import Manifest
from tierstore.store import TierStore

__all__ = ["chunk_of", "make_store_machine"]

_KEY_COUNT = 64
_UNTOUCHED = 0xA5


def chunk_of(key: OffloadKey, chunk_bytes: int) -> ByteArray:
    """Return the bytes that belong to a key: different for every key, all bytes significant."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return np.random.default_rng(seed).integers(0, 256, chunk_bytes, np.uint8)


def make_store_machine(
    open_store: Callable[[Path, Manifest], TierStore],
    *,
    manifest: Manifest,
    roomy: bool,
) -> type[RuleBasedStateMachine]:
    """Return a state machine class for `open_store(path, manifest)`; run it with its `TestCase`.

    Args:
        open_store: opens the store under test below an empty directory, again after each restart.
        manifest: one group; its chunk size decides how much the machine writes.
        roomy: the tiers hold 64 chunks and a restart loses none of them.
    """
    chunk_bytes = manifest.chunk_bytes(0)
    universe = make_offload_keys(
        manifest.namespace, 0, [number.to_bytes(8, "big") for number in range(_KEY_COUNT)]
    )
    chunks = {key: chunk_of(key, chunk_bytes) for key in universe}
    prefixes = st.lists(st.sampled_from(universe), min_size=1, max_size=24, unique=True)

    class StoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.path = Path(tempfile.mkdtemp(prefix="tierstore-machine-"))
            self.accepted: set[OffloadKey] = set()

        @initialize()
        def start(self) -> None:
            self.store = open_store(self.path, manifest)

        @rule(keys=prefixes)
        def put(self, keys: list[OffloadKey]) -> None:
            count = self.store.put(keys, np.stack([chunks[key] for key in keys]))
            assert count == len(keys) or not roomy, f"{count} of {len(keys)} chunks accepted"
            self.accepted.update(keys)

        @rule(keys=prefixes)
        def get(self, keys: list[OffloadKey]) -> None:
            matched = self.store.match_prefix(keys).chunk_count
            out = np.full((len(keys), chunk_bytes), _UNTOUCHED, np.uint8)
            found = self.store.get(keys, out)
            assert all(found[:matched]), f"matched {matched}, found {found}"
            for key, row, is_found in zip(keys, out, found, strict=True):
                if is_found:
                    assert key in self.accepted, f"found {key.hex()}, which was never put"
                    assert np.array_equal(row, chunks[key]), f"wrong bytes for {key.hex()}"
                else:
                    assert (row == _UNTOUCHED).all(), f"a missed row was written: {key.hex()}"
                    assert not roomy or key not in self.accepted, f"lost {key.hex()}"

        @rule()
        def flush(self) -> None:
            self.store.flush()

        @rule()
        def restart(self) -> None:
            self.store.close()
            self.store = open_store(self.path, manifest)

        @rule()
        def reset(self) -> None:
            self.store.reset()
            assert self.store.match_prefix(universe[:1]).chunk_count == 0
            self.accepted.clear()

        @invariant()
        def sound(self) -> None:
            if hasattr(self, "store"):
                assert self.store.check() == []

        def teardown(self) -> None:
            if hasattr(self, "store"):
                self.store.close()
            shutil.rmtree(self.path, ignore_errors=True)

    return StoreMachine
