"""In which units a file system allocates and frees a file's blocks, measured on the path.

Most do both page by page, and can allocate blocks before they are written. But the unit may be a
cluster (ext4 with bigalloc), a huge page (tmpfs) or what an administrator has set (XFS); there may
be no allocation ahead of writes (ext4 without extents), and no holes. `st_blocks` tells what a file
takes, so that is measured.
"""

import errno
import fcntl
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from xxhash import xxh3_64_intdigest

from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError
from tierstore.layout import PAGE_BYTES

__all__ = [
    "FULL",
    "PAGE_UNITS",
    "UNSUPPORTED",
    "BlockUnits",
    "forbid_speculation",
    "measure_units",
    "unnamed_file",
]

FULL = {errno.ENOSPC, errno.EDQUOT}
"""The device has no room."""
UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM}
"""The file system cannot do what it was asked for."""

_BLOCK_BYTES = 512
_UNIT_BYTES_MAX = 2 << 20
"""Larger units are not tried: only the removal of a whole file frees them, then."""
_PROBE_BYTES = 2 * _UNIT_BYTES_MAX
_ROOM_BYTES_MIN = 2 * _PROBE_BYTES
"""With less room, a file system may give out smaller pieces than it does otherwise."""
_PROBE_FACTOR = 4

_ATTRIBUTES = struct.Struct("=5I8x")
"""The kernel's `struct fsxattr`: flags, size of extents, and others."""
_GET_ATTRIBUTES = 0x801C581F
_SET_ATTRIBUTES = 0x401C5820
_FLAG_EXTENT_SIZE_INHERITED = 0x1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUnits:
    """What a path's file system does with blocks. Pages are those of `PAGE_BYTES`."""

    unit_pages: int = 1
    """Aligned pieces of a file that take their blocks, and give them back, as a whole."""
    metadata_pages: int = 1
    """What a directory, or a block of a file's own tables, takes."""
    frees_parts: bool = True
    """A hole gives blocks back; otherwise only the removal of a file does."""
    allocates: bool = True
    """A file can be given its blocks before they are written."""

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<4I")
    _CHECKSUM: ClassVar[struct.Struct] = struct.Struct("<Q")

    @property
    def is_paged(self) -> bool:
        """Whether every page comes back by itself."""
        return self.unit_pages == 1 and self.frees_parts

    def merged(self, other: Self) -> Self:
        """Return the units that hold wherever one of both does."""
        return type(self)(
            unit_pages=max(self.unit_pages, other.unit_pages),
            metadata_pages=max(self.metadata_pages, other.metadata_pages),
            frees_parts=self.frees_parts and other.frees_parts,
            allocates=self.allocates and other.allocates,
        )

    def pack(self) -> bytes:
        """Return them as bytes, with a checksum: nothing else says how large units once were."""
        content = self._LAYOUT.pack(
            self.unit_pages, self.metadata_pages, self.frees_parts, self.allocates
        )
        return content + self._CHECKSUM.pack(xxh3_64_intdigest(content))

    @classmethod
    def unpack(cls, value: bytes) -> Self | None:
        """Return what `pack` packed; None: the bytes are damaged."""
        content, checksum = value[: cls._LAYOUT.size], value[cls._LAYOUT.size :]
        if checksum != cls._CHECKSUM.pack(xxh3_64_intdigest(content)):
            return None
        unit_pages, metadata_pages, frees_parts, allocates = cls._LAYOUT.unpack(content)
        if not (unit_pages and metadata_pages and max(frees_parts, allocates) <= 1):
            return None
        return cls(
            unit_pages=unit_pages,
            metadata_pages=metadata_pages,
            frees_parts=bool(frees_parts),
            allocates=bool(allocates),
        )

    def whole(self, page_count: int) -> int:
        """Round pages up to whole pieces."""
        return -(-page_count // self.unit_pages) * self.unit_pages

    def table_pages(self, page_count: int) -> int:
        """Return what a file system may spend on the tables of a file that is full of holes.

        ext4 keeps 340 extents per block outside the inode, 84 in blocks of 1 KiB; the worst file
        alternates single pages. Without extents each block of 1 KiB names 256 others.
        """
        if self.is_paged and self.allocates:
            return 2 + page_count // 512
        if self.unit_pages == 1:
            return (4 + page_count // 200) * self.metadata_pages
        return (1 + page_count // self.unit_pages // 64) * self.metadata_pages


PAGE_UNITS = BlockUnits()
"""Of most file systems."""


def measure_units(directory: Path, system: SystemCalls) -> tuple[BlockUnits, bool]:
    """Try out what the file system of a directory does, on a file without a name.

    The directory is made if need be. Up to 4 MiB of the device are used for a moment, usually
    16 KiB.

    Returns:
        The units, and whether they are certain: on a device that is nearly full they are not.

    Raises:
        BackendError: the directory cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = unnamed_file(directory, system)
    except OSError as error:
        if error.errno in FULL:
            return PAGE_UNITS, False
        raise BackendError(f"{directory}: {error}; make the path writable") from error
    try:
        return _measure(fd, directory, system)
    except OSError as error:
        if error.errno in (*FULL, errno.EFBIG):
            return _expected(fd), False
        raise BackendError(
            f"{directory}: {error}; check the health of the device, and the limits of this process"
        ) from error
    finally:
        os.close(fd)


def forbid_speculation(directory: Path, system: SystemCalls) -> None:
    """Let new files of a directory, made if need be, have no blocks but those that are written.

    XFS gives a file that grows up to as much again ahead, which no capacity knows of; not if it
    was told in which pieces to give. Others are not asked, for they refuse or ignore it.
    """
    with suppress(OSError):  # the first use of the directory reports what is wrong with it
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = system.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            attributes = bytearray(_ATTRIBUTES.size)
            fcntl.ioctl(fd, _GET_ATTRIBUTES, attributes)
            flags, extent_bytes, *others = _ATTRIBUTES.unpack(attributes)
            if not extent_bytes:
                flags |= _FLAG_EXTENT_SIZE_INHERITED
                wanted = _ATTRIBUTES.pack(flags, PAGE_BYTES, *others)
                fcntl.ioctl(fd, _SET_ATTRIBUTES, wanted)
        finally:
            os.close(fd)


def unnamed_file(directory: Path, system: SystemCalls) -> int:
    """Return the descriptor of a new file that is gone when it is closed.

    Raises:
        OSError: the directory cannot be written.
    """
    try:
        return system.open(directory, os.O_RDWR | os.O_TMPFILE)
    except OSError as error:
        # EISDIR: a kernel or file system that takes the flag for O_DIRECTORY.
        if error.errno not in (*UNSUPPORTED, errno.EISDIR, errno.ENOENT):
            raise
    path = directory / f".probe-{os.urandom(8).hex()}"
    fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    system.unlink(path)
    return fd


def _measure(fd: int, directory: Path, system: SystemCalls) -> tuple[BlockUnits, bool]:
    volume = os.statvfs(directory)
    is_certain = volume.f_bavail * volume.f_frsize >= _ROOM_BYTES_MIN
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    page[:] = os.urandom(PAGE_BYTES)  # neither compressed nor shared
    # Some give out large pieces within a file that is large enough only.
    system.truncate(fd, _PROBE_BYTES)
    allocates = _fill(fd, 0, 1, page, system)
    taken_bytes = _taken_bytes(fd)
    if not taken_bytes:
        system.flush(fd)
        taken_bytes = _taken_bytes(fd)
    unit_pages = max(1, -(-taken_bytes // PAGE_BYTES)) if taken_bytes else _expected(fd).unit_pages
    freed_pages = _freed_pages(fd, unit_pages, page, system)
    folder_pages = -(-directory.stat().st_blocks * _BLOCK_BYTES // PAGE_BYTES)
    units = BlockUnits(
        unit_pages=max(unit_pages, freed_pages),
        metadata_pages=max(1, min(folder_pages, unit_pages)),
        frees_parts=freed_pages > 0,
        allocates=allocates,
    )
    return units if is_certain else units.merged(_expected(fd)), is_certain


def _expected(fd: int) -> BlockUnits:
    """Return what a file system says of itself; not all of them tell the truth."""
    said_pages = os.fstat(fd).st_blksize // PAGE_BYTES
    return BlockUnits(unit_pages=max(1, min(said_pages, _UNIT_BYTES_MAX // PAGE_BYTES)))


def _freed_pages(fd: int, unit_pages: int, page: memoryview, system: SystemCalls) -> int:
    """Return the smallest aligned piece that a hole gives back; 0: none does."""
    piece_pages = unit_pages
    while piece_pages * PAGE_BYTES <= _UNIT_BYTES_MAX:
        _fill(fd, 0, 2 * piece_pages, page, system)
        size_bytes = piece_pages * PAGE_BYTES
        before = _taken_bytes(fd)
        try:
            system.punch_hole(fd, size_bytes, size_bytes)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                return 0
            raise
        if before - _taken_bytes(fd) < size_bytes:
            system.flush(fd)
        if before - _taken_bytes(fd) >= size_bytes:
            return piece_pages
        piece_pages *= _PROBE_FACTOR
    return 0


def _fill(fd: int, first_page: int, page_count: int, page: memoryview, system: SystemCalls) -> bool:
    """Give a range its blocks, and write to its ends; return whether both are two things.

    Where they are one, the whole range is written and flushed: blocks may be chosen late.
    """
    size_bytes = page_count * PAGE_BYTES
    pages = range(first_page, first_page + page_count)
    try:
        system.allocate(fd, first_page * PAGE_BYTES, size_bytes)
        allocates = True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        allocates = False
    for number in {pages[0], pages[-1]} if allocates else pages:
        system.pwritev(fd, [page], number * PAGE_BYTES)
    if not allocates:
        system.flush(fd)
    return allocates


def _taken_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * _BLOCK_BYTES
