"""A device that fails, hangs and heals when somebody says so: all calls of all tiers that use it.

device = ControlledDevice()
TierStore.open(config, manifest, open_system=lambda tier: device)
device.hang()
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tierstore.system import DatabasePoint, SystemCalls

__all__ = ["ControlledDevice"]


class ControlledDevice(SystemCalls):
    """The kernel, but for what it was told; thread-safe."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._code = 0
        self.strike_count = 0
        """Calls that failed or hung."""

    def fail(self, code: int) -> None:
        """Let every call from now on raise an OSError with this errno."""
        self._code = code

    def hang(self) -> None:
        """Let every call from now on wait for `heal`."""
        self._goes_on.clear()

    def heal(self) -> None:
        """Let all calls do what they do, those that hang too."""
        self._code = 0
        self._goes_on.set()

    def _call(self) -> None:
        if not self._goes_on.is_set():
            self.strike_count += 1
            self._goes_on.wait()
        code = self._code
        if code:
            self.strike_count += 1
            raise OSError(code, os.strerror(code))

    def open(self, path: Path | str, flags: int, directory: int | None = None) -> int:
        self._call()
        return super().open(path, flags, directory)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call()
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._call()
        super().allocate(fd, offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        self._call()
        super().punch_hole(fd, offset, size_bytes)

    def flush(self, fd: int) -> None:
        self._call()
        super().flush(fd)

    def unlink(self, path: Path | str, directory: int | None = None) -> None:
        self._call()
        super().unlink(path, directory)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._call()
        super().truncate(fd, size_bytes)

    def copy_mapped(self, address: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call()
        return super().copy_mapped(address, buffers, offset)

    def reach(self, point: DatabasePoint) -> None:
        self._call()
