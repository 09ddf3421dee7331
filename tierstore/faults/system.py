"""System calls of which some go wrong, as a `Striker` decides."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.device.system import SYSTEM, DatabasePoint, SystemCalls
from tierstore.faults.strike import Call, Strike, Striker

__all__ = ["DATABASE_CALLS", "SYSTEM_CALLS", "StruckSystem"]

DATABASE_CALLS = tuple(f"database.{point.value}" for point in DatabasePoint)
"""Names of the points of a database, in rules."""

_SECTOR_BYTES = 512
_GARBAGE = b"\xee"


class StruckSystem(SystemCalls):
    """The calls of a system, each of which a striker is asked about before.

    Parts of writes, and wrong bytes, are written through a descriptor of their own without
    O_DIRECT, so that a write can be torn at any byte.
    """

    def __init__(
        self,
        striker: Striker,
        *,
        tier: str = "",
        root: Path | None = None,
        directory: Path | None = None,
        real: SystemCalls = SYSTEM,
    ) -> None:
        """Wrap `real`; files are named relative to `root`, a database by its `directory`."""
        self._striker = striker
        self._tier = tier
        self._root = root
        self._directory = directory
        self._real = real
        self._first_segment: int | None = None
        """Segments are numbered from anywhere; in a trace they count from this one."""

    def at_database(self, directory: Path) -> SystemCalls:
        """Return the same for the database below `directory`."""
        return StruckSystem(
            self._striker,
            tier=self._tier,
            root=self._root,
            directory=directory,
            real=self._real.at_database(directory),
        )

    def open(self, path: Path | str, flags: int, directory: int | None = None) -> int:
        """Open, or not."""
        self._ask("open", self._path(path, directory))
        return self._real.open(path, flags, directory)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read; perhaps fewer bytes, or wrong ones."""
        return self._read("preadv", partial(self._real.preadv, fd), _named(fd), buffers, offset)

    def copy_mapped(self, address: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy; perhaps fewer bytes, or wrong ones."""
        return self._read(
            "copy_mapped", partial(self._real.copy_mapped, address), "", buffers, offset
        )

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write; perhaps a part, other bytes, or nothing."""
        size = sum(map(len, buffers))
        strike = self._ask("pwritev", _named(fd), size)
        if strike is None:
            return self._real.pwritev(fd, buffers, offset)
        if strike.kind == "lose":
            return size
        content = bytearray().join(buffers)
        if strike.kind in {"flip", "zero"}:
            _spoil(memoryview(content), strike)
            return self._write_anyhow(fd, content, offset)
        written = self._write_anyhow(fd, content[: strike.at_bytes], offset)
        if strike.kind != "short":
            strike.fail()
        return written

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve; perhaps a part, or nothing."""
        self._change("allocate", partial(self._real.allocate, fd), _named(fd), offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        """Punch; perhaps a part, or nothing."""
        self._change(
            "punch_hole", partial(self._real.punch_hole, fd), _named(fd), offset, size_bytes
        )

    def flush(self, fd: int) -> None:
        """Flush, or not."""
        if self._ask("flush", _named(fd)) is None:
            self._real.flush(fd)

    def unlink(self, path: Path | str, directory: int | None = None) -> None:
        """Unlink, or not."""
        if self._ask("unlink", self._path(path, directory)) is None:
            self._real.unlink(path, directory)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Truncate, or not."""
        if self._ask("truncate", _named(fd)) is None:
            self._real.truncate(fd, size_bytes)

    def reach(self, point: DatabasePoint) -> None:
        """Pass a point, or not."""
        directory = self._directory
        self._ask(f"database.{point.value}", "" if directory is None else os.fspath(directory))
        self._real.reach(point)

    def _ask(self, name: str, file: str, size_bytes: int = 0) -> Strike | None:
        """Return what happens to the bytes of a call; fail it if nothing happens to them."""
        strike = self._striker.strike(Call(name, self._tier, self._below_root(file), size_bytes))
        if strike is not None:
            is_whole = strike.kind in {"error", "memory"}
            if is_whole or (strike.kind in {"kill", "exit"} and not strike.has_part):
                strike.fail()
        return strike

    def _read(
        self,
        name: str,
        call: Callable[[Sequence[memoryview], int], int],
        file: str,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        strike = self._ask(name, file, sum(map(len, buffers)))
        moved = call(buffers, offset)
        if strike is None or moved == 0:
            return moved
        content = bytearray().join(buffers)
        if strike.kind == "short":
            moved = min(moved, strike.at_bytes)
            content[moved:] = _GARBAGE * (len(content) - moved)
        elif strike.kind in {"flip", "zero"}:
            _spoil(memoryview(content)[:moved], strike)
        start = 0
        for buffer in buffers:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)
        return moved

    def _change(
        self, name: str, call: Callable[[int, int], None], file: str, offset: int, size_bytes: int
    ) -> None:
        strike = self._ask(name, file, size_bytes)
        if strike is None:
            call(offset, size_bytes)
        elif strike.kind != "lose":
            if strike.at_bytes:
                call(offset, strike.at_bytes)
            strike.fail()

    def _write_anyhow(self, fd: int, content: bytearray, offset: int) -> int:
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(content):
                rest = memoryview(content)[done:]
                done += self._real.pwritev(other, [rest], offset + done)
            return done
        finally:
            os.close(other)

    def _path(self, path: Path | str, directory: int | None) -> str:
        return os.fspath(path if directory is None else Path(_named(directory)) / path)

    def _below_root(self, file: str) -> str:
        """Return a name that is the same in every run."""
        file = file.removesuffix(" (deleted)")
        if self._root is not None and Path(file).is_relative_to(self._root):
            file = os.fspath(Path(file).relative_to(self._root))
        head, unnamed, _ = file.partition("/#")  # a file without a name, told by its inode
        if unnamed or file.startswith("#"):
            return "unnamed"
        return self._counted(head)

    def _counted(self, file: str) -> str:
        folder, _, name = file.rpartition("/")
        try:
            number = int(name.removesuffix(".seg"), 16) if name.endswith(".seg") else None
        except ValueError:
            number = None
        if number is None:
            return file
        if self._first_segment is None:
            self._first_segment = number
        return f"{folder}/{(number - self._first_segment + 1) & 0xFFFFFFFF:08x}.seg"


def _named(fd: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    return ""


def _spoil(content: memoryview, strike: Strike) -> None:
    """Flip one bit, or zero the sector around it."""
    at = strike.at_bytes % len(content)
    if strike.kind == "flip":
        content[at] ^= 1 << (strike.at_bytes % 8)
        return
    start = at - at % _SECTOR_BYTES
    sector = content[start : start + _SECTOR_BYTES]
    sector[:] = bytes(len(sector))


def _asking(name: str) -> Callable[..., Any]:
    """Return a method for a call that knows waits, failures and deaths only."""

    def call(self: StruckSystem, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else ""
        file = _named(target) if isinstance(target, int) else str(target)
        self._ask(name, file)
        return getattr(self._real, name)(*args, **kwargs)

    return call


_NO_CALLS = {"reach", "at_database"}
_CALLS = {name for name in vars(SystemCalls) if not name.startswith("_")} - _NO_CALLS
for _name in _CALLS - vars(StruckSystem).keys():
    setattr(StruckSystem, _name, _asking(_name))

SYSTEM_CALLS = tuple(sorted(_CALLS))
"""Names of the system calls, in rules."""
