"""The data file of an LMDB environment while nobody has it open: verified, sealed, started anew.

    data.mdb   the library's data file
    lock.mdb   the library's lock file; who has the environment open holds its first byte
    seal.bin   size and checksum of the data file as its last user left it; absent while it is used
    distrust   a note: what the rows say cannot be right

A seal that fits proves every bit. Where it does not fit, or there is none (a process was killed),
the structure of the file is verified, page by page: see `lmdb_image`. A file with a damaged
structure is removed: what was in it is a cache.
"""

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_intdigest

from tierstore.lmdb_image import find_damage

__all__ = ["LOCK_FILE_BYTES", "Admission", "admit", "distrust", "seal"]

_logger = logging.getLogger(__name__)

LOCK_FILE_BYTES = 16 << 10
"""Bytes of an environment's lock file: 64 per reader, rounded up with room."""

_DATA, _LOCK, _SEAL, _DISTRUST = "data.mdb", "lock.mdb", "seal.bin", "distrust"
_SEALED = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64 bits: type, whence, start, length, process (0)."""

_READ_BYTES = 1 << 20
_PAGE_BYTES_MIN = 4096
_UNWRITTEN_BYTES_MAX = 64 << 20
_CAUSE_BYTES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Admission:
    """What was found before the library opened a data file."""

    damage: str = ""
    """What was wrong with a file that was removed, in words; empty: none was."""
    is_suspect: bool = False
    """It is not as it was left, but its structure is sound: what it says must be verified."""


def admit(directory: Path, *, map_bytes: int) -> Admission:
    """Prepare the files for the library, and verify them unless another process has them open.

    A damaged data file is removed, so that the library starts a new one.

    Raises:
        OSError: the files cannot be read or written.
    """
    with _alone(directory) as is_alone:
        if not is_alone:
            return Admission()
        path = directory / _DATA
        seal_fits = _break_seal(directory)
        damage = _noted_distrust(directory)
        if not damage and seal_fits is not True and path.exists():
            damage = _find_damage(path, map_bytes)
        if damage:
            path.unlink(missing_ok=True)
            (directory / _DISTRUST).unlink(missing_ok=True)
            _logger.warning(
                "database damaged, started anew: directory=%s cause=%s", directory, damage
            )
        return Admission(damage, is_suspect=seal_fits is False and not damage)


def seal(directory: Path) -> None:
    """Seal the data file, unless another process has it open or somebody distrusts it.

    Never raises: a file without a seal is verified in another way.
    """
    with suppress(OSError), _alone(directory) as is_alone:
        if is_alone and not (directory / _DISTRUST).exists():
            content = _SEALED.pack(*_fingerprint(directory / _DATA))
            content += _CHECKSUM.pack(xxh3_64_intdigest(content))
            (directory / _SEAL).write_bytes(content)


def distrust(directory: Path, cause: str) -> None:
    """Let the next process that has the files for itself start anew; never raises."""
    with suppress(OSError):
        (directory / _DISTRUST).write_bytes(cause.encode()[:_CAUSE_BYTES_MAX] or b"?")


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Say whether no process has the environment open, and keep it so.

    Others that want to open it wait in the library, and take it as they find it. Its lock file has
    all its blocks afterwards: the library writes to it through a mapping, which in a file with
    holes on a device without room ends the process by SIGBUS.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(directory / _LOCK, flags, 0o644)
    try:
        # A file that others have mapped keeps its size, which says how many readers it holds.
        os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size or LOCK_FILE_BYTES)
        # The library's own lock, but of this description: it conflicts with those of the library
        # in this process too, and closing another descriptor of the file does not drop it.
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except OSError:  # another process has it, or the file system knows no such locks
            is_alone = False
        else:
            is_alone = True
        yield is_alone
    finally:
        os.close(descriptor)


def _break_seal(directory: Path) -> bool | None:
    """Remove the seal and say whether it fits; None: there is none, or it is damaged itself."""
    path = directory / _SEAL
    try:
        sealed = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink()
    expected, checksum = sealed[: _SEALED.size], sealed[_SEALED.size :]
    if checksum != _CHECKSUM.pack(xxh3_64_intdigest(expected)):
        return None
    try:
        return _SEALED.pack(*_fingerprint(directory / _DATA)) == expected
    except FileNotFoundError:
        return None


def _noted_distrust(directory: Path) -> str:
    try:
        return (directory / _DISTRUST).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _find_damage(path: Path, map_bytes: int) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A map may be of any size. The last pages of a file may be missing: allocated, and freed
        # before they were written.
        bytes_max = min(map_bytes, 2 * os.fstat(descriptor).st_size + _UNWRITTEN_BYTES_MAX)
        return find_damage(descriptor, page_count_max=bytes_max // _PAGE_BYTES_MIN)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> tuple[int, int]:
    """Return size and checksum; about 35 ms for 200 MiB in the kernel's cache."""
    checksum = xxh3_64()
    size = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
            size += count
    return size, checksum.intdigest()
