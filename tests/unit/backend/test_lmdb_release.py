"""Whole segments of an lmdb tier are given back in transactions of bounded size."""

import pytest
from counted_writes import CountedWrites

from tierstore.backend.lmdb.backend import LmdbBackend
from tierstore.testing.extents import Extent, write_extent

MAP_BYTES = 8 << 20


@pytest.fixture
def backend(tmp_path):
    backend = LmdbBackend(tmp_path / "payload", rank=0, map_bytes=MAP_BYTES)
    backend.open()
    yield backend
    backend.close()


def test_a_segment_that_fills_the_map_is_given_back(backend):
    extents, page = [], 0
    with backend._env.used() as env:
        pass
    while env.used_bytes() < 0.85 * MAP_BYTES:  # more is never charged
        extent = Extent(32, 300, page=page)
        write_extent(backend, extent)
        extents.append(extent)
        page += 32
    assert len(extents) > 100
    writes = CountedWrites(env)
    assert backend.release([], [0]) is None
    assert writes.count > 5
    assert all(extent.served(backend).count(None) == 0 for extent in extents[::10])
    again = Extent(32, 300, segment=1)
    write_extent(backend, again)
    assert again.served(backend) == [None] * 32
