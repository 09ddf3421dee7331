"""The data file of an LMDB environment while nobody has it open: verified, sealed, started anew.

    data.mdb   the library's data file
    seal.bin   size and checksum of the data file as its last user left it; absent while it is used,
               but by those who found that it does not fit: they suspect what it says
    distrust   a note: what the rows say cannot be right

A seal that fits proves every bit. Where it does not fit, or there is none (a process was killed),
the structure of the file is verified, page by page: see `lmdb_image`. A file with a damaged
structure is removed: what was in it is a cache. For the locks that this takes see `lmdb_lock`.
"""

import logging
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_intdigest

from tierstore.bounded_log import bounded
from tierstore.errors import BackendError
from tierstore.lmdb_image import find_damage
from tierstore.lmdb_lock import LIBRARY_LOCK_NAME, library_lock, opening_lock, regular_file

__all__ = ["Admission", "admit", "distrust", "file_ids", "seal"]

_logger = bounded(logging.getLogger(__name__))

_DATA, _SEAL, _DISTRUST = "data.mdb", "seal.bin", "distrust"
_SEALED = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")

_READ_BYTES = 1 << 20
_PAGE_BYTES_MIN = 4096
_UNWRITTEN_BYTES_MAX = 64 << 20
_CAUSE_BYTES_MAX = 1000
_SEAL_WAIT_SECONDS_MAX = 5.0
"""Who closes waits so long for others that open or close; a file without a seal is no harm."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What was found before the library opened a data file."""

    damage: str = ""
    """What was wrong with a file that was removed, in words; empty: none was."""
    is_suspect: bool = False
    """It is not as it was left, but its structure is sound: what it says must be verified."""


def admit(directory: Path, *, map_bytes: int, wait_seconds_max: float) -> Admission:
    """Prepare the files for the library, and verify them unless another process has them open.

    A damaged data file is removed, so that the library starts a new one. Under `opening_lock`.

    Raises:
        BackendError: see `library_lock`; or something that is no file has the name of one.
        OSError: the files cannot be read or written.
    """
    path = directory / _DATA
    with library_lock(directory, wait_seconds_max=wait_seconds_max) as lock:
        lock.prepare_file()
        sealed = _read(directory / _SEAL, _SEALED.size + _CHECKSUM.size)
        if not lock.is_alone:
            return Admission(is_suspect=bool(sealed))
        seal_fits = _fits(sealed, path)
        damage = _read(directory / _DISTRUST, _CAUSE_BYTES_MAX).decode(errors="replace")
        if not damage and seal_fits is not True:
            damage = _find_damage(path, map_bytes)
        if damage:
            path.unlink(missing_ok=True)
            (directory / _DISTRUST).unlink(missing_ok=True)
            _logger.warning(
                "database damaged, started anew: directory=%s cause=%s", directory, damage
            )
        is_suspect = seal_fits is False and not damage
        if not is_suspect:
            # Last, so that who is killed before has changed nothing. A suspicion stays until the
            # next seal: it concerns those too who come before the rows are verified.
            (directory / _SEAL).unlink(missing_ok=True)
        return Admission(damage, is_suspect=is_suspect)


def seal(directory: Path) -> None:
    """Seal the data file, unless another process has it open or somebody distrusts it.

    Never raises: a file without a seal is verified in another way.
    """
    wait = _SEAL_WAIT_SECONDS_MAX
    with (
        suppress(OSError, BackendError),
        opening_lock(directory, wait_seconds_max=wait),
        library_lock(directory, wait_seconds_max=wait) as lock,
    ):
        if lock.is_alone and not (directory / _DISTRUST).exists():
            content = _SEALED.pack(*_fingerprint(directory / _DATA))
            content += _CHECKSUM.pack(xxh3_64_intdigest(content))
            _write(directory / _SEAL, content)


def distrust(directory: Path, cause: str) -> None:
    """Let the next process that has the files for itself start anew; never raises."""
    with suppress(OSError, BackendError):
        _write(directory / _DISTRUST, cause.encode()[:_CAUSE_BYTES_MAX] or b"?")


def file_ids(directory: Path) -> set[tuple[int, int]]:
    """Return device and inode of the library's files; of those that are there."""
    found: set[tuple[int, int]] = set()
    for name in (_DATA, LIBRARY_LOCK_NAME):
        with suppress(OSError):
            status = (directory / name).stat()
            found.add((status.st_dev, status.st_ino))
    return found


def _fits(sealed: bytes, path: Path) -> bool | None:
    """Return whether a seal fits; None: there is none, or it is damaged itself."""
    expected, checksum = sealed[: _SEALED.size], sealed[_SEALED.size :]
    if checksum != _CHECKSUM.pack(xxh3_64_intdigest(expected)):
        return None
    try:
        return _SEALED.pack(*_fingerprint(path)) == expected
    except FileNotFoundError:
        return None


def _find_damage(path: Path, map_bytes: int) -> str:
    try:
        with regular_file(path, os.O_RDONLY) as descriptor:
            # A map may be of any size. The last pages of a file may be missing: allocated, and
            # freed before they were written.
            bytes_max = min(map_bytes, 2 * os.fstat(descriptor).st_size + _UNWRITTEN_BYTES_MAX)
            return find_damage(descriptor, page_count_max=bytes_max // _PAGE_BYTES_MIN)
    except FileNotFoundError:
        return ""


def _fingerprint(path: Path) -> tuple[int, int]:
    """Return size and checksum; about 35 ms for 200 MiB in the kernel's cache."""
    checksum = xxh3_64()
    size = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with regular_file(path, os.O_RDONLY) as descriptor:
        while count := os.readv(descriptor, [buffer]):
            checksum.update(buffer[:count])
            size += count
    return size, checksum.intdigest()


def _read(path: Path, size_max: int) -> bytes:
    """Return the beginning of a small file; nothing if there is none."""
    try:
        with regular_file(path, os.O_RDONLY) as descriptor:
            return os.read(descriptor, size_max)
    except FileNotFoundError:
        return b""


def _write(path: Path, content: bytes) -> None:
    with regular_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        os.write(descriptor, content)
