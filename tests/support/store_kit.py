"""Stores on a real file system, chunks that are a function of their key, and real `du`."""

import os
from pathlib import Path

import numpy as np

from tierstore import Manifest, TierStore, make_offload_keys
from tierstore.testing.spread import spread_hashes
from tierstore.testing.store_machine import chunk_of

MIB = 1 << 20


def config_of(path, *, backend="file", primary="8MiB", capacity="64MiB", **tier):
    return {
        "version": 1,
        "primary": {"capacity": primary},
        "secondary": [
            {"name": "disk", "backend": backend, "path": str(path), "capacity": capacity, **tier}
        ],
    }


class Chunks:
    """The keys and bytes of numbered chunks of one model."""

    def __init__(self, chunk_bytes=65_536, model="faults"):
        self.manifest = Manifest.simple(model, chunk_bytes=chunk_bytes)
        self.chunk_bytes = chunk_bytes

    def open(self, config) -> TierStore:
        return TierStore.open(config, self.manifest)

    def keys(self, numbers):
        return make_offload_keys(self.manifest.namespace, 0, spread_hashes(numbers))

    def array(self, numbers):
        rows = [chunk_of(key, self.chunk_bytes) for key in self.keys(numbers)]
        return np.array(rows, np.uint8).reshape(len(rows), self.chunk_bytes)

    def put(self, store, numbers):
        """Return how many of the chunks the store has now."""
        return sum(self.put_each(store, numbers))

    def put_each(self, store, numbers):
        return store.put(self.keys(numbers), self.array(numbers))

    def found(self, store, numbers):
        """Return the numbers that `get` finds, having compared every byte."""
        numbers = list(numbers)
        out = np.full((len(numbers), self.chunk_bytes), 0xA5, np.uint8)
        is_found = store.get(self.keys(numbers), out)
        expected = self.array(numbers)
        for row, (number, hit) in enumerate(zip(numbers, is_found, strict=True)):
            if hit:
                assert np.array_equal(out[row], expected[row]), f"wrong bytes for chunk {number}"
            else:
                assert (out[row] == 0xA5).all(), f"the row of missing chunk {number} was written"
        return [number for number, hit in zip(numbers, is_found, strict=True) if hit]


def du(path) -> int:
    """Return the bytes that everything below a path takes on disk, as `du` counts them."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            try:
                total += os.lstat(Path(folder) / name).st_blocks * 512
            except FileNotFoundError:  # removed meanwhile
                continue
    return total


def misses(store):
    """Return the counted misses by reason."""
    counters = store.stats().counters
    return {
        name.split('"')[1]: count for name, count in counters.items() if name.startswith("misses")
    }
