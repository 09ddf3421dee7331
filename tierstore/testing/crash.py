"""What a kill or a power cut may leave of a tier's files, at every write of a scenario.

    recorder = CrashRecorder()
    with TierStore.open(config, manifest, open_system=recorder.open_system) as store:
        ...
        store.flush()
        recorder.mark("flushed")
    for length in range(recorder.length + 1):
        recorder.build(folder, length)                 # killed there
        recorder.build(other, length, dice=Random(7))  # power was cut there

A kill leaves what the kernel was told. A power cut leaves what was flushed, and of the rest any
part: each page has any of its later versions, each file may lack its last changes. What the library
of the databases writes is found by comparing their pages after each commit; files that are not
written through `SystemCalls` are compared as a whole. The locks of databases are left out.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tierstore.config import SecondaryConfig
from tierstore.device.system import SYSTEM, DatabasePoint, SystemCalls
from tierstore.layout import PAGE_BYTES

__all__ = ["CrashRecorder", "RecordedChange"]

_KEEP_SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)
"""Of what was not flushed, so much is kept: none, some, all."""

_DATABASE = "data.mdb"
_OMITTED = ("lock.mdb", "opening.lock")


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """One change of one file below a tier's path, or a mark between two of them."""

    kind: str
    """`create`, `write`, `allocate`, `truncate`, `punch`, `unlink`, `flush`, or `mark`."""
    file: str = ""
    offset: int = 0
    size_bytes: int = 0
    content: bytes = b""
    note: object = None


class CrashRecorder:
    """Keeps what one tier asks of its device, in the order in which it was done. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a call is made and noted, so that the order is the true one."""
        self._changes: list[RecordedChange] = []
        self._known: dict[str, bytes] = {}
        """The content of databases and small files, as of the last look."""
        self._is_durable = False

    @property
    def length(self) -> int:
        """How many changes there are."""
        with self.lock:
            return len(self._changes)

    def open_system(self, config: SecondaryConfig) -> SystemCalls:
        """Return system calls that are recorded; what `TierStore.open` takes as `open_system`."""
        self._is_durable |= config.io.durable
        return _RecordingSystem(self, config.path)

    def mark(self, note: object) -> None:
        """Note what the caller was promised at this point."""
        with self.lock:
            self._changes.append(RecordedChange("mark", note=note))

    def marks(self, length: int) -> list[object]:
        """Return the notes within the first `length` changes."""
        with self.lock:
            return [one.note for one in self._changes[:length] if one.kind == "mark"]

    def record(self, change: RecordedChange) -> None:
        """Note one change."""
        with self.lock:
            self._changes.append(change)

    def look(self, root: Path) -> None:
        """Record what changed in files that are not written through `SystemCalls`.

        To be called after a store was closed, too: it is sealed then.
        """
        with self.lock:
            here = set()
            for path in sorted(root.rglob("*")):
                if path.suffix == ".seg" or path.name in _OMITTED or path.name[0] == ".":
                    continue
                try:
                    if path.is_file():
                        here.add(file := os.fspath(path.relative_to(root)))
                        self._compare(file, path.read_bytes())
                except FileNotFoundError:
                    continue
            for file in self._known.keys() - here:
                del self._known[file]
                self._changes.append(RecordedChange("unlink", file))

    def build(self, folder: Path, length: int, *, dice: Random | None = None) -> None:
        """Make the files below `folder`, which is new: after `length` changes, and a crash.

        Without `dice` the process was killed, with them power was cut.
        """
        with self.lock:
            changes = self._changes[:length]
        folder.mkdir(parents=True)
        if dice is not None:
            changes = _surviving(changes, dice)
        for change in changes:
            if change.kind not in {"mark", "flush"}:
                _apply(folder / change.file, change)

    def _compare(self, file: str, content: bytes) -> None:
        known = self._known.get(file)
        if known is None:
            self._changes.append(RecordedChange("create", file))
        if known == content:
            return
        self._known[file] = content
        before = known or b""
        if not file.endswith(_DATABASE):
            self._changes.append(RecordedChange("truncate", file, size_bytes=0))
            self._changes.append(RecordedChange("write", file, content=content))
            return
        if len(content) < len(before):
            self._changes.append(RecordedChange("truncate", file, size_bytes=len(content)))
        offsets = range(0, len(content), PAGE_BYTES)
        # The meta pages are the first two, and are written last.
        for offset in [*offsets[2:], *offsets[:2]]:
            if offset == 0 and self._is_durable:
                # Of a durable tier, the library flushes a commit before its meta page.
                self._changes.append(RecordedChange("flush", file))
            page = content[offset : offset + PAGE_BYTES]
            if page != before[offset : offset + PAGE_BYTES]:
                self._changes.append(RecordedChange("write", file, offset, content=page))


