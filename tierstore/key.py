"""Keys: whose chunk, of which group, with which block hash.

    OffloadKey = namespace (8 bytes) + group index (u32, big-endian) + block hash, verbatim

A key is plain `bytes`: hashable, ordered, storable, and invisible to the garbage collector.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NewType

from tierstore.errors import TierStoreError
from tierstore.quoting import escaped, named, quoted

__all__ = [
    "BLOCK_HASH_BYTES_MAX",
    "BLOCK_HASH_BYTES_MIN",
    "KEY_BYTES_MAX",
    "NAMESPACE_BYTES",
    "Namespace",
    "OffloadKey",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offload_namespace",
    "make_offload_key",
    "make_offload_keys",
    "offload_group_indices",
    "require_keys",
]

OffloadKey = NewType("OffloadKey", bytes)
Namespace = NewType("Namespace", bytes)

NAMESPACE_BYTES = 8
BLOCK_HASH_BYTES_MIN = 8
BLOCK_HASH_BYTES_MAX = 64
_PREFIX_BYTES = NAMESPACE_BYTES + 4
KEY_BYTES_MAX = _PREFIX_BYTES + BLOCK_HASH_BYTES_MAX
_KEY_BYTES_MIN = _PREFIX_BYTES + BLOCK_HASH_BYTES_MIN
_GROUP_COUNT_MAX = 1 << 32

_namespace_of = operator.itemgetter(slice(NAMESPACE_BYTES))
_group_of = operator.itemgetter(slice(NAMESPACE_BYTES, _PREFIX_BYTES))


def make_offload_key(namespace: Namespace, group_idx: int, block_hash: bytes) -> OffloadKey:
    """Build the key of one chunk.

    Raises:
        TypeError, ValueError: as `make_offload_keys`.
    """
    return make_offload_keys(namespace, group_idx, (block_hash,))[0]


def make_offload_keys(
    namespace: Namespace, group_idx: int, block_hashes: Iterable[bytes]
) -> list[OffloadKey]:
    """Build the keys of the chunks of one group, in the order of `block_hashes`.

    Costs about 0.1 us per key.

    Raises:
        TypeError: a hash is not bytes.
        ValueError: `namespace` is not 8 bytes, `group_idx` is no unsigned number of 32 bits, or a
            hash is not 8 to 64 bytes long.
    """
    if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
        raise ValueError(
            f"namespace: expected the {NAMESPACE_BYTES} bytes of manifest.namespace, "
            f"got {quoted(namespace)}"
        )
    prefix = namespace + _require_index(group_idx).to_bytes(4, "big")
    try:
        keys = list(map(prefix.__add__, block_hashes))
    except Exception as error:  # no bytes, or whatever the caller's own classes raise
        raise TypeError(
            f"block_hashes: expected bytes objects, one per chunk: {named(error)}"
        ) from error
    if keys:
        lengths = set(map(len, keys))
        shortest, longest = min(lengths) - _PREFIX_BYTES, max(lengths) - _PREFIX_BYTES
        if shortest < BLOCK_HASH_BYTES_MIN or longest > BLOCK_HASH_BYTES_MAX:
            raise ValueError(
                f"block_hashes: expected {BLOCK_HASH_BYTES_MIN} to {BLOCK_HASH_BYTES_MAX} bytes, "
                f"got {shortest} to {longest}"
            )
    return keys  # type: ignore[return-value]


def require_keys(keys: object, namespace: Namespace) -> list[OffloadKey]:
    """Return a caller's keys as a list, once it is sure that they are keys of `namespace`.

    Costs about 0.1 us per key.

    Raises:
        TypeError: no sequence, or a key is not bytes.
        ValueError: a key has an impossible length, or is of another namespace.
    """
    if not isinstance(keys, Sequence) or isinstance(keys, bytes | str):
        raise TypeError(
            "keys: expected a list of keys, as make_offload_keys returns it, "
            f"got {type(keys).__name__}"
        )
    keys = _listed(keys)
    if _are_of(namespace, keys):
        return keys
    for i, key in enumerate(keys):
        if type(key) is not bytes:
            if not issubclass(type(key), bytes):  # `isinstance` would ask the key
                raise TypeError(
                    f"keys: expected bytes, as make_offload_keys returns them, got {quoted(key)}"
                )
            # A class of its own could run its code at each comparison, amid a change of the tiers.
            keys[i] = key = b"".join([key])  # noqa: PLW2901
        if not key.startswith(namespace):
            raise ValueError(
                f"keys: {escaped(key[: KEY_BYTES_MAX + 1].hex())} is of another namespace; build "
                f"keys with make_offload_keys(manifest.namespace, ...), here {namespace.hex()}"
            )
        _require_length(OffloadKey(key))
    return keys


def _are_of(namespace: Namespace, keys: list[Any]) -> bool:
    """Return whether all keys are bytes objects, and keys of `namespace`."""
    if set(map(type, keys)) != {bytes}:
        return False
    lengths = set(map(len, keys))
    are_of_one = set(map(_namespace_of, keys)) == {namespace}
    return are_of_one and min(lengths) >= _KEY_BYTES_MIN and max(lengths) <= KEY_BYTES_MAX


def _listed(keys: Sequence[Any]) -> list[Any]:
    try:
        return list(keys)
    except TierStoreError:
        raise  # a call within the call
    except Exception as error:  # whatever the caller's own class raises
        raise TypeError(f"keys: cannot be read: {named(error)}; give a list") from error


def _require_index(group_idx: object) -> int:
    try:
        # Of numpy's integers, too; a boolean is not one.
        index = -1 if isinstance(group_idx, bool) else operator.index(group_idx)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - no integer, or whatever the caller's own class raises
        index = -1
    if not 0 <= index < _GROUP_COUNT_MAX:
        raise ValueError(f"group_idx: expected an index such as 0, got {quoted(group_idx)}")
    return index


def get_offload_namespace(key: OffloadKey) -> Namespace:
    """Return the 8 bytes that name the manifest.

    Raises:
        ValueError: `key` is not an offload key.
    """
    _require_length(key)
    return Namespace(key[:NAMESPACE_BYTES])


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the index of the KV cache group.

    Raises:
        ValueError: `key` is not an offload key.
    """
    _require_length(key)
    return int.from_bytes(key[NAMESPACE_BYTES:_PREFIX_BYTES], "big")


def offload_group_indices(keys: Sequence[OffloadKey]) -> set[int]:
    """Return the indices of the groups that some offload keys are of; about 0.05 us per key."""
    return {int.from_bytes(group, "big") for group in set(map(_group_of, keys))}


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the engine's block hash, verbatim.

    Raises:
        ValueError: `key` is not an offload key.
    """
    _require_length(key)
    return key[_PREFIX_BYTES:]


def _require_length(key: OffloadKey) -> None:
    if not isinstance(key, bytes) or not _KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(
            f"key: expected {_KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes, as make_offload_keys "
            f"returns them, got {quoted(key)}"
        )
