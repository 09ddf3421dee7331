"""The catalog against a model, on a disk that is only counted."""

import collections
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierstore.config import SecondaryConfig
from tierstore.errors import BackendFullError, CatalogError, ConfigError, ManifestError
from tierstore.geometry import SpaceGeometry, segment_overhead_pages
from tierstore.key import make_offload_keys
from tierstore.lmdb_env import LmdbEnv
from tierstore.manifest import Manifest
from tierstore.record import PLACE_DTYPE
from tierstore.tier.catalog import Catalog
from tierstore.tier.catalog_messages import (
    BeginEpoch,
    Committed,
    CommitTicket,
    Evict,
    ForgetNamespace,
    Freed,
    Placed,
    Refused,
    ReleaseDone,
    RemoveKeys,
    RequestPlaces,
    TouchKeys,
)
from tierstore.tier.catalog_writer import CatalogWriter

MIB = 1 << 20


class StoppedClock:
    def seconds(self):
        return 0.0


class CountedDisk:
    """What the segment files of one rank would occupy."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.segments = {}
        self.written = set()
        self.payload = 0

    def write(self, places):
        for raw in places:
            place = np.frombuffer(raw, PLACE_DTYPE)[0]
            segment = int(place["segment"])
            if segment not in self.segments:
                pages = self.geometry.segment_pages if self.geometry.charges_segments else 0
                self.segments[segment] = set(range(pages))
            header = self.geometry.header_pages
            first = int(place["header_page"] + header + place["index"] * place["stride_pages"])
            pages = {(segment, page) for page in range(first, first + int(place["stride_pages"]))}
            assert not pages & self.written, "a page was given out twice"
            self.written |= pages
            assert first + place["stride_pages"] <= self.geometry.segment_pages
            self.segments[segment] |= {page for _, page in pages}

    def release(self, freed):
        for run in freed.runs:
            if run.segment in self.segments:
                self.segments[run.segment] -= set(
                    range(run.first_page, run.first_page + run.page_count)
                )
        for segment in freed.empty_segments:
            self.segments.pop(segment, None)

    def pages(self):
        overhead = (
            segment_overhead_pages(self.geometry.segment_pages)
            if self.geometry.charges_segments
            else 0
        )
        return sum(len(pages) + overhead for pages in self.segments.values())


class Harness:
    """A writer, a counted disk, and a model of the records in order of eviction."""

    def __init__(self, path, *, backend="file", capacity=8 * MIB, chunk=64 << 10, ranks=1):
        self.config = SecondaryConfig(name="t", backend=backend, path=path, capacity_bytes=capacity)
        self.manifest = Manifest.simple("m", chunk)
        self.chunk = chunk
        self.ranks = ranks
        self.pins = collections.Counter()
        self.tickets = 0
        self.disk = None
        self.unreleased = []
        self.open()

    def open(self):
        self.catalog = Catalog.open(self.config, self.manifest, rank_count=self.ranks)
        self.writer = CatalogWriter(self.catalog, self.pins, StoppedClock())
        if self.disk is None:
            self.disk = CountedDisk(self.catalog.geometry)
        self.writer.recover()

    def reopen(self):
        self.catalog.close()
        self.open()

    def keys(self, *numbers):
        return make_offload_keys(
            self.manifest.namespace, 0, [b"%016d" % number for number in numbers]
        )

    def take(self):
        events = list(self.writer.events)
        self.writer.events.clear()
        self.unreleased += [event for event in events if isinstance(event, Freed)]
        return [event for event in events if not isinstance(event, Freed | Committed)]

    def release(self):
        while self.unreleased:
            freed = self.unreleased.pop(0)
            self.disk.release(freed)
            self.writer.handle([ReleaseDone(freed.release_id)])
            self.take_later()

    def take_later(self):
        self.later = getattr(self, "later", []) + self.take()

    def store(self, *numbers, failed=()):
        """Store keys, answering releases as they come; return the answer."""
        self.tickets += 1
        self.later = []
        self.writer.handle([RequestPlaces(self.tickets, tuple(self.keys(*numbers)), self.chunk)])
        self.take_later()
        self.release()
        self.take_later()
        (answer,) = self.later
        if isinstance(answer, Placed):
            self.disk.write(answer.places)
            self.check_capacity()
            self.writer.handle([CommitTicket(self.tickets, frozenset(failed))])
            self.take_later()
            self.release()
        self.check_capacity()
        return answer

    def check_capacity(self):
        allowed = self.catalog.space_pages()
        assert self.disk.pages() * self.ranks <= allowed

    def located(self, *numbers):
        return [place is not None for place in self.catalog.locate(self.keys(*numbers))]

    def order(self):
        """Return the recorded numbers, oldest first, as the catalog's victims would be."""
        with self.catalog._env.read(self.catalog._databases.order) as txn:
            return [int(value[-16:]) for _, value in txn.cursor()]


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path)
    yield harness
    harness.catalog.close()


