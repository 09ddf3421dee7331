"""Vectored calls that are repeated until all buffers are moved."""

from collections.abc import Callable, Sequence

from tierstore.device.system import IOVEC_COUNT_MAX
from tierstore.layout import PAGE_BYTES

__all__ = ["move_all"]


def move_all(
    call: Callable[[int, Sequence[memoryview], int], int],
    target: int,
    buffers: list[memoryview],
    offset: int,
) -> int:
    """Repeat a vectored call until all buffers are moved, or it makes no progress.

    It continues at page boundaries only, as O_DIRECT demands; bytes behind the last boundary are
    moved again. Two calls in a row that move less than a page end it: after the first, the cause
    may have passed, or the second call reports it.

    Returns:
        The bytes moved: whole pages, or all.
    """
    size_bytes = sum(map(len, buffers))
    moved_bytes = 0
    is_stuck = False
    while moved_bytes < size_bytes:
        moved = call(target, buffers[:IOVEC_COUNT_MAX], offset + moved_bytes)
        if moved_bytes + moved == size_bytes:
            return size_bytes
        was_stuck, is_stuck = is_stuck, moved < PAGE_BYTES
        if moved <= 0 or (is_stuck and was_stuck):
            break
        moved -= moved % PAGE_BYTES
        moved_bytes += moved
        buffers = _behind(buffers, moved)
    return moved_bytes


def _behind(buffers: list[memoryview], moved_bytes: int) -> list[memoryview]:
    """Return what is left of the buffers behind their first `moved_bytes`."""
    for position, buffer in enumerate(buffers):
        if moved_bytes < len(buffer):
            return [buffer[moved_bytes:], *buffers[position + 1 :]]
        moved_bytes -= len(buffer)
    return []
