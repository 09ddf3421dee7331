"""A directory whose device can be made to hang, for good or for a while: `HangingDirectory`.

The directory is a mount (FUSE) that a process of its own serves from another directory. When that
process is stopped, whoever asks the directory anything waits in the kernel, as with a dead disk or
a server that is gone: reads, writes, page faults of mapped files. When it goes on, all of them do.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

__all__ = ["HangingDirectory", "why_there_is_none"]

_START_SECONDS_MAX = 60


def why_there_is_none() -> str:
    """Return why no such directory can be made here; empty: it can."""
    if os.geteuid() != 0:
        return "only root can mount"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    if find_library("fuse3") is None and find_library("fuse") is None:
        return "libfuse is not installed"
    return ""


class HangingDirectory:
    """Mounts `path`; to be used in a `with` block, which unmounts it whatever happened."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets two directories: what is mounted, and what it is served from."""
        self.path = folder / "mounted"
        self._served = folder / "served"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        self._served.mkdir()
        self._process = subprocess.Popen([sys.executable, __file__, self._served, self.path])
        until = time.monotonic() + _START_SECONDS_MAX
        while not os.path.ismount(self.path):
            assert self._process.poll() is None, "the server of the directory has ended"
            assert time.monotonic() < until, "the directory is not mounted"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        # A dead server ends all that hangs with an error, so that nobody waits for ever.
        self._process.kill()
        self._process.wait()
        subprocess.run(["umount", "--lazy", self.path], check=False)

    @property
    def process_id(self) -> int:
        """Of the server, for another process that stops it and lets it go on."""
        assert self._process is not None
        return self._process.pid

    def hang(self) -> None:
        """Let every question wait until `heal`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        """Answer again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def used_bytes(self) -> int:
        """Return the bytes that everything in it takes; does not hang."""
        status = [path.lstat() for path in [self._served, *self._served.rglob("*")]]
        return sum(entry.st_blocks for entry in status) * 512


def _serve(served: str, path: str) -> None:  # noqa: C901 - one short answer per question
    import mfusepy

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    class Passthrough(mfusepy.Operations):  # type: ignore[misc]
        """Does with a file below `served` what is asked of one below `path`."""

        use_ns = True

        def __init__(self) -> None:
            self._root = os.open(served, os.O_RDONLY)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = (
                os.stat(_relative(path), dir_fd=self._root, follow_symlinks=False)
                if fh is None
                else os.fstat(fh)
            )
            names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks", "rdev")
            times = ("atime_ns", "mtime_ns", "ctime_ns")
            answer = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
            return answer | {
                f"st_{n.removesuffix('_ns')}": getattr(found, f"st_{n}") for n in times
            }

        def readdir(self, path: str, fh: int) -> Any:
            descriptor = os.open(_relative(path), os.O_RDONLY, dir_fd=self._root)
            try:
                return [".", "..", *os.listdir(descriptor)]  # noqa: PTH208 - of a descriptor
            finally:
                os.close(descriptor)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            flags = os.O_RDWR | os.O_CREAT
            return os.open(_relative(path), flags, mode, dir_fd=self._root)

        def open(self, path: str, flags: int) -> int:
            # The kernel appends, and truncates by a call of its own.
            flags &= ~(os.O_DIRECT | os.O_APPEND | os.O_TRUNC)
            return os.open(_relative(path), flags, dir_fd=self._root)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            if fh is not None:
                os.ftruncate(fh, length)
                return
            descriptor = os.open(_relative(path), os.O_WRONLY, dir_fd=self._root)
            os.ftruncate(descriptor, length)
            os.close(descriptor)

        def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
            if libc.fallocate(fh, mode, offset, length):
                raise OSError(ctypes.get_errno(), "fallocate")
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fdatasync(fh)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def unlink(self, path: str) -> None:
            os.unlink(_relative(path), dir_fd=self._root)

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(_relative(path), mode, dir_fd=self._root)

        def rmdir(self, path: str) -> None:
            os.rmdir(_relative(path), dir_fd=self._root)

        def rename(self, old: str, new: str, *_: object) -> None:
            os.rename(_relative(old), _relative(new), src_dir_fd=self._root, dst_dir_fd=self._root)

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(_relative(path), mode, dir_fd=self._root)

        def utimens(self, path: str, times: Any = None) -> int:
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.fstatvfs(self._root)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    mfusepy.FUSE(Passthrough(), path, foreground=True, nothreads=False, max_idle_threads=8)


def _relative(path: str) -> str:
    return path.removeprefix("/") or "."


if __name__ == "__main__":
    _serve(*sys.argv[1:])
