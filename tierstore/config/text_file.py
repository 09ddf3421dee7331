"""Reads a text file, and refuses one that is too large or not a regular file."""

import os
import stat
from pathlib import Path

from tierstore.errors import ConfigError
from tierstore.quoting import escaped

__all__ = ["TEXT_BYTES_MAX", "read_text"]

TEXT_BYTES_MAX = 1 << 18
"""A configuration with all keys, eight tiers and a page of comments has a few thousand."""


def read_text(path: Path) -> str:
    """Read a regular UTF-8 file, with or without a byte order mark.

    Never waits for a pipe or a device, and reads no more than a configuration can have.

    Raises:
        ConfigError: the file cannot be used; the message says why.
    """
    try:
        # Without O_NONBLOCK, a pipe would block until something is written to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(fd, "rb") as file:  # noqa: PTH123 - of a descriptor
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError("cannot be read: it is not a regular file")
            content = file.read(TEXT_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # not there, or a zero byte in the path
        raise ConfigError(
            f"cannot be read: {escaped(error)}"
        ) from None  # which names all of the path
    if len(content) > TEXT_BYTES_MAX:
        raise ConfigError(f"cannot be read: expected at most {TEXT_BYTES_MAX} bytes")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError("cannot be read: it is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot be read: {escaped(error)}; save it as UTF-8") from None