def test_a_committed_record_is_located_and_a_reserved_one_is_not(harness):
    harness.writer.handle([RequestPlaces(1, tuple(harness.keys(1, 2)), harness.chunk)])
    assert harness.located(1, 2) == [False, False]
    harness.writer.handle([CommitTicket(1, frozenset({1}))])
    assert harness.located(1, 2, 3) == [True, False, False]
    assert harness.catalog.check() == []


def test_keys_that_are_recorded_or_being_written_are_left_out(harness):
    harness.store(1)
    harness.writer.handle([RequestPlaces(11, tuple(harness.keys(1, 2)), harness.chunk)])
    harness.writer.handle([RequestPlaces(12, tuple(harness.keys(2, 3, 3)), harness.chunk)])
    first, second = harness.take()
    assert first.keys == tuple(harness.keys(2))
    assert second.keys == tuple(harness.keys(3))


def test_a_key_whose_write_failed_is_placed_again_once_in_the_same_transaction(harness):
    harness.writer.handle([RequestPlaces(1, tuple(harness.keys(1, 2)), harness.chunk)])
    harness.take()
    again = RequestPlaces(2, tuple(harness.keys(1, 2)), harness.chunk)
    third = RequestPlaces(3, tuple(harness.keys(2, 3)), harness.chunk)
    harness.writer.handle([CommitTicket(1, frozenset({0, 1})), again, third])
    first, second = harness.take()
    assert first.keys == tuple(harness.keys(1, 2))
    assert second.keys == tuple(harness.keys(3))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_kib", [16, 64, 1024])
