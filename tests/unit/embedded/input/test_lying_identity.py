"""Parts of keys and manifests that raise, lie or are of the wrong kind: a documented error."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lying_kit import (
    CHUNKS,
    HUGE,
    NAMESPACE,
    WORDS_MAX,
    Raising,
    odder,
    refused,
)

from tierstore import (
    Manifest,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_namespace,
    make_offload_key,
    make_offload_keys,
)
from tierstore.errors import ManifestError

KEY_PARTS = {
    "raising namespace": (Raising(), 0, [bytes(32)]),
    "huge namespace": (bytes(3_000_000), 0, [bytes(32)]),
    "raising group": (NAMESPACE, Raising(), [bytes(32)]),
    "boolean group": (NAMESPACE, True, [bytes(32)]),
    "huge group": (NAMESPACE, 10**5000, [bytes(32)]),
    "raising hashes": (NAMESPACE, 0, Raising()),
    "raising hash": (NAMESPACE, 0, [Raising()]),
    "hashes of a generator that raises": (NAMESPACE, 0, (1 / 0 for _ in range(1))),
    "huge hash": (NAMESPACE, 0, [bytes(3_000_000)]),
}


@pytest.mark.parametrize("arguments", KEY_PARTS.values(), ids=KEY_PARTS)
def test_keys_are_not_made_of_what_raises_or_lies(arguments):
    refused(make_offload_keys, *arguments)
    refused(make_offload_key, *arguments)


def test_a_group_is_an_integer_of_any_kind():
    assert make_offload_key(NAMESPACE, np.int32(3), bytes(32)) == make_offload_key(
        NAMESPACE, 3, bytes(32)
    )


@pytest.mark.parametrize("key", [Raising(), bytes(3_000_000), HUGE, 10**5000], ids=type)
def test_what_raises_or_lies_is_no_key(key):
    for part in (get_offload_namespace, get_offload_group_idx, get_offload_block_hash):
        refused(part, key)


GROUP = CHUNKS.manifest.groups[0]
MANIFEST_FIELDS = {
    "raising model": {"model": Raising()},
    "huge model": {"model": HUGE},
    "no groups": {"groups": 5},
    "raising groups": {"groups": Raising()},
    "list of groups": {"groups": [GROUP]},
    "groups of nothing": {"groups": (None,)},
    "raising group": {"groups": (Raising(),)},
    "raising facts": {"extra": Raising()},
    "facts that raise": {"extra": (Raising(),)},
    "huge facts": {"extra": ((HUGE, HUGE),)},
    "order": {"chunk_order": "layer_major"},
    "raising order": {"chunk_order": Raising()},
    "format": {"format_version": Raising()},
    "chunk of blocks": {"blocks_per_chunk": 10**5000},
    "raising chunk": {"blocks_per_chunk": Raising()},
}
GROUP_FIELDS = {
    "raising kind": {"kind": Raising()},
    "raising tokens": {"tokens_per_block": Raising()},
    "raising names": {"layer_names": Raising()},
    "huge names": {"layer_names": (HUGE, HUGE)},
    "one name": {"layer_names": "a"},
    "raising pages": {"page_bytes": Raising()},
    "number of pages": {"page_bytes": 5},
    "huge pages": {"page_bytes": (10**5000,)},
    "huge window": {"window_tokens": -(10**5000)},
}


@pytest.mark.parametrize("changes", MANIFEST_FIELDS.values(), ids=MANIFEST_FIELDS)
def test_a_manifest_is_not_made_of_what_raises_or_lies(changes):
    with pytest.raises(ManifestError):
        dataclasses.replace(CHUNKS.manifest, **changes)
    refused(lambda: dataclasses.replace(CHUNKS.manifest, **changes))


@pytest.mark.parametrize("changes", GROUP_FIELDS.values(), ids=GROUP_FIELDS)
def test_a_group_is_not_made_of_what_raises_or_lies(changes):
    group = dataclasses.replace(GROUP, **changes)
    refused(lambda: dataclasses.replace(CHUNKS.manifest, groups=(group,)))


@pytest.mark.parametrize("chunk_bytes", [Raising(), 10**5000, -(10**5000), HUGE], ids=type)
def test_a_simple_manifest_is_not_made_of_what_raises_or_lies(chunk_bytes):
    with pytest.raises(ManifestError):
        Manifest.simple("m", chunk_bytes)
    refused(Manifest.simple, "m", chunk_bytes)


STORED = {
    "deep": b"[" * 100_000,
    "deep object": b'{"model":' * 100_000,
    "long number": b'{"model": ' + b"9" * 5_000 + b"}",
    "no text": b"\xff\xfe",
    "facts are no list": b'{"extra": 5}',
    "facts of facts": b'{"extra": [[{"a": 1}, 2], [1], 5, ["a", "b"]]}',
    "list": b"[" + b"1," * 100_000 + b"1]",
}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_a_stored_manifest_that_is_none_is_told_in_few_words(stored):
    for call in (CHUNKS.manifest.difference, lambda raw: CHUNKS.manifest.nearest_difference([raw])):
        try:
            words = call(stored) or ""
        except ManifestError as error:
            words = str(error)
        assert len(words) <= WORDS_MAX
        assert words.isprintable()


def test_a_stored_manifest_that_differs_in_everything_is_told_in_few_words():
    stored = "{" + ",".join(f'"f{i}{"x" * 500}": "{"y" * 500}"' for i in range(1_000)) + "}"
    words = CHUNKS.manifest.difference(stored.encode())
    assert words.endswith("more")
    assert len(words) <= 8_000


@settings(deadline=None)
@given(odder, odder, odder)
def test_any_part_makes_a_key_or_is_refused(namespace, group_idx, hashes):
    for first in (namespace, NAMESPACE):
        with contextlib.suppress(TypeError, ValueError):
            make_offload_keys(first, group_idx, hashes)
    for part in (get_offload_namespace, get_offload_group_idx, get_offload_block_hash):
        with contextlib.suppress(ValueError):
            part(namespace)


names = st.sampled_from([field.name for field in dataclasses.fields(Manifest)])


@settings(deadline=None)
@given(st.dictionaries(names, odder, max_size=2), odder)
def test_any_field_makes_a_manifest_or_is_refused(changes, chunk_bytes):
    with contextlib.suppress(ManifestError):
        assert dataclasses.replace(CHUNKS.manifest, **changes).namespace
    with contextlib.suppress(ManifestError):
        Manifest.simple("m", chunk_bytes)
