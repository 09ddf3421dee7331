"""Block hashes for tests and benchmarks: spread as an engine's are, and the same at every run."""

import hashlib
from collections.abc import Iterable

__all__ = ["spread_hash", "spread_hashes"]


def spread_hash(name: object) -> bytes:
    """Return the block hash of 32 bytes that a number, or whatever `repr` tells apart, stands for.

    Hashes of counters must be spread: in the order of their numbers they would lie side by side in
    every index, and hide what an operation costs whose keys lie anywhere.
    """
    return hashlib.sha256(repr(name).encode()).digest()


def spread_hashes(names: Iterable[object]) -> list[bytes]:
    """Return the block hash of each name, in order."""
    return list(map(spread_hash, names))
