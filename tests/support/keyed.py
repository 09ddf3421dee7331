"""Keys and codecs of keyed records."""

from tierstore.codec.keyed import KeyedCodec
from tierstore.config.key_file import RecordKey

KINDS = [False, True]
"""Authenticated, and encrypted too."""


def secret_of(number):
    """Return the same 32 bytes for the same number, as random as those of a key."""
    return RecordKey(bytes(32)).derive(b"secret %d" % number)


def codec_of(*numbers, encrypt=False):
    """Return a codec with numbered keys, of which the first one writes."""
    return KeyedCodec([RecordKey(secret_of(number)) for number in numbers], encrypt=encrypt)


def key_file(path, *numbers):
    """Write numbered keys to a file that is readable for us alone."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{secret_of(number).hex()}\n" for number in numbers))
    path.chmod(0o600)
    return str(path)
