"""A device that refuses some kinds of calls until it is told not to."""

import errno
import os

from tierstore.device.system import DatabasePoint, SystemCalls


class FailingDevice(SystemCalls):
    """System calls of which those in `codes` fail, by the name of the call or the point."""

    def __init__(self):
        self.codes = {}

    def refuse(self, *calls, code=errno.EIO):
        self.codes = dict.fromkeys(calls, code)

    def heal(self):
        self.codes = {}

    def _strike(self, call):
        code = self.codes.get(call)
        if code is not None:
            raise OSError(code, os.strerror(code))

    def pwritev(self, fd, buffers, offset):
        self._strike("pwritev")
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd, offset, size_bytes):
        self._strike("allocate")
        super().allocate(fd, offset, size_bytes)

    def flush(self, fd):
        self._strike("flush")
        super().flush(fd)

    def reach(self, point):
        self._strike(point)


PAYLOAD_CALLS = {
    "write": ("file", ["pwritev"]),
    "allocate": ("file", ["allocate"]),
    "fdatasync": ("file", ["flush"]),
    "lmdb write": ("lmdb", [DatabasePoint.WRITE]),
    "lmdb commit": ("lmdb", [DatabasePoint.COMMIT]),
    "lmdb sync": ("lmdb", [DatabasePoint.SYNC]),
}
"""What can fail of a payload, by name: the backend, and the calls."""
CATALOG_POINTS = {
    "write": DatabasePoint.WRITE,
    "commit": DatabasePoint.COMMIT,
    "sync": DatabasePoint.SYNC,
}
