"""Capacities are hard, well used, and leave in the order of use, restarts included."""

import errno
import random
from functools import partial

import pytest
from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError

CAPACITY_BYTES = 64 * MIB


class FullDevice(SystemCalls):
    """A device on which no segment can be allocated as long as it is full."""

    is_full = True

    def allocate(self, fd, offset, size_bytes):
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        super().allocate(fd, offset, size_bytes)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("chunk_bytes", [16_384, 65_536, 262_144, 1 << 20])
def test_ten_times_the_capacity_never_shows_in_du(tmp_path, backend, chunk_bytes):
    chunks = Chunks(chunk_bytes)
    path = tmp_path / "tier"
    batch = 8 * MIB // chunk_bytes
    written = 0
    with chunks.open(config_of(path, backend=backend)) as store:
        while written * chunk_bytes < 10 * CAPACITY_BYTES:
            chunks.put(store, range(written, written + batch))
            written += batch
            assert du(path) <= CAPACITY_BYTES
        store.flush()
        assert du(path) <= CAPACITY_BYTES
        assert store.check() == []
        stats = store.stats().secondary["disk"]
        assert stats.payload_bytes >= 0.75 * CAPACITY_BYTES
        assert stats.charged_bytes <= CAPACITY_BYTES
        newest = range(written - batch, written)
        assert chunks.found(store, newest) == list(newest)
    assert du(path) <= CAPACITY_BYTES
    with chunks.open(config_of(path, backend=backend)) as store:
        assert store.check() == []
        chunks.put(store, range(written, written + batch))
        store.flush()
        assert du(path) <= CAPACITY_BYTES


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_after_a_restart_the_least_recently_used_leave_first(tmp_path, backend):
    chunks = Chunks(262_144)
    config = config_of(tmp_path / "tier", backend=backend, primary="2MiB")
    with chunks.open(config) as store:
        for first in range(0, 160, 8):
            chunks.put(store, range(first, first + 8))
        assert chunks.found(store, range(16, 32)) == list(range(16, 32))
    with chunks.open(config) as store:
        before = store.stats().secondary["disk"].evicted_count
        number = 1000
        while store.stats().secondary["disk"].evicted_count - before < 60:
            chunks.put(store, range(number, number + 8))
            store.flush()
            number += 8
        survivors = set(chunks.found(store, range(160)))
        assert set(range(16, 32)) <= survivors, "recently used chunks went first"
        assert not survivors & set(range(8)), "the oldest chunks outlived younger ones"


def test_a_smaller_capacity_of_segment_files_is_reached_after_a_restart(tmp_path):
    chunks = Chunks(262_144)
    path = tmp_path / "tier"
    with chunks.open(config_of(path)) as store:
        chunks.put(store, range(200))
    with chunks.open(config_of(path, capacity="32MiB")) as store:
        chunks.put(store, range(1000, 1008))
        store.flush()
        assert store.check() == []
        assert du(path) <= 32 * MIB


def test_two_stores_on_one_path_share_its_capacity_and_its_chunks(tmp_path):
    chunks = Chunks(262_144)
    config = config_of(tmp_path / "tier")
    with chunks.open(config) as one, chunks.open(config) as other:
        for first in range(0, 400, 16):
            chunks.put(one, range(first, first + 16))
            chunks.put(other, range(10_000 + first, 10_000 + first + 16))
            assert du(tmp_path / "tier") <= CAPACITY_BYTES
        one.flush()
        other.flush()
        counters = [store.stats().counters for store in (one, other)]
        evicted = [one_of['evicted_chunks_total{tier="disk"}'] for one_of in counters]
        assert sum(evicted) == one.stats().secondary["disk"].evicted_count
        assert min(evicted) > 0
        newest = list(range(384, 400))
        assert chunks.found(other, newest) == newest
        assert one.check() == []
        assert du(tmp_path / "tier") <= CAPACITY_BYTES


def test_a_segment_that_could_not_be_made_at_first_takes_no_more_than_is_charged(tmp_path):
    """Goal: the pages of writes that failed were released; the file must not bring them back."""
    chunks = Chunks(65_536)
    path = tmp_path / "tier"
    device = FullDevice()
    config = config_of(path, capacity="256MiB")
    opener = partial(open_backend, system=device)
    with TierStore.open(config, chunks.manifest, open_backend=opener) as store:
        for first in range(0, 90, 3):
            chunks.put(store, range(first, first + 3))
            with pytest.raises(BackendError, match="full"):
                store.flush()
            assert store.check() == []
        device.is_full = False
        chunks.put(store, range(1000, 1001))
        store.flush()
        assert store.check() == []
        assert chunks.found(store, range(1000, 1001)) == [1000]
        assert du(path) <= store.stats().secondary["disk"].charged_bytes


def test_what_a_link_in_the_place_of_a_segment_leads_to_is_left_alone(tmp_path):
    chunks = Chunks(65_536)
    path = tmp_path / "tier"
    with chunks.open(config_of(path)) as store:
        chunks.put(store, range(8))
    precious = tmp_path / "precious"
    precious.write_bytes(b"p" * 100_000)
    (path / "rank0" / "00000009.seg").symlink_to(precious)
    with chunks.open(config_of(path)) as store:
        assert chunks.found(store, range(8)) == list(range(8))
        chunks.put(store, range(20, 60))
        store.flush()
        assert chunks.found(store, range(20, 60)) == list(range(20, 60))
        assert store.check() == []
    assert precious.read_bytes() == b"p" * 100_000
    assert not (path / "rank0" / "00000009.seg").exists()


@pytest.mark.parametrize(("small_bytes", "large_bytes"), [(4096, 262_144), (65_536, 262_144)])
def test_large_chunks_find_room_in_one_piece_among_small_ones(tmp_path, small_bytes, large_bytes):
    """A value of LMDB needs adjacent pages, which small records of others cut short."""
    chosen = random.Random(1)
    kits = [Chunks(small_bytes, "small"), Chunks(large_bytes, "large")]
    config = config_of(tmp_path / "tier", backend="lmdb", capacity="48MiB", primary="4MiB")
    stores = [kit.open(config) for kit in kits]
    counts = [0, 0]

    def store_more(i):
        numbers = range(counts[i], counts[i] + MIB // kits[i].chunk_bytes)
        kits[i].put(stores[i], numbers)
        counts[i] = numbers.stop

    for _ in range(120):
        for i in range(2):
            for _ in range(chosen.randrange(3)):
                store_more(i)
            stores[i].flush()
        assert du(tmp_path / "tier") <= 48 * MIB
    for _ in range(30):
        store_more(1)
        stores[1].flush()
    for store in stores:
        assert store.check() == []
        store.close()
    with kits[1].open(config) as store:
        assert len(kits[1].found(store, range(counts[1] - 40, counts[1]))) == 40