def test_three_times_the_capacity_never_exceeds_it_and_fills_it(
    tmp_path, backend, ranks, chunk_kib
):
    chunk = chunk_kib << 10
    capacity = 64 * MIB
    harness = Harness(tmp_path, backend=backend, capacity=capacity, chunk=chunk, ranks=ranks)
    per_request = min(32, max(1, (2 << 20) // chunk))
    total = 3 * capacity // (chunk * ranks)
    for first in range(0, total, per_request):
        answer = harness.store(*range(first, first + per_request))
        assert isinstance(answer, Placed)
    assert harness.catalog.check() == []
    stats = harness.catalog.stats()
    assert stats.charged_bytes <= capacity
    share = stats.payload_bytes * ranks / capacity
    # A large value of LMDB begins with 16 bytes of its own, so 16 KiB take five pages.
    assert share >= (0.70 if backend == "lmdb" and chunk_kib == 16 else 0.75)
    kept = harness.order()
    assert max(kept) == total - 1 or max(kept) >= total - per_request
    assert min(kept) > 0
    harness.catalog.close()


def test_a_prefix_loses_its_tail_first_and_the_order_survives_a_restart(harness):
    harness.store(1, 2, 3)
    harness.store(4, 5)
    assert harness.order() == [3, 2, 1, 5, 4]
    harness.writer.handle([TouchKeys(tuple(harness.keys(3, 2)))])
    harness.reopen()
    assert harness.order() == [1, 5, 4, 3, 2]
    assert harness.catalog.check() == []


def test_a_pinned_record_survives_eviction(harness):
    harness.store(1, 2)
    harness.pins.update(harness.keys(1))
    for first in range(10, 400, 10):
        harness.store(*range(first, first + 10))
    assert harness.located(1, 2) == [True, False]
    assert harness.catalog.check() == []


def test_pages_of_victims_are_used_only_after_their_release(harness):
    count = 0
    while not harness.writer.waiting:
        count += 1
        keys = tuple(harness.keys(*range(count * 8, count * 8 + 8)))
        harness.writer.handle([RequestPlaces(count, keys, harness.chunk)])
        harness.writer.handle([CommitTicket(count, frozenset())])
    placed = [event.ticket for event in harness.take() if isinstance(event, Placed)]
    assert placed == list(range(1, count))
    assert harness.unreleased
    harness.release()
    assert [event.ticket for event in harness.later] == [count]


def test_a_request_larger_than_the_tier_is_refused(harness):
    answer = harness.store(*range(1000))
    assert isinstance(answer, Refused)
    assert isinstance(harness.store(1), Placed)


def test_forgetting_a_namespace_dooms_what_is_being_written(harness):
    harness.store(1, 2)
    harness.writer.handle([RequestPlaces(50, tuple(harness.keys(3)), harness.chunk)])
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    harness.writer.handle([CommitTicket(50, frozenset())])
    assert harness.located(1, 2, 3) == [False] * 3
    assert harness.catalog.check() == []
    assert harness.catalog.stats().payload_bytes == 0


def test_removed_records_are_gone_and_their_pages_released(harness):
    harness.store(*range(8))
    harness.writer.handle([RemoveKeys(tuple(harness.keys(1, 2, 99)))])
    harness.take()
    assert [(run.page_count) for run in harness.unreleased[-1].runs] == [32]
    assert harness.located(0, 1, 2, 3) == [True, False, False, True]
    assert harness.catalog.check() == []


def test_an_operation_that_meets_damage_is_lost_and_no_other(harness):
    harness.store(*range(8))
    databases = harness.catalog._databases
    with harness.catalog._env.write() as txn, txn.cursor(db=databases.order) as cursor:
        assert cursor.last()
        cursor.delete()
    (youngest,) = [number for number in range(8) if number not in harness.order()]
    for number in (100, 200):
        harness.writer.handle([RemoveKeys(tuple(harness.keys(youngest)))])
        assert isinstance(harness.store(number, number + 1), Placed)
        assert harness.located(number, number + 1) == [True, True]
    harness.reopen()
    assert harness.catalog.damage != ""
    assert harness.located(*range(8)) == [False] * 8
    assert harness.catalog.check() == []


def test_a_write_that_meets_damage_is_answered_and_its_keys_can_be_written_again(harness):
    harness.store(*range(4))
    harness.writer.handle([RequestPlaces(70, tuple(harness.keys(50)), harness.chunk)])
    with harness.catalog._env.write() as txn:
        row = txn.pop(b"state", db=harness.catalog._databases.state)
    harness.writer.handle([CommitTicket(70, frozenset())])
    assert Committed(70) in harness.writer.events
    harness.take()
    assert harness.located(50) == [False]
    with harness.catalog._env.write() as txn:
        txn.put(b"state", row, db=harness.catalog._databases.state)
    assert isinstance(harness.store(50), Placed)
    assert harness.located(50) == [True]


def test_writes_and_releases_of_a_dead_owner_are_adopted(tmp_path):
    harness = Harness(tmp_path)
    harness.store(*range(8))
    harness.writer.handle([RemoveKeys(tuple(harness.keys(1)))])
    harness.writer.handle([RequestPlaces(90, tuple(harness.keys(50, 51)), harness.chunk)])
    harness.catalog._owner_lock.close()  # as the kernel does it for a killed process
    harness.unreleased, harness.disk.written = [], set()
    harness.writer.events.clear()
    harness.open()
    harness.take()
    assert len(harness.unreleased) == 2
    assert harness.catalog.check() == []
    harness.release()
    assert harness.catalog.check() == []
    with harness.catalog._env.read(harness.catalog._databases.pending) as txn:
        assert txn.stat(db=harness.catalog._databases.pending)["entries"] == 0
    assert harness.located(0, 1, 50) == [True, False, False]
    harness.catalog.close()


def test_a_shrunk_capacity_evicts_until_it_fits(tmp_path):
    harness = Harness(tmp_path, capacity=32 * MIB)
    for first in range(0, 480, 16):
        harness.store(*range(first, first + 16))
    harness.catalog.close()
    small = Harness(tmp_path, capacity=8 * MIB)
    small.disk = harness.disk
    small.take()
    small.release()
    small.check_capacity()
    stats = small.catalog.stats()
    assert 0 < stats.charged_bytes <= 8 * MIB
    assert 479 - 15 in small.order()
    assert small.catalog.check() == []
    small.catalog.close()


def test_a_full_map_evicts_instead_of_failing(tmp_path):
    geometry = SpaceGeometry.of(
        SecondaryConfig(name="t", backend="lmdb", path=tmp_path, capacity_bytes=64 * MIB),
        Manifest.simple("m", 4000),
        1,
    )
    LmdbEnv.open(tmp_path / "catalog", map_bytes=3 << 20)  # the first opener decides
    harness = Harness(tmp_path, backend="lmdb", capacity=64 * MIB, chunk=4000)
    assert harness.catalog.geometry == geometry
    answers = collections.Counter()
    for first in range(0, 24000, 32):
        numbers = random.Random(first).sample(range(10**9), 32)
        answers[type(harness.store(*numbers)).__name__] += 1
    assert harness.catalog.check() == []
    assert answers["Placed"] > 700
    assert harness.catalog.stats().record_count > 3000
    harness.catalog.close()
    LmdbEnv.open(tmp_path / "catalog", map_bytes=1).close()


@pytest.mark.parametrize("batch", [4, 32, 200])
@pytest.mark.parametrize("map_kib", [600, 1024])
def test_a_map_that_is_far_too_small_never_refuses_for_good(tmp_path, map_kib, batch):
    LmdbEnv.open(tmp_path / "catalog", map_bytes=map_kib << 10)
    harness = Harness(tmp_path, backend="lmdb", capacity=64 * MIB, chunk=4000)
    for first in range(0, 12_000, batch):
        numbers = random.Random(first).sample(range(10**9), batch)
        answer = harness.store(*numbers)
        assert isinstance(answer, Placed), f"refused after {first} records"
        assert all(harness.located(*numbers))
    assert harness.catalog.check() == []
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    assert harness.catalog.stats().record_count == 0
    harness.take()
    harness.release()
    assert isinstance(harness.store(1, 2, 3), Placed)
    assert harness.catalog.check() == []
    harness.catalog.close()
    LmdbEnv.open(tmp_path / "catalog", map_bytes=1).close()


def test_a_namespace_that_a_failing_catalog_could_not_forget_is_forgotten_later(harness):
    harness.store(1, 2)
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    assert harness.writer.forgotten_count == 0
    harness.catalog._env.write = real
    assert isinstance(harness.store(3), Placed)
    assert harness.writer.forgotten_count == 1
    assert harness.located(1, 2, 3) == [False, False, True]


def test_an_epoch_that_a_failing_catalog_could_not_enter_is_entered_before_its_records(harness):
    epoch = harness.manifest.in_epoch("e")
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([BeginEpoch(epoch.namespace, epoch.canonical_json)])
    harness.catalog._env.write = real
    harness.manifest = epoch
    assert isinstance(harness.store(1), Placed)
    databases = harness.catalog._databases
    for database in (databases.namespaces, databases.epochs):
        with harness.catalog._env.read(database) as txn:
            assert txn.get(epoch.namespace) is not None


def test_the_map_of_the_geometry_has_room_for_random_keys_under_steady_eviction(tmp_path):
    harness = Harness(tmp_path, backend="lmdb", capacity=16 * MIB, chunk=3900)
    for first in range(0, 12_000, 32):
        numbers = random.Random(first).sample(range(10**9), 32)
        assert isinstance(harness.store(*numbers), Placed)
    geometry = harness.catalog.geometry
    assert harness.catalog._env.used_bytes() <= geometry.catalog_map_bytes // 2
    assert harness.catalog.stats().evicted_count > 8000
    harness.catalog.close()


def open_with(harness, manifest):
    Catalog.open(harness.config, manifest, rank_count=harness.ranks).close()


def test_a_model_that_starts_cold_on_a_path_with_its_chunks_is_told_why(tmp_path, caplog):
    harness = Harness(tmp_path)
    first = harness.manifest
    with harness.catalog._env.write() as txn:
        txn.put(b"no json!", b"{", db=harness.catalog._databases.namespaces)
    harness.catalog.close()
    open_with(harness, Manifest.simple("another model", first.chunk_bytes(0)))
    assert caplog.messages == []
    extra = (("dtype", "bfloat16"), ("load_format", "auto"))
    second = dataclasses.replace(first, revision="v2", extra=extra)
    open_with(harness, second)
    third = dataclasses.replace(second, extra=(("dtype", "float16"), ("load_format", "auto")))
    open_with(harness, third)
    open_with(harness, third)
    cold = "chunks of the same model are stored under another identity and will not be found: "
    revised, retyped = caplog.messages
    assert revised == (
        f"{cold}secondary=t extra.dtype: stored None, ours 'bfloat16'; "
        "extra.load_format: stored None, ours 'auto'; revision: stored '', ours 'v2'"
    )
    assert retyped == f"{cold}secondary=t extra.dtype: stored 'bfloat16', ours 'float16'"


def test_another_manifest_under_the_same_namespace_is_refused(tmp_path):
    harness = Harness(tmp_path)
    config, namespace = harness.catalog._config, harness.manifest.namespace
    harness.catalog.close()
    forged = Manifest.simple("forged", harness.chunk)
    vars(forged)["namespace"] = namespace
    with pytest.raises(ManifestError, match="model"):
        Catalog.open(config, forged, rank_count=1)


def test_a_path_of_another_backend_is_refused(tmp_path):
    Harness(tmp_path).catalog.close()
    with pytest.raises(ConfigError, match="another backend"):
        Harness(tmp_path, backend="lmdb")


def test_a_capacity_below_one_segment_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="raise it by at least"):
        Harness(tmp_path, capacity=MIB)


def test_a_file_that_is_no_catalog_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"x" * 65536)
    with pytest.raises(CatalogError, match="remove"):
        Harness(tmp_path)


