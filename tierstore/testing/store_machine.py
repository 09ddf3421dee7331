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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore.arrays import ByteArray
from tierstore.embedded.store import TierStore
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes

__all__ = ["StoreMachine", "chunk_of", "make_store_machine"]

_KEY_COUNT = 64
_UNTOUCHED = 0xA5
_PREFIXES = st.lists(st.integers(0, _KEY_COUNT - 1), min_size=1, max_size=24, unique=True)


def chunk_of(key: OffloadKey, chunk_bytes: int) -> ByteArray:
    """Return the bytes that belong to a key: different for every key, all bytes significant."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return np.random.default_rng(seed).integers(0, 256, chunk_bytes, np.uint8)


class StoreMachine(RuleBasedStateMachine):
    """Plays with one store; `make_store_machine` fills in the class attributes."""

    manifest: Manifest
    roomy: bool
    keys: Sequence[OffloadKey]
    chunks: Mapping[OffloadKey, ByteArray]

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierstore-machine-"))
        self.accepted: set[OffloadKey] = set()
        self.store: TierStore | None = None

    def open_store(self) -> TierStore:
        """Open the store under test below `self.path`."""
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        """Open an empty store."""
        self.store = self.open_store()

    @rule(numbers=_PREFIXES)
    def put(self, numbers: list[int]) -> None:
        """Store some chunks, known ones among them."""
        assert self.store is not None
        keys = [self.keys[number] for number in numbers]
        are_stored = self.store.put(keys, np.stack([self.chunks[key] for key in keys]))
        assert len(are_stored) == len(keys)
        assert all(are_stored) or not self.roomy, f"not all chunks are stored: {are_stored}"
        self.accepted.update(keys)

    @rule(numbers=_PREFIXES)
    def get(self, numbers: list[int]) -> None:
        """Load some chunks and compare."""
        assert self.store is not None
        keys = [self.keys[number] for number in numbers]
        matched = self.store.match_prefix(keys).chunk_count
        out = np.full((len(keys), self.manifest.chunk_bytes(0)), _UNTOUCHED, np.uint8)
        found = self.store.get(keys, out)
        assert all(found[:matched]), f"matched {matched}, found {found}"
        for key, row, is_found in zip(keys, out, found, strict=True):
            if is_found:
                assert key in self.accepted, f"found {key.hex()}, which was never put"
                assert np.array_equal(row, self.chunks[key]), f"wrong bytes for {key.hex()}"
            else:
                assert (row == _UNTOUCHED).all(), f"a missed row was written: {key.hex()}"
                assert not self.roomy or key not in self.accepted, f"lost {key.hex()}"

    @rule()
    def flush(self) -> None:
        """Bring everything to the tiers."""
        assert self.store is not None
        self.store.flush()

    @rule()
    def restart(self) -> None:
        """Close and open again."""
        assert self.store is not None
        self.store.close()
        self.store = self.open_store()

    @rule()
    def reset(self) -> None:
        """Forget everything; nothing may be found afterwards."""
        assert self.store is not None
        self.store.reset()
        assert not any(self.store.match_prefix([key]).chunk_count for key in self.keys)
        self.accepted.clear()

    @invariant()
    def sound(self) -> None:
        """Find no problem in any tier."""
        if self.store is not None:
            assert self.store.check() == []

    def teardown(self) -> None:
        """Remove the store."""
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.path, ignore_errors=True)


def make_store_machine(
    open_store: Callable[[Path, Manifest], TierStore], manifest: Manifest, *, roomy: bool
) -> type[StoreMachine]:
    """Return a state machine class; pytest runs its `TestCase`.

    Args:
        open_store: opens the store under test below a directory, again after each restart.
        manifest: one group; its chunk size decides how much the machine writes.
        roomy: the tiers hold 64 chunks, and a restart loses none of them.
    """
    keys = make_offload_keys(manifest.namespace, 0, spread_hashes(range(_KEY_COUNT)))
    members = {
        "manifest": manifest,
        "roomy": roomy,
        "keys": keys,
        "chunks": {key: chunk_of(key, manifest.chunk_bytes(0)) for key in keys},
        "open_store": lambda machine: open_store(machine.path, manifest),
    }
    return type("StoreMachineUnderTest", (StoreMachine,), members)
