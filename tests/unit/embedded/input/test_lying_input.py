"""Callers' objects that raise, lie or are of the wrong kind: a documented error, and no change.

Nothing of them may come out of a public name but an error of ours, `TypeError` or `ValueError`
with words of bounded length, and none may leave a store in doubt.
"""

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lying_kit import (
    CHUNKS,
    HUGE,
    KEYS,
    NAMESPACE,
    NUMBERS,
    ROWS,
    WORDS_MAX,
    FaultError,
    Keys,
    ListOfMore,
    Raising,
    odder,
    refused,
)
from python_paths import environment
from store_kit import config_of

from tierstore import (
    TierStore,
    make_offload_keys,
)
from tierstore.config import IoConfig, PrimaryConfig, SecondaryConfig, StoreConfig
from tierstore.errors import ConfigError


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
        env=environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert int(done.stdout.split()[-1]) > 0, "the limit was never felt"


@settings(deadline=None)
@given(keys=odder | st.just(KEYS), rows=odder | st.just(ROWS))
def test_any_input_is_taken_or_refused_by_name(store, keys, rows):
    for call in (store.put, store.get):
        with contextlib.suppress(TypeError, ValueError):
            call(keys, rows)
    with contextlib.suppress(TypeError, ValueError):
        store.match_prefix(keys)
    assert store.check() == []
