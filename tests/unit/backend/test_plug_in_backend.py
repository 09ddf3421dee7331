"""A tier whose payload store comes from another package, through `TierStore`."""

import numpy as np
import pytest
from store_kit import Chunks, config_of
from written_plug_in import write_plug_in

from tierstore.errors import ConfigError

SOURCE = """
from tierstore.codec.record import parse_places
from tierstore.transfer import FailureReason

RECORDS = {}

class InMemory:
    '''Keeps records by rank and place, as long as the process lives.'''

    def __init__(self, config, manifest, *, rank, rank_count, codec, system, fails=''):
        if fails == 'make': raise OSError(5, 'not now')
        self._fails = fails
        self._records = RECORDS.setdefault((str(config.path), rank), {})

    def open(self):
        if self._fails == 'open': raise RuntimeError('not now')

    def write(self, records):
        for record, place in self._placed(records):
            payload = bytes(record.slot[: place["payload_bytes"]])
            self._records[record.place] = record.key, payload
        return {}

    def read(self, records):
        failed = {}
        for index, (record, place) in enumerate(self._placed(records)):
            key, payload = self._records.get(record.place, (None, b""))
            if key == record.key and len(payload) == place["payload_bytes"]:
                record.slot[: len(payload)] = payload
            else:
                failed[index] = FailureReason.ABSENT
        return failed

    def release(self, runs, empty_segments):
        for name in list(self._records):
            [place] = parse_places([name])
            first = place["header_page"] + 1 + place["index"] * place["stride_pages"]
            is_gone = place["segment"] in set(empty_segments) or any(
                run.segment == place["segment"]
                and run.first_page <= first < run.first_page + run.page_count
                for run in runs
            )
            if is_gone:
                del self._records[name]

    def _placed(self, records):
        return zip(records, parse_places([record.place for record in records]))

    def sync(self): ...
    def lost_segments(self, relied_on=frozenset()): return frozenset()
    def close(self): ...
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    folder = tmp_path / tmp_path.name
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    name = f"backend_{tmp_path.name}"
    value = write_plug_in(folder, "tierstore.backends", name, SOURCE, attribute="InMemory")
    return name, __import__(value.partition(":")[0]).RECORDS


def test_chunks_go_down_to_it_and_come_back(plug_in, tmp_path):
    name, records = plug_in
    chunks = Chunks()
    config = config_of(tmp_path / "tier", backend=name, primary="1MiB")
    with chunks.open(config) as store:
        for first in range(0, 64, 8):
            assert chunks.put(store, range(first, first + 8)) == 8
        store.flush()
        assert store.stats().secondary["disk"].record_count == 64
        assert chunks.found(store, range(64)) == list(range(64))
        assert store.check() == []
    assert sum(map(len, records.values())) == 64
    with chunks.open(config) as store:
        assert chunks.found(store, range(64)) == list(range(64))


def test_its_capacity_is_hard(plug_in, tmp_path):
    name, records = plug_in
    chunks = Chunks()
    config = config_of(tmp_path / "tier", backend=name, primary="1MiB", capacity="8MiB")
    with chunks.open(config) as store:
        for first in range(0, 320, 8):
            chunks.put(store, range(first, first + 8))
            store.flush()
        assert store.check() == []
        found = chunks.found(store, range(320))
    assert found
    kept = [payload for by_place in records.values() for _, payload in by_place.values()]
    assert sum(map(len, kept)) <= 8 << 20


@pytest.mark.parametrize("other", ["file", "lmdb"])
def test_a_path_belongs_to_one_backend(plug_in, tmp_path, other):
    name, _ = plug_in
    chunks = Chunks()
    for first, second in ((name, other), (other, name)):
        path = tmp_path / first
        with chunks.open(config_of(path, backend=first)) as store:
            chunks.put(store, range(8))
            store.flush()
        with pytest.raises(ConfigError, match="another backend"):
            chunks.open(config_of(path, backend=second))


def test_options_that_it_does_not_take_are_refused(plug_in, tmp_path):
    name, _ = plug_in
    config = config_of(tmp_path / "tier", backend=name, backend_options={"colour": "red"})
    with pytest.raises(ConfigError, match=r"the plug-in makes no backend: .*backend_options"):
        Chunks().open(config)


@pytest.mark.parametrize("call", ["make", "open"])
def test_one_that_cannot_be_opened_now_costs_its_tier_alone(plug_in, tmp_path, call):
    name, _ = plug_in
    chunks = Chunks()
    config = config_of(tmp_path / "tier", backend=name, backend_options={"fails": call})
    with chunks.open(config) as store:
        assert chunks.put(store, range(8)) == 8
        out = np.zeros((8, chunks.chunk_bytes), np.uint8)
        assert all(store.get(chunks.keys(range(8)), out))
        assert chunks.found(store, range(100, 104)) == []


NONSENSE = [
    "None",
    "[]",
    "5",
    "{0: 'absent'}",
    "{'0': FailureReason.ABSENT}",
    "{0: None}",
    "{-1: FailureReason.ABSENT}",
    "{99: FailureReason.ABSENT}",
    "{0.0: FailureReason.ABSENT}",
    "{True: FailureReason.ABSENT}",
    "records.clear() or {}",
    "sys.exit(3)",
    "1 / 0",
]


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("answer", NONSENSE)
def test_one_that_answers_nonsense_costs_its_records_alone(tmp_path, monkeypatch, call, answer):
    """It does what it should, and says something else: nothing hangs, and no byte is wrong."""
    folder = tmp_path / tmp_path.name
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    name = f"liar_{tmp_path.name}".replace("-", "_")
    lying = f"""
import sys

class Liar(InMemory):
    def {call}(self, records):
        failed = super().{call}(records)
        return {answer} if LYING else failed

LYING = []
"""
    value = write_plug_in(folder, "tierstore.backends", name, SOURCE + lying, attribute="Liar")
    chunks = Chunks()
    io = {"threads": 2, "deadline": "3600s"}
    config = config_of(tmp_path / "tier", backend=name, primary="1MiB", io=io)
    config["primary"]["eviction"] = "lru"
    with chunks.open(config) as store:
        assert chunks.put(store, range(32)) == 32
        store.flush()
        is_lying = __import__(value.partition(":")[0]).LYING
        is_lying.append(True)
        for first in range(0, 64, 8):
            chunks.put(store, range(first, first + 8))
            chunks.found(store, range(first, first + 8))
        is_lying.clear()
        assert chunks.put(store, range(100, 108)) == 8
        assert chunks.found(store, range(100, 108)) == list(range(100, 108))
        assert store.check() == []
