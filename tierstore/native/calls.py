"""The calls of `extent_io.c`, as Python sees them."""

import ctypes
from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.codec.record import PLACE_DTYPE, pack_identity
from tierstore.key import OffloadKey
from tierstore.manifest import FORMAT_VERSION
from tierstore.native.known_file import KnownFile

__all__ = [
    "DONE",
    "IMPOSSIBLE",
    "SHORT",
    "UNTRIED",
    "ExtentCalls",
    "HashFunction",
    "IoTask",
    "Run",
    "WriteEnd",
]

DONE = 0
"""The status of what was moved, and verified if it was read; positive ones are an errno."""
UNTRIED = -1
SHORT = -2
"""The device stopped a write without an error."""
IMPOSSIBLE = -3
"""No record can have this place, or its slot has another length."""

_MAGIC = int.from_bytes(pack_identity(OffloadKey(b""), 0, FORMAT_VERSION, rank=0)[:8], "little")


class WriteEnd(IntEnum):
    """How a write ended, as far as known files are concerned."""

    WRITTEN = 0
    NOT_BEGUN = 1
    """One was not in its place, or its device did not tell: nothing was written."""
    NOT_KEPT = 2
    """One that had to stay in its place did not, or its device did not tell."""


HashFunction: TypeAlias = Any
"""A function of a library, as ctypes has it."""


class Run(ctypes.Structure):
    """Records that are moved by one system call: `run_t`."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("header_offset", ctypes.c_int64),
        ("segment", ctypes.c_uint32),
        ("segment_pages", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("first_header_page", ctypes.c_uint32),
        ("last_header_page", ctypes.c_uint32),
        ("first_extent", ctypes.c_uint32),
        ("last_extent", ctypes.c_uint32),
        ("fd", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )
    if TYPE_CHECKING:
        offset: int
        header_offset: int
        segment: int
        segment_pages: int
        first: int
        count: int
        first_header_page: int
        last_header_page: int
        first_extent: int
        last_extent: int
        fd: int
        status: int


class _Batch(ctypes.Structure):
    """`batch_t`."""

    _fields_ = (
        ("hash", ctypes.c_void_p),
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("places", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_void_p),
        ("keys", ctypes.c_char_p),
        ("key_ends", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("room_pages", ctypes.c_uint64),
    )


class ExtentCalls:
    """The functions of one loaded library. Thread-safe."""

    def __init__(self, path: Path, hash_function: HashFunction) -> None:
        """Load the library; `hash_function` is xxh3_64 of a buffer.

        Raises:
            OSError: it cannot be loaded.
            AttributeError: it is another library.
        """
        # Planning is too short to give the interpreter away, and to wait until it comes back.
        planning, moving = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        planning.tierstore_source_mark.restype = ctypes.c_uint64
        self.source_mark = int(planning.tierstore_source_mark())
        """Which version of the source the library was compiled from (`compiling.source_mark`)."""
        self.hash_address = ctypes.cast(hash_function, ctypes.c_void_p).value or 0
        self.plan_writes = _declared(planning.tierstore_plan_writes, ctypes.c_uint64)
        self.plan_reads = _declared(planning.tierstore_plan_reads, ctypes.c_int64)
        pointer, count = ctypes.c_void_p, ctypes.c_uint64
        self.has_match = planning.tierstore_has_match
        """Whether any of some searches (`search_t`; address and count) has a match."""
        self.has_match.restype, self.has_match.argtypes = ctypes.c_int32, (pointer, count)
        known = (count, pointer, count)
        self.write = _declared(moving.tierstore_write, ctypes.c_int32, *known, count)
        self.read = _declared(moving.tierstore_read, ctypes.c_int64, *known)


def _declared(function: HashFunction, answer: type[Any], *more: type[Any]) -> HashFunction:
    function.restype = answer
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *more)
    return function


class IoTask:
    """The records of one I/O task, as the library wants them. One thread.

    Keeps what it points to; the caller keeps the memory of the slots.
    """

    def __init__(
        self,
        calls: ExtentCalls,
        keys: Sequence[OffloadKey],
        places: npt.NDArray[np.void],
        addresses: npt.NDArray[np.uint64],
        slot_bytes: npt.NDArray[np.int64],
        *,
        rank: int,
        room: npt.NDArray[np.uint8],
        room_pages: int,
    ) -> None:
        """Describe records by arrays of one length; header pages arrive in `room`.

        Raises:
            ValueError: the arrays do not fit each other.
        """
        count = len(keys)
        if not len(places) == len(addresses) == len(slot_bytes) == count:
            raise ValueError(f"expected arrays of {count} records")
        arrays = (
            np.ascontiguousarray(places.view(PLACE_DTYPE)),
            np.ascontiguousarray(addresses, np.uint64),
            np.ascontiguousarray(slot_bytes, np.int64),
        )
        joined = b"".join(keys)
        key_ends = array("I", accumulate(map(len, keys)))
        self._calls = calls
        self._room = room
        self.statuses = (ctypes.c_int32 * count)()
        """Per record, after a read."""
        self.order = (ctypes.c_uint32 * count)()
        """The records in the order of the runs."""
        self.runs = (Run * count)()
        """As many as were planned are meant."""
        self._kept = (arrays, joined, key_ends)
        self._batch = _Batch(
            calls.hash_address,
            _MAGIC,
            FORMAT_VERSION,
            rank,
            count,
            *(each.ctypes.data for each in arrays),
            joined,
            key_ends.buffer_info()[0],
            ctypes.addressof(self.statuses),
            ctypes.addressof(self.order),
            room.ctypes.data,
            room_pages,
        )
        self._at = ctypes.addressof(self._batch)

    def plan_writes(self) -> list[Run]:
        """Divide the records into extents; those that cannot be are IMPOSSIBLE."""
        return self.runs[: self._calls.plan_writes(self._at, self.runs)]

    def plan_reads(self) -> list[Run]:
        """Sort the records with possible places and divide them into runs.

        Raises:
            MemoryError: there is no memory for it.
        """
        count = self._calls.plan_reads(self._at, self.runs)
        if count < 0:
            raise MemoryError
        return self.runs[:count]

    def write(
        self, run_count: int, known: Sequence[KnownFile] = (), *, kept_count: int = 0
    ) -> WriteEnd:
        """Write the first `run_count` runs, as far as they have descriptors and are UNTRIED.

        All `known` files must be in their places before, the first `kept_count` after it, too.
        """
        files = (KnownFile * len(known))(*known)
        end = self._calls.write(self._at, self.runs, run_count, files, len(known), kept_count)
        return WriteEnd(end)

    def read(self, first: int, stop: int, known: Sequence[KnownFile] = ()) -> bool | None:
        """Read and verify the runs [first, stop) of one pass; return whether all are DONE.

        A pass has as many extents as the room has pages. None: nothing was read, as one of the
        `known` files is not in its place, or its device does not tell.
        """
        runs = ctypes.addressof(self.runs) + first * ctypes.sizeof(Run)
        files = (KnownFile * len(known))(*known)
        done = self._calls.read(self._at, runs, stop - first, files, len(known))
        return None if done < 0 else bool(done == stop - first)
