"""The marker of a tier's path: a file that says that all below it is ours, to change and remove.

    tierstore directory, version 1
    <xxh3_64 of the first line, as 16 hexadecimal digits>

It is written before anything else, into an empty directory. A directory with other content is not
ours. A directory of an earlier release has no marker, but a catalog.
"""

import logging
import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from xxhash import xxh3_64_intdigest

from tierstore.bounded_log import bounded
from tierstore.device.directory import Directory
from tierstore.device.ownership import foreign_user
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.errors import BackendError, BackendForeignError

__all__ = ["MARKER_NAME", "claim", "is_marked", "open_below"]

_logger = bounded(logging.getLogger(__name__))

MARKER_NAME = ".tierstore"

_FIRST = b"tierstore directory, version "
_VERSION = 1
_CONTENT_BYTES_MAX = 64
_FRESH = frozenset({"lost+found"})
"""What a new file system brings with it."""

_STICKY = 0o1000
_SHARED = ("/", "/boot", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/usr", "/var")
"""Besides the user's home; and all that has the sticky bit."""

_NAMED_COUNT_MAX = 3
_LISTED_COUNT_MAX = 100


def claim(path: Path, *, system: SystemCalls = SYSTEM) -> Directory:
    """Open the path of a tier, made if it is not there; mark it as ours if it is empty.

    Nothing is changed in what is refused. The path may be a link: it is the user's choice.

    Raises:
        BackendForeignError: it is not empty and not ours, or belongs to all users, or to another
            one.
        OSError: it cannot be opened or written.
    """
    base = Directory.open(path, create=True, system=system)
    try:
        _refuse_shared(base)
        _refuse_foreign(base)
        base.tighten()
        _mark(base, system)
    except BaseException:
        base.close()
        raise
    return base


def is_marked(base: Directory) -> bool:
    """Return whether a directory is the path of a tier."""
    return base.has_file(MARKER_NAME)


def open_below(
    tier: Path | None, path: Path, *, create: bool = False, system: SystemCalls = SYSTEM
) -> Directory:
    """Open a directory below the path of a tier, following no link below that.

    With `create` it is made, unless the path is not marked: it was removed, and perhaps made again
    by another program. Without a tier, any directory by its path.

    Raises:
        BackendError: the path is not a tier's, or something on the way belongs to another user.
        OSError: it is not there, or cannot be made or opened.
    """
    if tier is None:
        return Directory.open(path, create=create, system=system)
    opened = Directory.open(tier, system=system)
    try:
        if create:
            _require_marked(opened)
        for part in path.relative_to(tier).parts:
            outer, opened = opened, opened.subdirectory(part, create=create)
            outer.close()
    except BaseException:
        opened.close()
        raise
    return opened


def _require_marked(base: Directory) -> None:
    if not is_marked(base):
        raise BackendError(
            f"{base.path}: has no file {MARKER_NAME}, so nothing is written there until a store "
            "opens it"
        )


def _refuse_shared(base: Directory) -> None:
    status = os.fstat(base.descriptor)
    is_shared = bool(status.st_mode & _STICKY)
    shared = list(map(Path, _SHARED))
    with suppress(RuntimeError):  # a user without a home
        shared.append(Path.home())
    for path in shared:
        with suppress(OSError):
            is_shared |= os.path.samestat(path.stat(), status)
    if is_shared:
        raise BackendForeignError(
            f"{base.path}: is not for one program alone; choose a directory of the tier's own "
            "below it"
        )
    if status.st_uid != os.geteuid():
        raise BackendForeignError(foreign_user(base.path, status))


def _refuse_foreign(base: Directory) -> None:
    if is_marked(base) or _is_earlier_tier(base):
        return
    listed = (entry.name for entry in base.entries() if entry.name not in _FRESH)
    names = list(islice(listed, _LISTED_COUNT_MAX))
    # Another opener may have marked it since we looked first.
    if names and not is_marked(base):
        shown = ", ".join(ascii(name[:40]) for name in sorted(names)[:_NAMED_COUNT_MAX])
        shown += " and more" if len(names) > _NAMED_COUNT_MAX else ""
        raise BackendForeignError(
            f"{base.path}: is not empty and not a tier's directory, it holds {shown}; choose an "
            "empty directory, or a new one"
        )


def _is_earlier_tier(base: Directory) -> bool:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        catalog = Directory(
            base.path / "catalog", os.open("catalog", flags, dir_fd=base.descriptor)
        )
    except OSError:
        return False
    with catalog:
        return catalog.has_file("data.mdb")


def _mark(base: Directory, system: SystemCalls) -> None:
    """Write the marker, also over a damaged or unfinished one; refuse another version."""
    content = base.read(MARKER_NAME, _CONTENT_BYTES_MAX)
    version = _version_of(content or b"")
    if version == _VERSION:
        return
    if version is not None:
        raise BackendForeignError(
            f"{base.path}: was made by another release of tierstore, which writes version "
            f"{version} of its directory; choose another path, or remove the directory"
        )
    if content:
        _logger.warning("marker damaged, written again: path=%s", base.path)
    base.write(MARKER_NAME, _content_of(_VERSION))
    # Who finds other files of ours after a power cut, and no marker, would refuse them.
    with suppress(OSError):  # not every file system can flush a directory
        system.flush(base.descriptor)


def _content_of(version: int) -> bytes:
    line = b"%s%d\n" % (_FIRST, version)
    return line + b"%016x\n" % xxh3_64_intdigest(line)


def _version_of(content: bytes) -> int | None:
    """Return the version that a marker names; None: it is damaged, or was not finished."""
    number = content.removeprefix(_FIRST).partition(b"\n")[0]
    if not number.isdigit() or content != _content_of(int(number)):
        return None
    return int(number)
