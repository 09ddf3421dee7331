"""The file of the keys that records are authenticated and encrypted with.

    a text of one key a line   64 hexadecimal digits or 44 characters of base64 each; the first
                               writes, all of them verify
    or 32 raw bytes            one key; one newline may follow

A path that is a link is followed, since orchestrators hand out secrets as links; what counts is the
file that was opened. A key is nowhere quoted: not in errors, not in logs, not in `repr`.
"""

import base64
import binascii
import errno
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import ConfigError

__all__ = ["KEY_ID_BYTES", "RecordKey", "looks_like_key", "read_key_file"]

KEY_ID_BYTES = 4

_KEY_BYTES = 32
_KEY_COUNT_MAX = 16
_FILE_BYTES_MAX = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEY_TEXT = re.compile(rb"[0-9A-Fa-f]{64}|[A-Za-z0-9+/]{43}=")
# Two purposes of one key, of which neither tells anything about the other.
_ID_PURPOSE = b"tierstore key id"
_RECORD_PURPOSE = b"tierstore record"


class RecordKey:
    """One key of a key file; holds what keys of records are derived with, and not its bytes."""

    __slots__ = ("_deriving", "key_id")

    def __init__(self, secret: bytes) -> None:
        """Take over the 32 bytes of a key."""
        self.key_id = hashlib.blake2b(
            key=secret, digest_size=KEY_ID_BYTES, person=_ID_PURPOSE
        ).digest()
        self._deriving = hashlib.blake2b(key=secret, digest_size=_KEY_BYTES, person=_RECORD_PURPOSE)

    def derive(self, context: bytes) -> bytes:
        """Return the 32 bytes that keyed BLAKE2b makes of a context: the key of one record."""
        deriving = self._deriving.copy()
        deriving.update(context)
        return deriving.digest()


def read_key_file(path: Path) -> tuple[RecordKey, ...]:
    """Read the keys of a file; the first one writes.

    Raises:
        ConfigError: the file cannot be used; names it and the remedy, and quotes nothing of it.
    """
    secrets = _parse(path, _read(path))
    if bytes(_KEY_BYTES) in secrets:  # what a power cut may leave of a file
        raise ConfigError(f"{path}: a key of zeros is none; make a new one")
    keys = tuple(map(RecordKey, dict.fromkeys(secrets)))
    if len({key.key_id for key in keys}) < len(keys):
        raise ConfigError(f"{path}: two of its keys have the same identifier; replace one of them")
    return keys


def looks_like_key(text: str) -> bool:
    """Return whether a text, given where a path belongs, is a key itself."""
    return _KEY_TEXT.fullmatch(text.strip().encode(errors="replace")) is not None


def _read(path: Path) -> bytes:
    try:
        # A FIFO without a writer would block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {_remedy(error)}") from error
    try:
        _check(path, os.fstat(fd))
        with open(fd, "rb", closefd=False) as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {_remedy(error)}") from error
    finally:
        os.close(fd)
    return content


def _remedy(error: OSError) -> str:
    cause = error.strerror or type(error).__name__
    match error.errno:
        case errno.ENOENT:
            remedy = "make one with: (umask 077; openssl rand -hex 32 > FILE)"
        case errno.EACCES | errno.EPERM:
            remedy = f"let it, and the folders above it, be readable for user {os.geteuid()}"
        case _:
            remedy = "give the path of a regular file"
    return f"{cause}; {remedy}"


def _check(path: Path, status: os.stat_result) -> None:
    """Raise unless this is a file that nobody else may read or write."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: is no regular file; give the path of one")
    user_id = os.geteuid()
    if status.st_uid not in (0, user_id):
        raise ConfigError(
            f"{path}: belongs to user {status.st_uid}; give it to user {user_id} or root (chown)"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{path}: mode {mode:04o} lets others at the key; chmod 600 the file")


def _parse(path: Path, content: bytes) -> Sequence[bytes]:
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {_FILE_BYTES_MAX} bytes; give a file of keys alone")
    if len(content) == _KEY_BYTES or (len(content) == _KEY_BYTES + 1 and content.endswith(b"\n")):
        return [content[:_KEY_BYTES]]
    lines = [line for line in content.split(b"\n") if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: is empty; write one key a line, as 64 hexadecimal digits")
    if len(lines) > _KEY_COUNT_MAX:
        raise ConfigError(
            f"{path}: {len(lines)} lines; at most {_KEY_COUNT_MAX} keys, remove old ones"
        )
    return [_parse_line(path, number, line.strip()) for number, line in enumerate(lines, 1)]


def _parse_line(path: Path, number: int, text: bytes) -> bytes:
    if _KEY_TEXT.fullmatch(text):
        try:
            if len(text) == 2 * _KEY_BYTES:
                return binascii.unhexlify(text)
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            pass
    raise ConfigError(
        f"{path}: key {number} has {len(text)} characters and is none; write 64 hexadecimal "
        "digits or 44 characters of base64 a line, or 32 raw bytes and nothing else"
    )