def test_a_failing_catalog_refuses_and_recovers(harness):
    harness.store(1)
    harness.writer.handle([RequestPlaces(70, tuple(harness.keys(5)), harness.chunk)])
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([CommitTicket(70, frozenset())])
    harness.writer.handle([RequestPlaces(71, tuple(harness.keys(6)), harness.chunk)])
    harness.catalog._env.write = real
    assert [type(event).__name__ for event in harness.take()] == ["Placed", "Refused"]
    assert isinstance(harness.store(7), Placed)
    assert harness.located(1, 5, 6, 7) == [True, False, False, True]
    assert harness.catalog.check() == []


def test_a_backlog_of_touches_of_all_records_evicts_none(tmp_path):
    harness = Harness(tmp_path, chunk=4096)
    harness.store(*range(4))
    touches = [TouchKeys(tuple(harness.keys(3, 2, 1, 0)))] * 1000
    harness.writer.handle([*touches, TouchKeys(tuple(harness.keys(3)))])
    assert harness.order() == [2, 1, 0, 3]
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_a_full_device_evicts_nothing_and_leaves_the_catalog_as_large_as_it_was(harness):
    for first in range(0, 40, 8):
        harness.store(*range(first, first + 8))
    real, failures = harness.catalog._env.write, iter(range(1))

    def full_once(*arguments):
        if next(failures, None) is not None:
            raise BackendFullError("no space left on device")
        return real(*arguments)

    harness.catalog._env.write = full_once
    assert isinstance(harness.store(100), Refused)
    assert harness.located(*range(40)) == [True] * 40
    for first in range(200, 240, 8):
        assert isinstance(harness.store(*range(first, first + 8)), Placed)
    assert harness.located(*range(40)) == [True] * 40
    assert harness.catalog.check() == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 200), min_size=1, max_size=12)),
        st.tuples(st.just("touch"), st.lists(st.integers(0, 200), min_size=1, max_size=6)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 200), min_size=1, max_size=3)),
        st.tuples(st.just("fail"), st.lists(st.integers(0, 200), min_size=1, max_size=40)),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
