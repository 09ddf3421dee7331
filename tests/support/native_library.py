"""The native library for tests: compiled from the tree, whatever is installed."""

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tierstore.device.system import SystemCalls, buffer_address
from tierstore.native.compiling import compile_library
from tierstore.native.library import Loaded, load_library

_HERE = Path(__file__).resolve().parent
_STRICT = ["-Werror", "-Wshadow", "-Wconversion"]


def interpreted() -> Loaded:
    """Return what a `FileBackend` finds where there is no library."""
    return Loaded(None, "this test asks for the interpreter")


def native() -> Loaded:
    """Return the library; the test is skipped where nothing compiles it."""
    return load_library(compiled())


@cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="tierstore-native-")


@cache
def compiled(*flags):
    target = Path(_folder().name, f"libextent_io{abs(hash(flags))}.so")
    why = compile_library(target, more_flags=[*_STRICT, *flags])
    if why == "there is no C compiler":
        pytest.skip(why)
    assert why == ""
    return target


class ScriptedKernel:
    """Vectored calls that go by a script, of the native library and of the interpreter alike."""

    def __init__(self) -> None:
        path = compiled(str(_HERE / "scripted_calls.c"), "-Wl,-Bsymbolic")
        self._library = ctypes.CDLL(str(path), use_errno=True)
        for function in (self._library.preadv64, self._library.pwritev64):
            function.restype = ctypes.c_ssize_t
            function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        self._path = path
        self.begin([])  # the library is one, and may have a script that was not played to its end

    def native(self) -> Loaded:
        return load_library(self._path)

    def begin(self, outcomes) -> None:
        """Let each call move at most so many bytes, or fail with a negative errno."""
        script = (ctypes.c_int64 * len(outcomes))(*outcomes)
        self._library.scripted_begin(script, len(outcomes))

    def rename(self, path, target) -> None:
        """Let the next call rename a file before it moves anything."""
        self._library.scripted_rename(os.fsencode(path), os.fsencode(target))

    @property
    def call_count(self) -> int:
        return self._library.scripted_calls()

    def system(self) -> SystemCalls:
        """Return system calls that go by the script, and are taken for the kernel's."""
        system = SystemCalls()
        system.preadv = self._call(self._library.preadv64)
        system.pwritev = self._call(self._library.pwritev64)
        return system

    def _call(self, function):
        def call(fd, buffers, offset):
            vectors = np.array([(buffer_address(b), len(b)) for b in buffers], np.uint64)
            while True:
                moved = function(fd, vectors.ctypes.data, len(buffers), offset)
                if moved >= 0:
                    return moved
                code = ctypes.get_errno()
                if code != 4:  # EINTR: Python calls again
                    raise OSError(code, os.strerror(code))

        return call
