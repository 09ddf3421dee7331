"""Who opens a backend is told where the pool lies, if they ask."""

import threading
from functools import partial

import pytest

from store_kit import Chunks, config_of  # isort: skip

from tierstore import TierStore, load_config
from tierstore.backend.opening import open_backend
from tierstore.backend.protocol import PoolRegion
from tierstore.device.system import buffer_address
from tierstore.executor.executor import TransferExecutor
from tierstore.metrics import Counters
from tierstore.testing.faults import FaultPlan, faulty_backend_opener

CHUNKS = Chunks(65_536)


class RegisteredBackend:
    """A backend of a device that reaches registered memory only."""

    def __init__(self, backend, region):
        self._backend = backend
        self._region = region

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def write(self, records):
        self._require_registered(records)
        return self._backend.write(records)

    def read(self, records):
        self._require_registered(records)
        return self._backend.read(records)

    def _require_registered(self, records):
        for record in records:
            start = buffer_address(record.slot) - self._region.address
            assert 0 <= start <= self._region.length - len(record.slot)


class Device:
    def __init__(self):
        self.regions = []

    def open(self, config, manifest, *, rank, rank_count, pool=None):
        self.regions.append(pool)
        backend = open_backend(config, manifest, rank=rank, rank_count=rank_count)
        return RegisteredBackend(backend, pool)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda opener: opener,
        partial,
        lambda opener: faulty_backend_opener(FaultPlan(), opener),
        lambda opener: faulty_backend_opener(FaultPlan(tiers="other"), opener),
    ],
    ids=["method", "partial", "planned", "left alone"],
)
def test_all_slots_lie_in_the_region_that_an_opener_is_told(tmp_path, wrapped):
    device = Device()
    config = config_of(tmp_path)
    for _ in range(2):
        with TierStore.open(config, CHUNKS.manifest, open_backend=wrapped(device.open)) as store:
            pool = store._executor.pool
            assert device.regions.pop() == PoolRegion(pool.address, pool.size_bytes)
            CHUNKS.put(store, range(4))
            store.flush()
            assert CHUNKS.found(store, range(4)) == list(range(4))


@pytest.mark.parametrize(
    "opener",
    [
        lambda config, manifest, *, rank, rank_count: open_backend(
            config, manifest, rank=rank, rank_count=rank_count
        ),
        lambda *places, **names: open_backend(*places, **dict(names)),
    ],
    ids=["keywords", "any"],
)
def test_an_opener_that_does_not_name_the_region_is_called_without_it(tmp_path, opener):
    with TierStore.open(config_of(tmp_path), CHUNKS.manifest, open_backend=opener) as store:
        assert CHUNKS.put(store, range(4)) == 4


def test_the_region_stays_mapped_while_a_backend_hangs_in_its_close(tmp_path):
    may_end = threading.Event()

    class Hanging(RegisteredBackend):
        def close(self):
            may_end.wait()
            self._backend.close()

    def open_hanging(config, manifest, *, rank, rank_count, pool):
        return Hanging(open_backend(config, manifest, rank=rank, rank_count=rank_count), pool)

    executor = TransferExecutor.open(
        load_config(config_of(tmp_path)),
        CHUNKS.manifest,
        rank=0,
        rank_count=1,
        caches=None,
        counters=Counters(),
        open_backend=open_hanging,
    )
    try:
        executor.close(0.01)
        assert len(executor.pool.array) == executor.pool.size_bytes  # not closed
    finally:
        may_end.set()
