"""The library of `extent_io.c`: found, loaded and tried once per process."""

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xxhash import xxh3_64_intdigest

from tierstore.native.calls import ExtentCalls, HashFunction
from tierstore.native.compiling import LIBRARY, is_sealed, source_mark

__all__ = ["HASH_NAMES", "SWITCH", "Loaded", "find_library", "load_library"]

SWITCH = "TIERSTORE_NATIVE"
"""Environment variable; `0` moves bytes by the interpreter, and so does what nobody expects."""

HASH_NAMES = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""Names of xxh3_64 in the extension module of xxhash; the first one chooses by the processor."""
_ON = {"", "1"}
_TRIED_BYTES = bytes(range(256)) * 5


@dataclass(frozen=True, slots=True)
class Loaded:
    """The calls of the library, or why there are none."""

    calls: ExtentCalls | None
    why: str = ""
    """Why there are no calls, in words for a log."""


@cache
def find_library() -> Loaded:
    """Load the library of this installation, unless the environment forbids it."""
    switch = os.environ.get(SWITCH, "")
    if switch in _ON:
        return load_library(LIBRARY)
    if switch == "0":
        return Loaded(None, f"{SWITCH}=0")
    return Loaded(None, f"{SWITCH}={switch!r}; expected 0 or 1")


def load_library(path: Path, hash_names: Sequence[str] = HASH_NAMES) -> Loaded:
    """Load the library at `path`, and a hash function that xxhash brings, by one of its names."""
    if sys.byteorder != "little" or not sys.platform.startswith("linux"):
        return Loaded(None, "not built for this platform")
    try:
        if not path.is_file():
            return Loaded(None, "not compiled at the installation")
        if not is_sealed(path):
            return Loaded(None, "damaged, or no library; install again")
        function = _find_hash(hash_names)
        calls = ExtentCalls(path, function) if function is not None else None
        is_current = calls is not None and calls.source_mark == source_mark()
    except (ImportError, AttributeError, OSError) as error:
        return Loaded(None, str(error))
    if calls is None:
        return Loaded(None, "xxhash does not offer its functions to others")
    if not is_current:
        return Loaded(None, "compiled from another version; install again")
    return Loaded(calls)


def _find_hash(names: Sequence[str]) -> HashFunction | None:
    module = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__ or "")
    functions = (getattr(module, name, None) for name in names)
    return next((each for each in functions if each is not None and _hashes_alike(each)), None)


def _hashes_alike(function: HashFunction) -> bool:
    """Return whether a function gives the checksums of the format, for all kinds of lengths."""
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    lengths = (0, 1, 3, 8, 16, 120, 128, 240, 241, 1024, len(_TRIED_BYTES))
    return all(
        function(_TRIED_BYTES, length) == xxh3_64_intdigest(_TRIED_BYTES[:length])
        for length in lengths
    )