class _RecordingSystem(SystemCalls):
    def __init__(self, recorder: CrashRecorder, root: Path, database: Path | None = None) -> None:
        self._recorder = recorder
        self._root = root
        self._database = database

    def at_database(self, directory: Path) -> SystemCalls:
        return _RecordingSystem(self._recorder, self._root, directory)

    def open(self, path: Path | str, flags: int, directory: int | None = None) -> int:
        with self._recorder.lock:
            fd = super().open(path, flags, directory)
            if flags & os.O_CREAT and os.fstat(fd).st_size == 0:
                self._note("create", self._file(fd))
            return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._recorder.lock:
            count = super().pwritev(fd, buffers, offset)
            self._note("write", self._file(fd), offset, content=b"".join(buffers)[:count])
            return count

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        with self._recorder.lock:
            super().allocate(fd, offset, size_bytes)
            self._note("allocate", self._file(fd), offset, size_bytes)

    def punch_hole(self, fd: int, offset: int, size_bytes: int) -> None:
        with self._recorder.lock:
            super().punch_hole(fd, offset, size_bytes)
            self._note("punch", self._file(fd), offset, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        with self._recorder.lock:
            super().truncate(fd, size_bytes)
            self._note("truncate", self._file(fd), size_bytes=size_bytes)

    def flush(self, fd: int) -> None:
        with self._recorder.lock:
            super().flush(fd)
            self._note("flush", self._file(fd))

    def unlink(self, path: Path | str, directory: int | None = None) -> None:
        with self._recorder.lock:
            folder = Path() if directory is None else Path(f"/proc/self/fd/{directory}").readlink()
            super().unlink(path, directory)
            self._note("unlink", self._below_root(folder / path))

    def reach(self, point: DatabasePoint) -> None:
        with self._recorder.lock:
            self._recorder.look(self._root)
            if point is DatabasePoint.SYNC and self._database is not None:
                # What is committed while it is flushed may be lost: all that is known is kept.
                self._note("flush", self._below_root(self._database / _DATABASE))

    def _note(
        self, kind: str, file: str, offset: int = 0, size_bytes: int = 0, content: bytes = b""
    ) -> None:
        if file:
            self._recorder.record(RecordedChange(kind, file, offset, size_bytes, content))

    def _file(self, fd: int) -> str:
        return self._below_root(Path(f"/proc/self/fd/{fd}").readlink())

    def _below_root(self, path: Path) -> str:
        """Return its name; nothing of a file without one, which no crash leaves."""
        is_left_out = path.name.endswith(" (deleted)") or path.name in _OMITTED
        if is_left_out or not path.is_relative_to(self._root):
            return ""
        return os.fspath(path.relative_to(self._root))


def _surviving(changes: Sequence[RecordedChange], dice: Random) -> list[RecordedChange]:
    """Return what a power cut leaves: all that was flushed, and any part of the rest."""
    flushed = {change.file: i for i, change in enumerate(changes) if change.kind == "flush"}
    share = dice.choice(_KEEP_SHARES)
    kept = []
    for i, change in enumerate(changes):
        if i < flushed.get(change.file, 0):
            kept.append(change)
        elif change.kind == "write":
            kept += [page for page in _pages(change) if dice.random() < share]
        elif dice.random() < share or change.kind == "create":
            kept.append(change)
    return kept


def _pages(change: RecordedChange) -> list[RecordedChange]:
    return [
        RecordedChange(
            "write",
            change.file,
            change.offset + start,
            content=change.content[start : start + PAGE_BYTES],
        )
        for start in range(0, len(change.content), PAGE_BYTES)
    ]


def _apply(path: Path, change: RecordedChange) -> None:
    if change.kind == "unlink":
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if change.kind == "write":
            os.pwrite(fd, change.content, change.offset)
        elif change.kind == "allocate":
            SYSTEM.allocate(fd, change.offset, change.size_bytes)
        elif change.kind == "truncate":
            os.ftruncate(fd, change.size_bytes)
        elif change.kind == "punch":
            SYSTEM.punch_hole(fd, change.offset, change.size_bytes)
    finally:
        os.close(fd)
