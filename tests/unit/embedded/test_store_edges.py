"""A store at its edges: chunks named twice, room for one chunk, interrupted calls."""

import resource
from pathlib import Path

import numpy as np
import pytest
from open_resources import are_given_back, open_resources
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.errors import ClosedError

CHUNKS = Chunks(65_536)
CASCADES = ["write_through", "on_evict", "second_touch"]


def held(store):
    """Count what transfers hold: pins, slots that are arriving, bytes that wait to be written."""
    primary = store._stack.primary
    queued = sum(cascade.demotes.queue.queued_bytes for cascade in store._stack.cascades)
    return len(primary._pins), len(primary.arriving), queued


@pytest.mark.parametrize("cascade", CASCADES)
def test_chunks_named_twice_in_one_call_are_stored_once_and_hold_nothing(tmp_path, cascade):
    numbers = [0, 1, 0, 1, 2, 0]
    with CHUNKS.open(config_of(tmp_path, cascade=cascade)) as store:
        for _ in range(3):
            assert CHUNKS.put(store, numbers) == len(numbers)
        assert CHUNKS.found(store, numbers) == numbers
        store.flush()
        assert held(store) == (0, 0, 0)
        assert store.stats().secondary["disk"].record_count == 3
        assert store.check() == []


def test_chunks_on_disk_that_are_asked_for_twice_are_found_twice(tmp_path):
    config = config_of(tmp_path, primary="2MiB")  # two chunks per batch of a `get`
    numbers = range(24)
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, numbers) == 24
    with CHUNKS.open(config) as store:
        asked = [*numbers, *numbers[::-1], 7]
        assert CHUNKS.found(store, asked) == asked
        assert held(store) == (0, 0, 0)


@pytest.mark.timeout(50)  # a flush that cannot end gives up after a minute
@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize(("primary", "queue"), [("64KiB", "256MiB"), ("8MiB", "1KiB")])
def test_room_for_one_chunk_is_enough_for_its_record(tmp_path, cascade, primary, queue):
    config = config_of(tmp_path, primary=primary, cascade=cascade, io={"write_queue": queue})
    with CHUNKS.open(config) as store:
        for number in range(4):
            assert CHUNKS.put(store, [number]) == 1
        assert CHUNKS.put(store, range(8, 12)) > 0
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, [*range(4), *range(8, 12)]) == [*range(4), *range(8, 12)]


def test_an_interrupted_store_refuses_further_calls_and_closes_at_once(tmp_path):
    with CHUNKS.open(config_of(tmp_path)) as store:
        CHUNKS.put(store, range(8))
        store._loop.pump = interrupted
        with pytest.raises(KeyboardInterrupt):
            store.match_prefix(CHUNKS.keys(range(8)))
        for call in (store.flush, store.check, store.stats):
            with pytest.raises(ClosedError, match="interrupted"):
                call()


def interrupted():
    raise KeyboardInterrupt


def test_a_plug_in_that_raises_in_the_second_tier_leaves_nothing_open(tmp_path):
    config = config_of(tmp_path / "0")
    second = config["secondary"][0] | {"name": "second", "path": str(tmp_path / "1")}
    config["secondary"].append(second)

    def open_first_only(tier, manifest, *, rank, rank_count):
        if tier.name == "second":
            raise RuntimeError("a bug of a plug-in")
        return open_backend(tier, manifest, rank=rank, rank_count=rank_count)

    before = open_resources()
    with pytest.raises(RuntimeError, match="plug-in"):
        TierStore.open(config, CHUNKS.manifest, open_backend=open_first_only)
    assert within_seconds(lambda: are_given_back(before))
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, range(4)) == 4


def test_a_segment_that_cannot_be_mapped_is_a_miss_and_leaves_no_descriptor(tmp_path):
    config = config_of(tmp_path, io={"mode": "mmap"})
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(8))
    with CHUNKS.open(config) as store:
        out = np.zeros((8, CHUNKS.chunk_bytes), np.uint8)
        keys = CHUNKS.keys(range(8))
        before = open_resources()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 19), limits[1]))
        try:
            found = store.get(keys, out)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert found == [False] * 8
        assert within_seconds(lambda: are_given_back(before))
        assert store.match_prefix(keys).chunk_count == 0, "offered again at once"
    with CHUNKS.open(config) as store:
        assert store.get(keys, out) == [True] * 8
        assert np.array_equal(out, CHUNKS.array(range(8)))


def test_a_chunk_that_left_every_tier_is_written_again_when_it_comes_again(tmp_path):
    config = config_of(tmp_path, cascade="on_evict", primary="1MiB", capacity="8MiB")
    config["primary"]["eviction"] = "lru"
    with CHUNKS.open(config) as store:
        for numbers in (range(8), range(100, 400), range(8), range(1000, 1064)):
            for first in range(0, len(numbers), 4):
                assert CHUNKS.put(store, numbers[first : first + 4]) == 4
            store.flush()
        assert store._stack.primary.locate(CHUNKS.keys(range(8))) == [None] * 8
        assert CHUNKS.found(store, range(8)) == list(range(8))
        assert store.stats().secondary["disk"].evicted_count > 100
