"""Placement, population and inheritance of the pool's pages: calls that Python does not wrap."""

import ctypes
import logging
import platform
from functools import cache

from tierstore.bounded_log import bounded

__all__ = ["bind_to_node", "keep_from_children", "prefault"]

_logger = bounded(logging.getLogger(__name__))

_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES_MAX = 64


def prefault(address: int, size_bytes: int) -> bool:
    """Give pages to a page-aligned range without changing a byte of it; may be in use.

    False: the kernel cannot (before Linux 5.14, or out of memory). Whoever touches or pins the
    pages first then takes them one by one.
    """
    return int(_libc().madvise(address, size_bytes, _MADV_POPULATE_WRITE)) == 0


def bind_to_node(address: int, size_bytes: int, node: int) -> bool:
    """Let pages of a page-aligned range that are not there yet come from a NUMA node.

    A preference: where the node is full, others help out. False: the kernel refused.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _NODES_MAX:
        return False
    mask = ctypes.c_ulong(1 << node)
    # The kernel reads one bit less than it is told.
    done = _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_NODES_MAX + 1),
        ctypes.c_uint(0),
    )
    if done != 0:
        _logger.info("NUMA placement refused: node=%d errno=%d", node, ctypes.get_errno())
    return int(done) == 0


def keep_from_children(address: int, size_bytes: int) -> bool:
    """Leave a page-aligned range out of processes forked from this one.

    A page that is shared after a fork moves when its owner writes to it, but a device goes on to
    read and write where the page was when it was pinned. Newer kernels copy pinned pages for the
    child instead; older ones do not. False: the kernel refused.
    """
    done = _libc().madvise(address, size_bytes, _MADV_DONTFORK)
    if done != 0:
        _logger.warning("do not fork: pinned memory is shared, errno=%d", ctypes.get_errno())
    return int(done) == 0


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.syscall.restype = ctypes.c_long
    return libc
