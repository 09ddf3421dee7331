"""The identity of cached bytes: two manifests that differ in anything never share a chunk."""

import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Self

import xxhash

from tierstore.errors import ManifestError
from tierstore.key import Namespace, OffloadKey, make_offload_keys
from tierstore.layout import ChunkOrder, GroupKind, GroupSpec
from tierstore.quoting import escaped, quoted

__all__ = ["FORMAT_VERSION", "GroupManifest", "Manifest", "namespace_of"]

FORMAT_VERSION = 1
"""Version of the on-disk format (docs/format.md); other versions never mix."""

_CHUNK_BYTES_MAX = (1 << 32) - 1
"""A record's header has 32 bits for it."""

_JSON_BYTES_MAX = 1 << 20
"""Of a manifest in full, which is stored; some hundred layers take 50 KiB."""
_DIFFERENCES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupManifest:
    """What one KV cache group's chunks consist of."""

    kind: GroupKind
    tokens_per_block: int
    layer_names: tuple[str, ...]
    page_bytes: tuple[int, ...]
    """Live bytes per block, one entry per layer, in slot order."""
    window_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that decides whether two processes mean the same bytes by the same key.

    Raises:
        ManifestError: a field cannot be part of an identity, or a chunk has an impossible size.
    """

    engine: str
    """Name and format of the engine, such as `vllm-0.33`."""
    model: str
    revision: str
    """Revision or weights digest, as far as it is known; empty when unknown."""
    kv_dtype: str
    quantization: str
    layout: str
    """Physical order inside a page, in the engine's words, such as `LBHNC`."""
    chunk_order: ChunkOrder
    blocks_per_chunk: int
    hash_algorithm: str
    hash_seed: str
    """What the hash chain starts from; empty when the algorithm has none."""
    parallel_shape: str
    """Such as `tp2-pp1-cp1`."""
    groups: tuple[GroupManifest, ...]
    extra: tuple[tuple[str, str], ...] = ()
    """Further facts that change the bytes, as sorted (name, value) pairs."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str and not isinstance(value, str):
                raise ManifestError(f"{field.name}: expected a string, got {quoted(value)}")
        are_facts = type(self.extra) is tuple and all(
            type(pair) is tuple and _is_fact(pair) for pair in self.extra
        )
        if not are_facts:
            raise ManifestError(f"extra: expected pairs of strings, got {quoted(self.extra)}")
        if not isinstance(self.chunk_order, ChunkOrder):
            raise ManifestError(
                f"chunk_order: expected a ChunkOrder, got {quoted(self.chunk_order)}"
            )
        if type(self.format_version) is not int:
            raise ManifestError(
                f"format_version: expected an int, got {quoted(self.format_version)}"
            )
        if type(self.groups) is not tuple or not self.groups:
            raise ManifestError(
                f"groups: expected a tuple of at least one group, got {quoted(self.groups)}"
            )
        for group_idx, group in enumerate(self.groups):
            _check_group(f"groups[{group_idx}]", group)
            self._check_chunks(group_idx, group)
        size_bytes = len(self.canonical_json)
        if size_bytes > _JSON_BYTES_MAX:
            raise ManifestError(
                f"expected at most {_JSON_BYTES_MAX} bytes of facts in all, got {size_bytes}"
            )

    def _check_chunks(self, group_idx: int, group: GroupManifest) -> None:
        sizes = (self.blocks_per_chunk, *group.page_bytes)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ManifestError(
                f"groups[{group_idx}]: expected positive sizes as int, got blocks_per_chunk "
                f"{quoted(self.blocks_per_chunk)} and page_bytes {quoted(group.page_bytes)}"
            )
        chunk_bytes = self.chunk_bytes(group_idx)
        if chunk_bytes > _CHUNK_BYTES_MAX or (
            not chunk_bytes and group.kind is not GroupKind.UNCACHED
        ):
            raise ManifestError(
                f"groups[{group_idx}]: expected chunks of 1 to {_CHUNK_BYTES_MAX} bytes, got "
                f"{quoted(chunk_bytes)}; change blocks_per_chunk"
            )

    def keys(self, block_hashes: Sequence[bytes], group_idx: int = 0) -> list[OffloadKey]:
        """Return the key of each chunk of a group by the hash of its last block (8 to 64 bytes).

        Raises:
            ManifestError: there is no such group.
            ValueError: a hash is too short or too long.
        """
        if type(group_idx) is not int or not 0 <= group_idx < len(self.groups):
            raise ManifestError(
                f"group_idx: expected 0 to {len(self.groups) - 1}, got {quoted(group_idx)}"
            )
        return make_offload_keys(self.namespace, group_idx, block_hashes)

    @classmethod
    def simple(cls, model: str, chunk_bytes: int) -> Self:
        """Describe one full-attention group of `chunk_bytes` per chunk, for embedded use.

        Raises:
            ManifestError: `model` is not a string, or `chunk_bytes` no number from 1 to 2**32 - 1.
        """
        try:
            chunk_bytes = operator.index(chunk_bytes)  # numpy's integers are no part of JSON
        except Exception as error:  # no integer, or whatever the caller's own class raises
            raise ManifestError(
                f"chunk_bytes: expected an int, got {quoted(chunk_bytes)}"
            ) from error
        group = GroupManifest(
            kind=GroupKind.FULL,
            tokens_per_block=1,
            layer_names=("chunk",),
            page_bytes=(chunk_bytes,),
        )
        return cls(
            engine="embedded",
            model=model,
            revision="",
            kv_dtype="uint8",
            quantization="",
            layout="opaque",
            chunk_order=ChunkOrder.LAYER_MAJOR,
            blocks_per_chunk=1,
            hash_algorithm="caller",
            hash_seed="",
            parallel_shape="tp1-pp1-cp1",
            groups=(group,),
        )

    def in_epoch(self, epoch: str) -> Self:
        """Return the identity of what an engine computes after a reset.

        Its weights may have changed by then, so `epoch` is a unique name: an engine that loads its
        weights later does not find these bytes.
        """
        facts = dict(self.extra) | {"epoch": epoch}
        return dataclasses.replace(self, extra=tuple(sorted(facts.items())))

    @cached_property
    def canonical_json(self) -> bytes:
        """The manifest as canonical JSON: sorted names, no spaces, ASCII."""
        return json.dumps(
            dataclasses.asdict(self),
            sort_keys=True,
            separators=(",", ":"),
            default=lambda enum: enum.value,
        ).encode("ascii")

    @cached_property
    def namespace(self) -> Namespace:
        """The first 8 bytes of every key: xxh3_64 of the canonical JSON, big-endian."""
        return namespace_of(self.canonical_json)

    def chunk_bytes(self, group_idx: int) -> int:
        """Return the live bytes of one chunk of a group on one rank."""
        return sum(self.groups[group_idx].page_bytes) * self.blocks_per_chunk

    def group_specs(self) -> tuple[GroupSpec, ...]:
        """Return the groups as the control plane wants them."""
        return tuple(
            GroupSpec(
                group_idx=group_idx,
                kind=group.kind,
                tokens_per_block=group.tokens_per_block,
                blocks_per_chunk=self.blocks_per_chunk,
                chunk_bytes=self.chunk_bytes(group_idx),
                window_tokens=group.window_tokens,
            )
            for group_idx, group in enumerate(self.groups)
        )

    def difference(self, stored_json: bytes) -> str | None:
        """Return in words how a stored manifest differs from this one; None: it does not.

        Raises:
            ManifestError: `stored_json` is not a manifest.
        """
        return _in_words(self._differing(stored_json))

    def nearest_difference(self, stored_jsons: Iterable[bytes]) -> str | None:
        """Return how the most similar stored manifest of the same model differs from this one.

        None: no other manifest of this model is stored; what is not a manifest does not count.
        """
        kin: list[dict[str, tuple[object, object]]] = []
        for stored_json in stored_jsons:
            with suppress(ManifestError):
                kin.append(self._differing(stored_json))
        return _in_words(min((d for d in kin if d and "model" not in d), key=len, default={}))

    def _differing(self, stored_json: bytes) -> dict[str, tuple[object, object]]:
        """Return what is stored and what is ours, by the name of each field that differs."""
        if stored_json == self.canonical_json:
            return {}
        try:
            theirs = _flat(json.loads(stored_json))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"stored manifest is not JSON: {escaped(error)}") from error
        ours = _flat(json.loads(self.canonical_json))
        names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        return {name: (theirs.get(name), ours.get(name)) for name in names}


def _is_fact(pair: object) -> bool:
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2  # noqa: PLR2004 - a name and a value
        and all(isinstance(part, str) for part in pair)
    )


def _check_group(where: str, group: GroupManifest) -> None:
    """Refuse what the types of a group's fields forbid: callers of the full form may err."""
    if type(group) is not GroupManifest:
        raise ManifestError(f"{where}: expected a GroupManifest, got {quoted(group)}")
    names, tokens, window = group.layer_names, group.tokens_per_block, group.window_tokens
    if not isinstance(group.kind, GroupKind):
        raise ManifestError(f"{where}.kind: expected a GroupKind, got {quoted(group.kind)}")
    if type(tokens) is not int or tokens <= 0:
        raise ManifestError(
            f"{where}.tokens_per_block: expected a positive int, got {quoted(tokens)}"
        )
    if type(window) is not int or window < 0:
        raise ManifestError(
            f"{where}.window_tokens: expected an int from 0 up, got {quoted(window)}"
        )
    is_tuples = type(names) is tuple and type(group.page_bytes) is tuple
    if (
        not is_tuples
        or len(names) != len(group.page_bytes)
        or not all(isinstance(name, str) for name in names)
    ):
        raise ManifestError(
            f"{where}.layer_names: expected a name per page, in tuples, got {quoted(names)} and "
            f"page_bytes {quoted(group.page_bytes)}"
        )


def namespace_of(canonical_json: bytes) -> Namespace:
    """Return the namespace of the manifest with this text."""
    return Namespace(xxhash.xxh3_64_digest(canonical_json))


def _in_words(differing: Mapping[str, tuple[object, object]]) -> str | None:
    # What is stored may have been written by anybody.
    shown = [
        f"{escaped(name, 60)}: stored {quoted(old)}, ours {quoted(new)}"
        for name, (old, new) in islice(differing.items(), _DIFFERENCES_MAX)
    ]
    if len(differing) > _DIFFERENCES_MAX:
        shown.append(f"and {len(differing) - _DIFFERENCES_MAX:,} more")
    return "; ".join(shown) or None


def _flat(facts: object) -> dict[str, object]:
    """Return a manifest's JSON with each pair of `extra` as a field of its own.

    Raises:
        ManifestError: it is no object.
    """
    if not isinstance(facts, dict):
        raise ManifestError(f"stored manifest is not an object: {quoted(facts)}")
    extra = facts.pop("extra", ())
    pairs = [pair for pair in extra if _is_fact(pair)] if isinstance(extra, list) else []
    return facts | {f"extra.{name}": value for name, value in pairs}
