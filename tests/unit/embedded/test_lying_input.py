"""Callers' objects that raise, lie or are of the wrong kind: a documented error, and no change.

Nothing of them may come out of a public name but an error of ours, `TypeError` or `ValueError`
with words of bounded length, and none may leave a store in doubt.
"""

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT
from store_kit import Chunks, config_of

from tierstore import (
    Manifest,
    TierStore,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_namespace,
    make_offload_key,
    make_offload_keys,
)
from tierstore.config import IoConfig, PrimaryConfig, SecondaryConfig, StoreConfig
from tierstore.errors import ConfigError, ManifestError, TierStoreError

CHUNKS = Chunks(4096)
NAMESPACE = CHUNKS.manifest.namespace
NUMBERS = range(4)
KEYS = CHUNKS.keys(NUMBERS)
ROWS = CHUNKS.array(NUMBERS)
HUGE = "x\n\x1b[2J" * 200_000
WORDS_MAX = 3_000


class FaultError(RuntimeError):
    """What a caller's own code raises."""


def refused(call, *arguments):
    with pytest.raises((TypeError, ValueError, TierStoreError)) as caught:
        call(*arguments)
    assert not isinstance(caught.value, UnicodeError)
    words = str(caught.value)
    assert words
    assert len(words) <= WORDS_MAX
    assert words.isprintable()
    return words


class Raising:
    """Raises wherever it is asked."""

    def _raise(self, *_):
        raise FaultError(HUGE)

    __iter__ = __len__ = __index__ = __int__ = __float__ = __fspath__ = __getitem__ = _raise
    __repr__ = __str__ = __bool__ = __eq__ = __array__ = __bytes__ = __contains__ = _raise
    __hash__ = object.__hash__

    @property
    def numpy(self):
        raise FaultError(HUGE)


class Keys(Sequence):
    """A sequence that lies."""

    def __init__(self, keys, fault=""):
        self.keys = keys
        self.fault = fault

    def __len__(self):
        return 1 << 40 if self.fault == "long" else -1 if self.fault == "short" else len(self.keys)

    def __getitem__(self, idx):
        if self.fault == "raises":
            raise FaultError(HUGE)
        return self.keys[idx]

    def __iter__(self):
        if self.fault == "ends early":
            return iter(self.keys[:2])
        return super().__iter__()


