"""What lies below the path of a tier and is not the tier's: how much it is, and its names."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstore.backend.names import RANK_PATTERN, SEGMENT_PATTERN, segment_number
from tierstore.config import SecondaryConfig
from tierstore.device.directory import Directory
from tierstore.device.marker import MARKER_NAME
from tierstore.device.ownership import FILE_MODE
from tierstore.device.remedies import explain
from tierstore.errors import BackendError, BackendForeignError

__all__ = ["foreign_content"]

_BLOCK_BYTES = 512

_REMOVED = re.compile(r"\.nfs[0-9a-f]{16,}", re.ASCII)

_FOREIGN_BYTES_MAX = 16 << 10
"""Foreign bytes that may stay: the share that is set aside for files around the records and that
they do not need."""

_FOREIGN_COUNT_MAX = 10_000
_DIRECTORY_BYTES_MAX = 1 << 20
"""Of the names in one directory; those of all segments that a tier may have take less."""

_NAMED_COUNT_MAX = 3
_NAME_LENGTH_MAX = 320


def foreign_content(config: SecondaryConfig, rank_count: int) -> str:
    """Return why what lies below the path and is not the tier's cannot stay; empty: it can.

    A little may stay. More would count against the capacity, and could never be evicted. Modes of
    the tier's files that are too wide are tightened.

    Raises:
        BackendForeignError: something of ours belongs to another user.
        BackendError: the path cannot be read.
    """
    survey = _Survey()
    try:
        with Directory.open(config.path) as base:
            own_names = _own_names(config, rank_count)
            names = ["catalog", "owners", *_rank_names(base)]
            for name in names:
                base.clear_for_directory(name)
            for entry in survey.foreign_in(base, _Own(own_names, directories=True)):
                survey.add(base, entry)
            for name in names:
                if own_names.fullmatch(name):
                    _survey_directory(survey, base, name, config)
    except OSError as error:
        raise BackendError(explain(config.path, error)) from error
    return survey.refusal(config.path)


def _rank_names(base: Directory) -> list[str]:
    return [entry.name for entry in base.entries() if RANK_PATTERN.fullmatch(entry.name)]


def _own_names(config: SecondaryConfig, rank_count: int) -> "re.Pattern[str]":
    names = [re.escape(MARKER_NAME), "catalog", "owners", r"lost\+found"]
    if config.backend != "lmdb":
        names.append(RANK_PATTERN.pattern)
    else:
        names += [f"rank{rank}" for rank in range(rank_count)]
    return re.compile("|".join(names), re.ASCII)


@dataclass(frozen=True, slots=True)
class _Own:
    """Which names in a directory are the tier's."""

    names: "re.Pattern[str]"
    directories: bool = False
    """Whether they are of directories."""

    def has(self, entry: "os.DirEntry[str]") -> bool:
        """Return whether something is what its name says."""
        if not self.names.fullmatch(entry.name):
            return False
        if self.names is SEGMENT_PATTERN and not segment_number(entry.name):
            return False
        is_directory = entry.is_dir(follow_symlinks=False)
        return is_directory == self.directories or entry.name == MARKER_NAME


_ENVIRONMENT = _Own(
    re.compile(r"(data|lock)\.mdb|seal\.bin|distrust|(opening|writer)\.lock", re.ASCII)
)
_OWNERS = _Own(re.compile(r"[0-9]{1,10}\.lock", re.ASCII))
_PAYLOAD = _Own(re.compile("payload", re.ASCII), directories=True)
_SEGMENTS = _Own(SEGMENT_PATTERN)


def _survey_directory(
    survey: "_Survey", base: Directory, name: str, config: SecondaryConfig
) -> None:
    own = {"catalog": _ENVIRONMENT, "owners": _OWNERS}.get(
        name, _SEGMENTS if config.backend != "lmdb" else _PAYLOAD
    )
    if not _is_directory(base, name):
        return
    with base.subdirectory(name) as directory:
        for entry in survey.foreign_in(directory, own):
            survey.add(directory, entry)
        if own is _PAYLOAD and _is_directory(directory, "payload"):
            with directory.subdirectory("payload") as payload:
                for entry in survey.foreign_in(payload, _ENVIRONMENT):
                    survey.add(payload, entry)


def _gives_way(directory: Directory, name: str, own: _Own) -> bool:
    """Remove an empty directory that has the name of a file of ours; return whether it was one."""
    if not own.names.fullmatch(name) or not _is_directory(directory, name):
        return False
    try:
        directory.clear(name)
    except (BackendForeignError, OSError):
        return False
    return True


def _is_directory(base: Directory, name: str) -> bool:
    try:
        return stat.S_ISDIR(base.status(name).st_mode)
    except FileNotFoundError:
        return False


class _Survey:
    """Foreign content: how much of it, and the largest names."""

    def __init__(self) -> None:
        self._bytes = 0
        self._count = 0
        self._largest: list[tuple[int, str]] = []

    def foreign_in(self, directory: Directory, own: _Own) -> Iterator["os.DirEntry[str]"]:
        """List entries that are not the tier's; tighten the modes of the others."""
        if os.fstat(directory.descriptor).st_blocks * _BLOCK_BYTES > _DIRECTORY_BYTES_MAX:
            self._note(directory.path, _DIRECTORY_BYTES_MAX)
        for entry in directory.entries():
            if not own.has(entry):
                if own.directories or not _gives_way(directory, entry.name, own):
                    yield entry
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    if status.st_uid != os.geteuid():
                        directory.clear(entry.name)  # refuses it
                    if stat.S_IMODE(status.st_mode) != FILE_MODE:
                        directory.tighten_file(entry.name)

    def add(self, directory: Directory, entry: "os.DirEntry[str]") -> None:
        """Count a foreign entry and its content, until it is too much."""
        if _REMOVED.fullmatch(entry.name):
            return  # over NFS, a removed file that is still open: it goes when it is closed
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            self._note(directory.path / entry.name, status.st_blocks * _BLOCK_BYTES)
            if stat.S_ISDIR(status.st_mode):
                self._add_directory(directory, entry.name)

    def refusal(self, path: Path) -> str:
        """Return the message that names what to move away; empty: nothing."""
        if not self._is_too_much():
            return ""
        shown = ", ".join(name for _, name in self._largest)
        return (
            f"{path}: holds what is not the tier's, at least {self._bytes} bytes under "
            f"{self._count} names, such as {shown}; move it away, since everything below the path "
            "counts against its capacity"
        )

    def _note(self, path: Path, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._count += 1
        if len(self._largest) < _NAMED_COUNT_MAX or size_bytes > self._largest[-1][0]:
            name = ascii(str(path))[:_NAME_LENGTH_MAX]
            self._largest = sorted([*self._largest, (size_bytes, name)], reverse=True)
            del self._largest[_NAMED_COUNT_MAX:]

    def _is_too_much(self) -> bool:
        return self._bytes > _FOREIGN_BYTES_MAX or self._count > _FOREIGN_COUNT_MAX

    def _add_directory(self, outer: Directory, name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(PermissionError):
            descriptor = os.open(name, flags, dir_fd=outer.descriptor)
            with Directory(outer.path / name, descriptor) as directory:
                for entry in directory.entries():
                    if self._is_too_much():
                        return
                    self.add(directory, entry)
