"""The data file of an LMDB environment that no process has open: verified, sealed, replaced.

    data.mdb   the library's data file
    seal.bin   size and checksum of the data file as its last user left it. Absent while the file
               is used, unless it did not fit: its users suspect what the file says
    distrust   a note: what the rows say cannot be right

A seal that fits proves every bit. Where it does not fit, or there is none (a process was killed),
the structure of the file is verified, page by page: see `verify`. A file with a damaged
structure, or without one, is removed: what was in it is a cache. To verify pages and rows at each
opening instead would be slower, and blind for what keys and values say. For the locks see `lock`.
"""

import logging
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_intdigest

from tierstore.bounded_log import bounded
from tierstore.device.directory import Directory
from tierstore.errors import BackendError
from tierstore.lmdb_env.image import image_bytes
from tierstore.lmdb_env.lock import LIBRARY_LOCK_NAME, library_lock, opening_lock
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.lmdb_env.verify import find_damage

__all__ = [
    "DATA_NAME",
    "DISTRUST_NAME",
    "SEAL_NAME",
    "SealFindings",
    "admit",
    "announce",
    "break_seal",
    "distrust",
    "file_ids",
    "replace_damaged",
    "seal",
]

_logger = bounded(logging.getLogger(__name__))

DATA_NAME = "data.mdb"
SEAL_NAME = "seal.bin"
DISTRUST_NAME = "distrust"
_SEALED = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")

_READ_BYTES = 1 << 20
_PAGE_BYTES_MIN = 4096
_BLOCK_BYTES = 512
_COMPRESSION_MAX = 16
"""By which a file system may make a data file smaller."""

_UNWRITTEN_BYTES_MAX = 1 << 20
_HOLES_BYTES_MAX = 1 << 30
"""A file with larger holes was not written by the library; it would be read for hours."""

_CAUSE_BYTES_MAX = 1000
_FILE_WAIT_SECONDS = 0.3
"""A long file that is as it was left is open after that in most cases."""
_PAGES_WAIT_SECONDS = 0.05
"""To wait longer would not help: the pages of a long file, and then its rows, take seconds."""
_SEAL_WAIT_SECONDS_MAX = 5.0
"""A closing process waits so long for others that open or close; no seal does no harm."""


@dataclass(frozen=True, slots=True)
class SealFindings:
    """What was found before the library opened a data file."""

    damage: str = ""
    """What was wrong with a file that was removed; empty: none was."""
    is_suspect: bool = False
    """It is not as it was left, but its structure is sound: what it says must be verified."""
    is_alone: bool = True
    """No other process had it open."""
    is_proven: bool = False
    """It is as it was left, bit by bit."""


def announce(directory: Directory, pace: VerifyPace) -> None:
    """Let it be known how long the opening may take, whoever verifies the file."""
    with suppress(OSError):  # there is none yet
        pace.begin(directory.status(DATA_NAME).st_size, _FILE_WAIT_SECONDS)


def admit(
    directory: Directory,
    *,
    map_bytes: int,
    wait_seconds_max: float,
    pace: VerifyPace = UNHURRIED,
) -> SealFindings:
    """Prepare the files for the library, and verify them unless another process has them open.

    A damaged data file is removed, so that the library starts a new one. Under `opening_lock`. In
    steps of `pace`; one that is ended has changed nothing.

    Raises:
        ClosedError: see `VerifyPace.step`.
        BackendError: see `library_lock` and `Directory.open_file`.
        OSError: the files cannot be read or written.
    """
    with library_lock(directory, wait_seconds_max=wait_seconds_max) as lock:
        lock.prepare_file()
        sealed = directory.read(SEAL_NAME, _SEALED.size + _CHECKSUM.size) or b""
        if not lock.is_alone:
            _require_data(directory)
            return SealFindings(is_suspect=bool(sealed), is_alone=False)
        seal_fits = _fits(sealed, directory, pace)
        damage = _noted_damage(directory)
        if not damage and seal_fits is not True:
            damage = _find_damage(directory, map_bytes, pace)
        if damage:
            _remove(directory, damage)
        is_suspect = seal_fits is False and not damage
        # Not by the library: its file would have the mode that the process's mask leaves.
        os.close(directory.open_file(DATA_NAME, os.O_RDWR | os.O_CREAT))
        is_proven = seal_fits is True and not damage
        return SealFindings(damage, is_suspect=is_suspect, is_proven=is_proven)


def break_seal(directory: Directory, findings: SealFindings) -> None:
    """Remove the seal of a file that is used from now on. Under `opening_lock`.

    Last, so that a process that is killed before, or refuses the file, has changed nothing. A
    suspicion stays until the next seal.

    Raises:
        OSError: it cannot be removed.
    """
    if findings.is_alone and not findings.is_suspect:
        with suppress(FileNotFoundError):
            directory.unlink(SEAL_NAME)


def replace_damaged(
    directory: Directory, cause: str, *, wait_seconds_max: float
) -> SealFindings | None:
    """Remove a data file that the library refused; None: another process has it open.

    Under `opening_lock`.

    Raises:
        BackendError, OSError: as `admit`.
    """
    with library_lock(directory, wait_seconds_max=wait_seconds_max) as lock:
        if not lock.is_alone:
            return None
        _remove(directory, cause)
        lock.prepare_file()
        os.close(directory.open_file(DATA_NAME, os.O_RDWR | os.O_CREAT))
        return SealFindings(cause)


