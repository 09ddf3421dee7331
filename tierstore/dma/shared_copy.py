"""One copy of host memory, divided among threads."""

import ctypes
import threading
from collections import deque

import numpy as np

from tierstore.layout import PAGE_BYTES, round_up
from tierstore.transfer import IntArray

__all__ = ["Piece", "SharedCopy", "move", "pieces_of"]

Piece = tuple[IntArray, IntArray, IntArray]
"""Addresses of targets and sources, and bytes, of some runs."""


def pieces_of(runs: Piece, piece_count: int, part_bytes_min: int) -> list[Piece]:
    """Divide runs into up to `piece_count` pieces of about the same bytes.

    Runs are cut, so that one long run is divided, too: into parts of whole pages, of
    `part_bytes_min` or more.
    """
    targets, sources, sizes = runs
    total_bytes = int(sizes.sum())
    part_bytes = round_up(max(part_bytes_min, -(-total_bytes // piece_count)), PAGE_BYTES)
    part_counts = -(-sizes // part_bytes)
    run_of = np.repeat(np.arange(len(sizes)), part_counts)
    offsets = (np.arange(len(run_of)) - (np.cumsum(part_counts) - part_counts)[run_of]) * part_bytes
    parts = np.minimum(sizes[run_of] - offsets, part_bytes)
    # A part belongs to the piece in which it starts.
    piece_of = (np.cumsum(parts) - parts) * piece_count // max(1, total_bytes)
    cuts = np.flatnonzero(np.diff(piece_of)) + 1
    columns = (targets[run_of] + offsets, sources[run_of] + offsets, parts)
    return list(zip(*(np.split(column, cuts) for column in columns), strict=True))


class SharedCopy:
    """A copy in pieces: each thread takes the next one until none is left."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = deque(pieces)
        self._unfinished_count = len(pieces)
        # An interruption cannot keep a lock from being left, as it can a condition, which is left
        # by a function in Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def help(self) -> None:
        """Copy pieces until none is left."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            is_moved = False
            try:
                move(piece)
                is_moved = True
            finally:
                with self._lock:
                    if is_moved:
                        self._unfinished_count -= 1
                    else:  # no memory, say; to copy it once more does no harm
                        self._pieces.append(piece)
                    self._changed.notify_all()

    def finish(self) -> None:
        """Copy pieces, then wait for those that helpers took."""
        while self._unfinished_count:
            self.help()
            with self._lock:
                self._changed.wait_for(lambda: self._pieces or not self._unfinished_count)


def move(piece: Piece) -> None:
    """Copy runs one after the other; `memmove` releases the interpreter for each."""
    deque(map(ctypes.memmove, *(column.tolist() for column in piece)), maxlen=0)
