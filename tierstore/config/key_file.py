"""The file of the keys that records are authenticated and encrypted with.

    text, one key per line     64 hexadecimal digits or 44 characters of base64 each; the first
                               key is used for writing, all of them verify
    or 32 raw bytes            one key; one newline may follow

A link is followed, since orchestrators provide secrets as links; the checks apply to the file that
was opened. A key is never quoted: not in errors, not in logs, not in `repr`.
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
# Separate derivations of one key: neither result reveals anything about the other.
_ID_PURPOSE = b"tierstore key id"
_RECORD_PURPOSE = b"tierstore record"


class RecordKey:
    """One key of a key file; holds the state that derives keys of records, not the key's bytes."""

    __slots__ = ("_deriving", "key_id")

    def __init__(self, secret: bytes) -> None:
        """Derive from the 32 bytes of a key, which are not kept."""
        self.key_id = hashlib.blake2b(
            key=secret, digest_size=KEY_ID_BYTES, person=_ID_PURPOSE
        ).digest()
        self._deriving = hashlib.blake2b(key=secret, digest_size=_KEY_BYTES, person=_RECORD_PURPOSE)

    def derive(self, context: bytes) -> bytes:
        """Return the key of one record: 32 bytes of keyed BLAKE2b of a context."""
        deriving = self._deriving.copy()
        deriving.update(context)
        return deriving.digest()


def read_key_file(path: Path) -> tuple[RecordKey, ...]:
    """Read the keys of a file; the first one is used for writing.

    Raises:
        ConfigError: the file cannot be used; names it and the remedy, and quotes nothing of it.
    """
    secrets = _parse(path, _read(path))
    if bytes(_KEY_BYTES) in secrets:  # what a power cut may leave of a file
        raise ConfigError(f"{path}: a key of zeros is not valid; make a new one")
    keys = tuple(map(RecordKey, dict.fromkeys(secrets)))
    if len({key.key_id for key in keys}) < len(keys):
        raise ConfigError(f"{path}: two of its keys have the same identifier; replace one of them")
    return keys


def looks_like_key(text: str) -> bool:
    """Return whether a text that was given as the path of a key file is a key itself."""
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
            remedy = f"make it, and the folders above it, readable for user {os.geteuid()}"
        case _:
            remedy = "give the path of a regular file"
    return f"{cause}; {remedy}"


def _check(path: Path, status: os.stat_result) -> None:
    """Raise unless this is a regular file that no other user may read or write."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: not a regular file; give the path of one")
    user_id = os.geteuid()
    if status.st_uid not in (0, user_id):
        raise ConfigError(
            f"{path}: belongs to user {status.st_uid}; give it to user {user_id} or root (chown)"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path}: mode {mode:04o} gives other users access to the key; chmod 600 the file"
        )


def _parse(path: Path, content: bytes) -> Sequence[bytes]:
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {_FILE_BYTES_MAX} bytes; a key file has only keys")
    if len(content) == _KEY_BYTES or (len(content) == _KEY_BYTES + 1 and content.endswith(b"\n")):
        return [content[:_KEY_BYTES]]
    lines = [line for line in content.split(b"\n") if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: is empty; write one key per line, as 64 hexadecimal digits")
    if len(lines) > _KEY_COUNT_MAX:
        raise ConfigError(
            f"{path}: {len(lines)} lines; at most {_KEY_COUNT_MAX} are allowed, remove old keys"
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
        f"{path}: key {number} ({len(text)} characters) is not valid; write 64 hexadecimal "
        "digits or 44 characters of base64 per line, or 32 raw bytes and nothing else"
    )
