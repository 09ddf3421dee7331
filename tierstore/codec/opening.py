"""Which codec a tier's records have, by its configuration."""

from tierstore.codec.plain import PlainCodec, RecordCodec
from tierstore.config import SecondaryConfig
from tierstore.config.key_file import read_key_file
from tierstore.errors import ConfigError
from tierstore.manifest import Manifest

__all__ = ["open_codec"]


def open_codec(config: SecondaryConfig, manifest: Manifest) -> RecordCodec:
    """Return what makes and verifies the records of a tier; reads its key file, if it has one.

    Raises:
        ConfigError: the key file cannot be used, or chunks are too large for keyed records.
        MissingExtraError: `cryptography` is not installed.
    """
    if config.integrity is None:
        return PlainCodec()
    from tierstore.codec.keyed import PAYLOAD_BYTES_MAX, KeyedCodec

    where = f"secondary {config.name!r}: integrity"
    chunk_bytes = max(map(manifest.chunk_bytes, range(len(manifest.groups))))
    if chunk_bytes > PAYLOAD_BYTES_MAX:
        raise ConfigError(
            f"{where}: chunks of at most {PAYLOAD_BYTES_MAX} bytes, got {chunk_bytes}; lower "
            "blocks_per_chunk, or remove the section"
        )
    try:
        keys = read_key_file(config.integrity.key_file)
    except ConfigError as error:
        raise ConfigError(f"{where}.key_file: {error}") from error
    return KeyedCodec(keys, encrypt=config.integrity.encrypt)