@example(
    steps=[
        ("store", [0, *range(31, 37), 2]),
        ("store", [*range(23, 31)]),
        ("store", [11, *range(18, 23), *range(37, 41)]),
        ("fail", [*range(1, 11), *range(12, 18)]),  # evicts its own key 2, then stores it anew
    ]
)
def test_the_catalog_agrees_with_a_model(tmp_path_factory, backend, steps):
    """Goal: records and their order equal a dict's, whatever happens; capacity holds throughout.

    Method: the model appends, moves and removes; what the catalog evicted is a prefix of it.
    """
    harness = Harness(tmp_path_factory.mktemp("model"), backend=backend, capacity=4 * MIB)
    model = {}
    for name, drawn in steps:
        numbers = list(dict.fromkeys(drawn))
        failed = range(0, len(numbers), 2) if name == "fail" else range(0)
        if name in ("store", "fail"):
            answer = harness.store(*numbers, failed=failed)
            if isinstance(answer, Placed):
                stored = [
                    int(key[-16:]) for i, key in enumerate(answer.keys) if i not in set(failed)
                ]
                # Placed keys had no record: a request that waits may evict what it names itself.
                for key in answer.keys:
                    model.pop(int(key[-16:]), None)
                model.update(dict.fromkeys(reversed(stored)))
        elif name == "touch":
            harness.writer.handle([TouchKeys(tuple(harness.keys(*numbers)))])
            for number in numbers:
                if number in model:
                    model[number] = model.pop(number)
        elif name == "remove":
            harness.writer.handle([RemoveKeys(tuple(harness.keys(*numbers)))])
            for number in numbers:
                model.pop(number, None)
        else:
            harness.reopen()
        harness.writer.handle([Evict()])
        harness.take()
        harness.release()
        harness.check_capacity()
        order = harness.order()
        expected = list(model)
        assert order == expected[len(expected) - len(order) :]
        model = dict.fromkeys(order)
        assert harness.catalog.check() == []
    harness.catalog.close()