class ListOfMore(list):
    """Says that it has more than it has."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(list.__getitem__(self, slice(2)))


class LyingArray(np.ndarray):
    """An array that says it has another shape, type and order."""

    shape = (4, 4096)
    itemsize = 1
    ndim = 2

    def __len__(self):
        return 4

    def view(self, *_):
        raise FaultError(HUGE)


BAD_KEYS = {
    "raises": Keys(KEYS, "raises"),
    "short": Keys(KEYS, "short"),
    "object": Raising(),
    "object within": [*KEYS[:3], Raising()],
    "huge key": [*KEYS[:3], KEYS[3] + bytes(3_000_000)],
    "huge key of another namespace": [bytes(3_000_000)],
    "huge text": [HUGE],
    "many groups": [k for i in range(3_000) for k in make_offload_keys(NAMESPACE, i, [bytes(32)])],
    "number of 5000 digits": [10**5000],
}


@pytest.mark.parametrize("keys", BAD_KEYS.values(), ids=BAD_KEYS)
def test_keys_that_raise_or_lie_are_refused(unharmed, keys):
    for call in (
        lambda: unharmed.put(keys, ROWS),
        lambda: unharmed.get(keys, np.zeros_like(ROWS)),
    ):
        assert refused(call).startswith("key")
    if keys is not BAD_KEYS["many groups"]:
        assert refused(unharmed.match_prefix, keys).startswith("key")


def test_keys_that_end_early_are_those_that_came(unharmed):
    refused(unharmed.put, Keys(KEYS, "ends early"), ROWS)
    assert unharmed.match_prefix(Keys(KEYS, "ends early")).chunk_count == 0


BAD_ARRAYS = {
    "object": Raising(),
    "objects": [Raising()] * 4,
    "list of more": ListOfMore(ROWS),
    "lying array": np.zeros((4, 512), np.uint8).view(LyingArray),
    "lying array of objects": np.zeros((4, 4096), object).view(LyingArray),
    "no dimensions": np.zeros((), np.uint8),
    "many dimensions": np.zeros((1,) * 30, np.uint8),
    "many fields": np.zeros(4, np.dtype([(f"f{i}" * 20, "u1") for i in range(4_096)])),
    "no bytes": np.zeros((4, 4096), "V0"),
    "released": [memoryview(bytearray(4096))] * 4,
    "text": ["x" * 4096] * 4,
}
BAD_ARRAYS["released"][0].release()


@pytest.mark.parametrize("array", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_arrays_that_raise_or_lie_are_refused(unharmed, array):
    assert refused(unharmed.put, KEYS, array).startswith("array")
    assert refused(unharmed.get, CHUNKS.keys(range(100, 104)), array).startswith("out")


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


PRIMARY = PrimaryConfig(capacity_bytes=1 << 20)
TIER = SecondaryConfig(name="d", backend="file", path=Path("/nowhere"), capacity_bytes=8 << 20)
CONFIGS = {
    "no primary": StoreConfig(primary=None),
    "raising primary": StoreConfig(primary=Raising()),
    "no capacity": StoreConfig(primary=PrimaryConfig(capacity_bytes=0)),
    "none for a capacity": StoreConfig(primary=PrimaryConfig(capacity_bytes=None)),
    "negative capacity": StoreConfig(primary=PrimaryConfig(capacity_bytes=-1)),
    "broken capacity": StoreConfig(primary=PrimaryConfig(capacity_bytes=1e9)),
    "huge capacity": StoreConfig(primary=PrimaryConfig(capacity_bytes=10**5000)),
    "text": StoreConfig(primary=PrimaryConfig(capacity_bytes="many")),
    "policy": StoreConfig(primary=PrimaryConfig(capacity_bytes=1 << 20, eviction="mru")),
    "no tiers": StoreConfig(primary=PRIMARY, secondary=None),
    "number of tiers": StoreConfig(primary=PRIMARY, secondary=5),
    "tiers of numbers": StoreConfig(primary=PRIMARY, secondary=(5,)),
    "equal tiers": StoreConfig(primary=PRIMARY, secondary=(TIER, TIER)),
    "no threads": StoreConfig(
        primary=PRIMARY, secondary=(dataclasses.replace(TIER, io=IoConfig(threads=0)),)
    ),
    "no deadline": StoreConfig(
        primary=PRIMARY,
        secondary=(dataclasses.replace(TIER, io=IoConfig(deadline_seconds=None)),),
    ),
    "endless deadline": StoreConfig(
        primary=PRIMARY,
        secondary=(dataclasses.replace(TIER, io=IoConfig(deadline_seconds=float("inf"))),),
    ),
    "path": StoreConfig(primary=PRIMARY, secondary=(dataclasses.replace(TIER, path="a\0b"),)),
    "raising path": StoreConfig(
        primary=PRIMARY, secondary=(dataclasses.replace(TIER, path=Raising()),)
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_a_program_made_wrong_is_refused(config):
    with pytest.raises(ConfigError) as caught:
        TierStore.open(config, CHUNKS.manifest)
    assert len(str(caught.value)) <= WORDS_MAX


def test_a_configuration_that_a_program_made_right_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tier = dataclasses.replace(TIER, path=Path("tier"), io=IoConfig(deadline_seconds=1 / 3))
    with TierStore.open(StoreConfig(primary=PRIMARY, secondary=(tier,)), CHUNKS.manifest) as store:
        assert CHUNKS.put(store, NUMBERS) == 4
    assert (tmp_path / "tier").is_dir()


@pytest.mark.parametrize("name", ["patience", "open_backend", "open_system"])
@pytest.mark.parametrize("value", [5, Raising(), HUGE], ids=type)
def test_an_argument_of_a_wrong_kind_is_refused(tmp_path, name, value):
    config = config_of(tmp_path / "tier", primary="1MiB", capacity="8MiB")
    words = refused(lambda: TierStore.open(config, CHUNKS.manifest, **{name: value}))
    assert words.startswith(f"{name}: expected a")
    assert not (tmp_path / "tier").exists()


SHORT_OF_MEMORY = textwrap.dedent("""
    import os, resource, sys, threading, time
    import numpy as np
    from tierstore import Manifest, TierStore, TierStoreError, load_config, make_offload_keys
    from tierstore.testing.spread import spread_hashes

    backend, path = sys.argv[1:]
    config = {
        "primary": {"capacity": "4MiB"},
        "secondary": [
            {"name": "d", "backend": backend, "path": path, "capacity": "16MiB"},
        ],
    }
    manifest = Manifest.simple("m", 65_536)
    keys = make_offload_keys(manifest.namespace, 0, spread_hashes(range(20)))
    rows = np.full((20, 65_536), 7, np.uint8)
    with TierStore.open(config, manifest) as store:  # imports what it needs
        store.put(keys, rows)
    mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    thread_count = len(os.listdir("/proc/self/task"))
    refusals = 0
    for extra in [*range(0, 400, 100), 1_000]:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (extra << 20), hard))
        try:
            with TierStore.open(config, manifest) as store:
                store.put(keys, rows)
                out = np.zeros_like(rows)
                assert all((row == 7).all() for row, hit in zip(out, store.get(keys, out)) if hit)
        except TierStoreError as error:
            refusals += 1
            assert len(str(error)) < 3_000
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    with TierStore.open(config, manifest) as store:
        assert store.put(keys, rows) == [True] * 20
        assert store.check() == []
    until = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > thread_count:
        assert time.monotonic() < until, f"a refused store left {threading.enumerate()}"
        time.sleep(0.05)
    print("refusals", refusals)
""")


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_process_that_is_short_of_memory_gets_errors_of_ours(tmp_path, backend):
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, backend, str(tmp_path / "tier")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert int(done.stdout.split()[-1]) > 0, "the limit was never felt"


odd = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=80)
    | st.sampled_from(KEYS)
    | st.sampled_from(
        [Raising, FaultError, lambda: Keys(KEYS, "raises"), lambda: ListOfMore(ROWS)]
    ).map(lambda make: make())
)
odder = odd | st.lists(odd, max_size=4) | st.tuples(odd, odd) | st.dictionaries(st.text(), odd)


@settings(deadline=None)
@given(keys=odder | st.just(KEYS), rows=odder | st.just(ROWS))
def test_any_input_is_taken_or_refused_by_name(store, keys, rows):
    for call in (store.put, store.get):
        with contextlib.suppress(TypeError, ValueError):
            call(keys, rows)
    with contextlib.suppress(TypeError, ValueError):
        store.match_prefix(keys)
    assert store.check() == []


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