def seal(directory: Directory) -> None:
    """Seal the data file, unless another process has it open or distrusts it.

    Never raises: a file without a seal is verified in another way.
    """
    wait = _SEAL_WAIT_SECONDS_MAX
    with (
        suppress(OSError, BackendError),
        opening_lock(directory, wait_seconds_max=wait),
        library_lock(directory, wait_seconds_max=wait) as lock,
    ):
        if lock.is_alone and not directory.has_file(DISTRUST_NAME):
            fingerprint = _fingerprint(directory)
            if fingerprint is not None:
                content = _SEALED.pack(*fingerprint)
                content += _CHECKSUM.pack(xxh3_64_intdigest(content))
                directory.write(SEAL_NAME, content)


def distrust(directory: Directory, cause: str) -> None:
    """Let the next process that has the files for itself start with an empty one; never raises."""
    with suppress(OSError, BackendError):
        directory.write(DISTRUST_NAME, cause.encode()[:_CAUSE_BYTES_MAX] or b"?")


def file_ids(path: Path) -> set[tuple[int, int]]:
    """Return device and inode of the library's files below a path; of those that are there."""
    found: set[tuple[int, int]] = set()
    for name in (DATA_NAME, LIBRARY_LOCK_NAME):
        with suppress(OSError):
            status = (path / name).lstat()
            found.add((status.st_dev, status.st_ino))
    return found


def _require_data(directory: Directory) -> None:
    # A new file would be used with the table of readers, and the mutexes, of the old one.
    if not directory.has_file(DATA_NAME):
        raise BackendError(
            f"{directory.path / DATA_NAME}: was removed or replaced while another process has it "
            "open; end that process, or let it open its path again"
        )
    directory.tighten_file(DATA_NAME)


def _noted_damage(directory: Directory) -> str:
    content = directory.read(DISTRUST_NAME, _CAUSE_BYTES_MAX)
    if content is None:
        return ""
    # A process that is killed while it notes it leaves a part of the words.
    words = "".join(filter(str.isprintable, content.decode(errors="replace")))
    return words or "it was distrusted"


def _remove(directory: Directory, damage: str) -> None:
    for name in (DATA_NAME, DISTRUST_NAME):
        with suppress(FileNotFoundError):
            directory.unlink(name)
    _logger.warning(
        "database damaged, replaced by an empty one: directory=%s cause=%s", directory.path, damage
    )


def _fits(sealed: bytes, directory: Directory, pace: VerifyPace) -> bool | None:
    """Return whether a seal fits; None: there is none, or it is damaged itself."""
    expected, checksum = sealed[: _SEALED.size], sealed[_SEALED.size :]
    if checksum != _CHECKSUM.pack(xxh3_64_intdigest(expected)):
        return None
    try:
        fingerprint = _fingerprint(directory, _SEALED.unpack(expected)[0], pace)
    except FileNotFoundError:
        return None
    return fingerprint is not None and _SEALED.pack(*fingerprint) == expected


def _find_damage(directory: Directory, map_bytes: int, pace: VerifyPace) -> str:
    """Return what is wrong with the data file; cut off what lies behind a sound one."""
    try:
        descriptor = directory.open_file(DATA_NAME, os.O_RDWR)
    except FileNotFoundError:
        return ""
    try:
        status = os.fstat(descriptor)
        if _has_holes(status):
            return "data file: larger than what was ever written to it"
        # A map may be of any size. The last pages of a file may be missing: allocated, and
        # freed before they were written.
        bytes_max = min(map_bytes, 2 * status.st_size + _UNWRITTEN_BYTES_MAX)
        pace.begin(status.st_size, _PAGES_WAIT_SECONDS)
        damage = find_damage(descriptor, page_count_max=bytes_max // _PAGE_BYTES_MIN, pace=pace)
        if not damage and status.st_size:
            _cut_off(descriptor, image_bytes(descriptor))
    except MemoryError:
        return "data file: too large to be verified"
    else:
        return damage
    finally:
        os.close(descriptor)


def _cut_off(descriptor: int, size_bytes: int) -> None:
    # Left by a transaction that failed, or foreign: no capacity is charged for it.
    if os.fstat(descriptor).st_size > size_bytes:
        os.ftruncate(descriptor, size_bytes)


def _fingerprint(
    directory: Directory, size_bytes: int | None = None, pace: VerifyPace = UNHURRIED
) -> tuple[int, int] | None:
    """Return size and checksum; about 35 ms for 200 MiB in the kernel's cache.

    None: the file is of another size than `size_bytes`, or has too large holes to be read.
    """
    checksum = xxh3_64()
    size = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    descriptor = directory.open_file(DATA_NAME, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if size_bytes not in {None, status.st_size} or _has_holes(status):
            return None
        while count := os.readv(descriptor, [buffer]):
            checksum.update(buffer[:count])
            size += count
            pace.step()
    finally:
        os.close(descriptor)
    return size, checksum.intdigest()


def _has_holes(status: os.stat_result) -> bool:
    return status.st_size > _COMPRESSION_MAX * status.st_blocks * _BLOCK_BYTES + _HOLES_BYTES_MAX
