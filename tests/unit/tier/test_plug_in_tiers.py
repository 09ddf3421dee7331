"""A tier that another package brings along, named in a YAML file, through `TierStore`.

Its package is `SOURCE`: both halves of a store that is a dictionary in the memory of the process.
"""

import importlib
import subprocess
import sys

import pytest
import yaml
from python_paths import environment
from store_kit import Chunks, config_of
from waiting import within_seconds
from written_plug_in import write_plug_in

from tierstore import TierStore
from tierstore.config import load_config
from tierstore.embedded.planes import Patience
from tierstore.errors import ConfigError, MissingExtraError, TierStoreError
from tierstore.metrics import Counters
from tierstore.tier.opening import check_tiers, open_stack
from tierstore.transfer import FailureReason

SOURCE = """
from remote_tier import RemoteBackend, RemoteStore, RemoteTier
from tierstore import errors

STORES = {}
TIERS = []
ASKED = []
FAILS = set()
WRITTEN = []
READ = []

def store_of(name):
    return STORES.setdefault(name, RemoteStore(capacity_count=64))

class Tier(RemoteTier):
    def begin(self):
        super().begin()
        self.is_begun = True
    def close(self, timeout_seconds=None):
        super().close(timeout_seconds)
        self.is_closed = True

class RaggedTier(Tier):
    # Its places differ in width.
    def _place(self, key, epoch=None):
        return super()._place(key, epoch) + bytes(key[-1] % 3)

def make_tier(config, manifest, *, tier_idx, rank_count, bucket, raises=None):
    if raises is not None:
        raise getattr(errors, raises)("as told")
    ASKED.append((config.name, config.path, config.capacity_bytes, tier_idx, rank_count))
    TIERS.append((RaggedTier if bucket == "ragged" else Tier)(store_of(bucket)))
    return TIERS[-1]

def make_part(config, manifest, **more):
    class Part:
        is_open = True
        def begin(self): ...
    return Part()

class Backend(RemoteBackend):
    def write(self, records):
        WRITTEN.append(len(records))
        refused = dict.fromkeys(range(len(records)), *FAILS) if FAILS else None
        return super().write(records) if refused is None else refused
    def read(self, records):
        READ.append(len(records))
        return super().read(records)

def make_backend(config, manifest, *, rank, rank_count, codec, system, pool, bucket):
    store_of(bucket).backends.append(pool)
    return Backend(store_of(bucket), pool)
"""
CHUNKS = Chunks()
SLOT_COUNT = 16
NUMBERS = range(40)
LAST = NUMBERS[-SLOT_COUNT:]
"""What is in memory after all were stored in order."""


class PlugIn:
    """The package, and a configuration that names it."""

    def __init__(self, folder):
        self.folder = folder
        name = folder.name
        value = write_plug_in(folder, "tierstore.tiers", name, SOURCE, attribute="make_tier")
        self.module = value.partition(":")[0]
        again = f"from {self.module} import make_backend, make_part\n"
        write_plug_in(folder, "tierstore.backends", name, again, attribute="make_backend")
        write_plug_in(folder, "tierstore.tiers", f"{name}_part", again, attribute="make_part")
        self.name = name
        self.path = folder.parent / "kept"

    def config(self, **tier):
        options = {"bucket": "b"}
        keys = {
            "tier": self.name,
            "tier_options": options,
            "backend_options": options,
            "backend": self.name,
            **tier,
        }
        config = config_of(self.path, primary=f"{SLOT_COUNT * 64}KiB", **keys)
        config["primary"]["eviction"] = "lru"
        config["secondary"][0]["name"] = "remote"
        return config

    def imported(self):
        return importlib.import_module(self.module)


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    folder = tmp_path / f"tier_{tmp_path.name}"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return PlugIn(folder)


def store_all(store):
    for first in range(0, len(NUMBERS), 8):
        assert CHUNKS.put(store, NUMBERS[first : first + 8]) == 8
        store.flush()


PROGRAM = """
import importlib, sys
from store_kit import Chunks
from tierstore import TierStore

CHUNKS, NUMBERS = Chunks(), range(40)
made = importlib.import_module(sys.argv[2])
with TierStore.open(sys.argv[1], CHUNKS.manifest) as store:
    [kept] = made.STORES.values()
    for first in range(0, len(NUMBERS), 8):
        assert CHUNKS.put(store, NUMBERS[first : first + 8]) == 8
        store.flush()
    assert len(kept.published) == len(NUMBERS)
    early = NUMBERS[:8]
    assert CHUNKS.found(store, early) == list(early)
    assert CHUNKS.found(store, [99]) == []
    stats = store.stats()
    assert stats.secondary["remote"].record_count == len(NUMBERS)
    assert stats.counters['demoted_chunks_total{tier="remote"}'] == len(NUMBERS)
    assert stats.counters['promoted_chunks_total{tier="remote"}'] == len(early)
    assert stats.counters['tier_state{tier="remote"}'] == 0
    assert store.check() == []
    assert made.ASKED == [("remote", store._config.secondary[0].path, 64 << 20, 0, 1)]
    pool = store._executor.pool
    [region] = kept.backends
    assert (region.address, region.length) == (pool.address, pool.size_bytes)
[tier] = made.TIERS
assert tier.is_begun and tier.is_closed
with TierStore.open(sys.argv[1], CHUNKS.manifest) as store:
    assert CHUNKS.found(store, NUMBERS[:8]) == list(NUMBERS[:8])
print("done")
"""


