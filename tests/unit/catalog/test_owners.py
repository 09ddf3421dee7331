"""Locks of owners: what fails leaves nothing open, what is forked leaves the parent alive."""

import fcntl
import os
import traceback
from pathlib import Path

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore.catalog.owners import OwnerLock, OwnerLocks, is_owner_dead
from tierstore.device.marker import claim
from tierstore.errors import CatalogError, ClosedError

CHUNKS = Chunks(4096)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_lock_that_cannot_be_had_is_an_error_and_leaves_no_descriptor(tmp_path):
    claim(tmp_path).close()
    (tmp_path / "owners").mkdir()
    path = tmp_path / "owners" / "1.lock"
    with path.open("w") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        before = descriptors()
        for _ in range(3):
            with pytest.raises(CatalogError, match="locked"):
                OwnerLock.create(path.parent, 1)
        assert descriptors() == before
    OwnerLock.create(path.parent, 1).close()


def test_a_lock_that_another_process_has_is_waited_for_while_memory_serves(tmp_path, caplog):
    with CHUNKS.open(config_of(tmp_path)):
        (last,) = (int(path.stem) for path in (tmp_path / "owners").iterdir())
    with (tmp_path / "owners" / f"{last + 1}.lock").open("w") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        store = CHUNKS.open(config_of(tmp_path))
        assert CHUNKS.put(store, range(4)) == 4
        assert not store.stats().secondary["disk"].is_open
        assert "out of use" in caplog.text
        assert "locked" in caplog.text
    assert within_seconds(lambda: store.stats().secondary["disk"].is_open)
    store.flush()
    store.close()
    with CHUNKS.open(config_of(tmp_path)) as store:
        assert CHUNKS.found(store, range(4)) == list(range(4))


def test_the_data_plane_of_an_owner_whose_path_was_replaced_writes_nothing_more(tmp_path):
    path = tmp_path / "tier"
    with CHUNKS.open(config_of(path)):
        (owner,) = (int(lock.stem) for lock in (path / "owners").iterdir())
        locks = OwnerLocks(path)
        assert locks.hold(owner)
        path.rename(tmp_path / "away")
        assert not locks.hold(owner)
        (path / "catalog").mkdir(parents=True)
        (path / "owners").mkdir()
        (path / "owners" / f"{owner}.lock").touch()
        assert locks.hold(owner), "of another file with this name"
        locks.close()


def test_a_lock_whose_file_cannot_be_removed_is_released_all_the_same(tmp_path):
    claim(tmp_path).close()
    before = descriptors()
    lock = OwnerLock.create(tmp_path / "owners", 1)
    (tmp_path / "owners" / "1.lock").unlink()
    (tmp_path / "owners" / "1.lock").mkdir()  # unlink fails, whoever we are
    lock.close()
    assert descriptors() == before


def in_a_child(action) -> None:
    """Run in a forked process; an exception there fails here."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, see its output"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_forked_process_neither_uses_nor_harms_the_store(tmp_path, backend):
    config = config_of(tmp_path / "tier", backend=backend, primary="1MiB", capacity="16MiB")

    def use_store():
        out = CHUNKS.array(range(4))
        for call in (
            lambda: store.put(CHUNKS.keys(range(4)), out),
            lambda: store.get(CHUNKS.keys(range(4)), out),
            lambda: store.match_prefix(CHUNKS.keys(range(4))),
            store.flush,
            store.reset,
            store.stats,
            store.check,
        ):
            with pytest.raises(ClosedError, match="fork"):
                call()
        store.close()
        with pytest.raises(CatalogError, match="spawn"):
            CHUNKS.open(config)
        with CHUNKS.open(config_of(tmp_path / "own", backend=backend)) as own:
            assert CHUNKS.put(own, range(4)) == 4

    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, range(4)) == 4
        store.flush()
        owners = sorted((tmp_path / "tier" / "owners").iterdir())
        in_a_child(use_store)
        assert sorted((tmp_path / "tier" / "owners").iterdir()) == owners
        assert CHUNKS.put(store, range(8)) == 8
        store.flush()
        assert CHUNKS.found(store, range(8)) == list(range(8))
        assert store.check() == []


def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    ready, done = os.pipe(), os.pipe()
    claim(tmp_path).close()
    owners = tmp_path / "owners"

    def die_with_a_child_alive():
        lock = OwnerLock.create(owners, 1)
        if os.fork() == 0:
            os.write(ready[1], b"!")
            os.close(done[1])
            os.read(done[0], 1)  # until the test has ended
            os._exit(0)
        assert lock.owner == 1

    in_a_child(die_with_a_child_alive)
    os.read(ready[0], 1)
    try:
        assert (owners / "1.lock").exists()
        assert is_owner_dead(owners, 1)
    finally:
        for descriptor in (*ready, *done):
            os.close(descriptor)
