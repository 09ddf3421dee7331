"""A backend whose files go at an unlucky moment is opened again all the same."""

import shutil

from tierstore.backend.lmdb.backend import LmdbBackend
from tierstore.backend.reopening import ReopeningBackend
from tierstore.testing.extents import Extent, write_extent


def test_a_database_that_goes_just_after_it_was_opened_is_made_again(tmp_path):
    rank = tmp_path / "rank0"
    opened_count = 0

    def open_backend():
        nonlocal opened_count
        opened_count += 1
        (rank / "payload").mkdir(parents=True, mode=0o700)
        backend = LmdbBackend(rank / "payload", rank=0, map_bytes=8 << 20)
        backend.open()
        if opened_count == 1:
            shutil.rmtree(rank)
        return backend

    backend = ReopeningBackend("disk", open_backend, rank, has_database=True)
    try:
        backend.open()
        extent = Extent(2, 9000)
        write_extent(backend, extent)
        assert (rank / "payload" / "data.mdb").exists()
        assert extent.served(backend) == [None, None]
        assert backend.lost_segments() == set()
    finally:
        backend.close()