def run_from_yaml(plug_in, config):
    file = plug_in.folder / "store.yaml"
    file.write_text(yaml.safe_dump(config))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), plug_in.module],
        env=environment(plug_in.folder),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_chunks_that_left_memory_come_back_from_the_tier_that_a_file_names(plug_in):
    run = run_from_yaml(plug_in, plug_in.config())
    assert run.stdout == "done\n", run.stderr
    assert not plug_in.path.exists()


def test_what_lies_below_its_path_is_not_taken_for_a_catalog(plug_in):
    for name in ("catalog", "owners", "rank0"):
        (plug_in.path / name).mkdir(parents=True)
    before = sorted(plug_in.path.rglob("*"))
    run = run_from_yaml(plug_in, plug_in.config())
    assert run.stdout == "done\n", run.stderr
    assert sorted(plug_in.path.rglob("*")) == before


def test_a_question_that_hangs_does_not_keep_what_is_in_memory(plug_in):
    with TierStore.open(plug_in.config(), CHUNKS.manifest) as store:
        kept = plug_in.imported().STORES["b"]
        store_all(store)
        with kept.held():
            assert CHUNKS.found(store, LAST) == list(LAST)
            assert CHUNKS.found(store, [0, *LAST[:4], 1]) == list(LAST[:4])
            assert CHUNKS.found(store, [0, 1]) == []
        assert within_seconds(lambda: CHUNKS.found(store, [0, 1]) == [0, 1])
        assert store.check() == []


def test_its_breaker_puts_it_out_of_use_and_in_use_again(plug_in):
    io = {"breaker": {"failures": 2, "retry_after": "10ms", "retry_after_max": "10ms"}}
    patience = Patience(put_seconds=0.1, close_seconds=1)
    with TierStore.open(plug_in.config(io=io), CHUNKS.manifest, patience=patience) as store:
        fails, kept = plug_in.imported().FAILS, plug_in.imported().STORES["b"]
        fails.add(FailureReason.IO_ERROR)
        for number in range(4):
            assert CHUNKS.put(store, [number]) == 1
        trips = 'tier_trips_total{tier="remote"}'
        assert within_seconds(lambda: store.stats().counters[trips] > 0)
        assert CHUNKS.found(store, range(4)) == list(range(4))
        assert not kept.published
        fails.clear()
        assert within_seconds(lambda: store.stats().counters['tier_state{tier="remote"}'] == 0)
        store.flush()
        assert len(kept.published) == 4


def open_checked(config):
    check_tiers(load_config(config), CHUNKS.manifest, rank_count=2)


def open_store(config):
    TierStore.open(config, CHUNKS.manifest).close()


def open_engine(config):
    open_stack(load_config(config), CHUNKS.manifest, rank_count=2, counters=Counters()).close()


OPENERS = pytest.mark.parametrize("opened", [open_store, open_engine, open_checked])


@OPENERS
def test_whoever_opens_it_closes_it(plug_in, opened):
    opened(plug_in.config())
    [tier] = plug_in.imported().TIERS
    assert tier.is_begun
    assert tier.is_closed


@OPENERS
def test_options_that_it_does_not_take_are_refused(plug_in, opened):
    for options in ({"bucket": "b", "colour": "red"}, {}, {"bucket": "b", "tier_idx": 3}):
        with pytest.raises(
            ConfigError,
            match=r"^secondary\[0\]\.tier: '.*': the plug-in makes no tier: TypeError.*; see "
            r"secondary\[0\]\.tier_options$",
        ) as caught:
            opened(plug_in.config(tier_options=options))
        assert isinstance(caught.value.__cause__, TypeError)


@OPENERS
def test_what_lacks_members_is_refused_by_their_names(plug_in, opened):
    name = f"{plug_in.name}_part"
    with pytest.raises(ConfigError, match=rf"^secondary\[0\]\.tier: '{name}': ") as caught:
        opened(plug_in.config(tier=name))
    assert "has no change_count, check, close, " in str(caught.value)
    assert "is_open" not in str(caught.value)
    assert str(caught.value).endswith("must implement tierstore.tier.secondary.SecondaryTier")


@OPENERS
def test_what_it_refuses_itself_is_said_in_its_own_words(plug_in, opened):
    for kind in (ConfigError, MissingExtraError):
        with pytest.raises(TierStoreError, match=r"^as told$") as caught:
            opened(plug_in.config(tier_options={"bucket": "b", "raises": kind.__name__}))
        assert type(caught.value) is kind


def test_an_unknown_tier_is_refused_by_its_key(plug_in):
    with pytest.raises(ConfigError) as caught:
        open_store(plug_in.config(tier="dsik"))
    text = str(caught.value)
    assert text.startswith("secondary[0].tier: expected 'disk', got 'dsik'; did you mean 'disk'?")
    assert f"'{plug_in.name}'" in text


@pytest.mark.parametrize("bucket", ["even", "ragged"])
def test_places_of_a_tier_are_its_own_and_the_threads_share_its_records(plug_in, bucket):
    """A place means nothing to the executor: the records of a command are divided anywhere."""
    chunks, count = Chunks(chunk_bytes=1 << 20), 4
    options = {"bucket": bucket}
    config = plug_in.config(tier_options=options, backend_options=options)
    config["primary"]["capacity"] = "256MiB"  # so that one command brings all of them
    made = plug_in.imported()
    with chunks.open(config) as store:
        assert chunks.put(store, range(count)) == count
        store.flush()
    widths = {len(place) for place in made.STORES[bucket].published}
    assert (len(widths) == 1) == (bucket == "even")
    assert [1] * count == made.WRITTEN
    with chunks.open(config) as store:
        assert chunks.found(store, range(count)) == list(range(count))
        assert [1] * count == made.READ
        assert store.check() == []
