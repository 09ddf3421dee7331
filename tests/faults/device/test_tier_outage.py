"""A tier whose device fails or hangs when it is opened, and one whose lookups hang."""

import errno
import os
import threading

import pytest
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError, CatalogError, ConfigError

CHUNKS = Chunks(4096)
PATIENCE = Patience(put_seconds=0.2, flush_seconds=1, close_seconds=20)
BACKENDS = pytest.mark.parametrize("backend", ["file", "lmdb"])


class Device(SystemCalls):
    """A device that fails, or hangs, at points of its databases until it is mended."""

    def __init__(self, *points: DatabasePoint, code: int | None = None):
        self._points = points
        self._code = code
        self._is_mended = threading.Event()
        self.wait_count = 0
        """Calls that hung, or hang."""

    def reach(self, point: DatabasePoint) -> None:
        if point not in self._points or self._is_mended.is_set():
            return
        if self._code is not None:
            raise OSError(self._code, os.strerror(self._code))
        self.wait_count += 1
        assert self._is_mended.wait(300)

    def mend(self) -> None:
        self._is_mended.set()

    def spoil(self) -> None:
        self._is_mended.clear()


def two_tiers(path, backend="file"):
    config = config_of(path / "bad", backend=backend, primary="1MiB", capacity="16MiB")
    bad = config["secondary"][0] | {"name": "bad", "io": {"deadline": "300ms"}}
    config["secondary"] = [bad, bad | {"name": "good", "path": str(path / "good")}]
    return config


def opened(config, device, patience=PATIENCE):
    def system_of(tier):
        return device if tier.name == "bad" else SystemCalls()

    return TierStore.open(config, CHUNKS.manifest, open_system=system_of, patience=patience)


def is_flushed(store):
    try:
        store.flush()
    except BackendError:
        return False
    return True


@BACKENDS
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV, errno.EMFILE])
def test_a_tier_whose_device_fails_is_opened_when_it_is_back(tmp_path, backend, code, caplog):
    device = Device(DatabasePoint.OPEN, code=code)
    with opened(two_tiers(tmp_path, backend), device) as store:
        assert CHUNKS.put(store, range(16)) == 16
        stats = store.stats().secondary
        assert not stats["bad"].is_open
        with pytest.raises(BackendError, match="tier bad"):
            store.flush()
        assert store.stats().secondary["good"].record_count == 16
        assert os.strerror(code) in "".join(store.check())
        assert CHUNKS.found(store, range(16)) == list(range(16))
        said = [r.getMessage() for r in caplog.records if "out of use, and" in r.getMessage()]
        assert len(said) == 1
        assert "tier=bad" in said[0]
        device.mend()
        assert within_seconds(lambda: store.stats().secondary["bad"].is_open)
        assert within_seconds(lambda: is_flushed(store))
        assert store.stats().secondary["bad"].record_count == 16
        assert store.check() == []


@pytest.mark.slow
def test_a_tier_whose_device_hangs_when_it_is_opened_keeps_nobody(tmp_path):
    device = Device(DatabasePoint.OPEN)
    with opened(two_tiers(tmp_path), device) as store:
        assert CHUNKS.put(store, range(16)) == 16
        assert not store.stats().secondary["bad"].is_open
        with pytest.raises(BackendError, match="tier bad"):
            store.flush()
        assert store.stats().secondary["good"].record_count == 16
        device.mend()
        assert within_seconds(lambda: is_flushed(store))
        assert store.check() == []


@pytest.mark.slow
def test_a_store_closes_beside_a_device_that_hangs_when_it_is_opened(tmp_path, caplog):
    device = Device(DatabasePoint.OPEN)
    patience = Patience(put_seconds=0.2, flush_seconds=5, close_seconds=5)
    store = opened(two_tiers(tmp_path), device, patience)
    CHUNKS.put(store, range(16))
    store.close()
    assert "hangs" in caplog.text
    device.mend()
    with opened(two_tiers(tmp_path), Device()) as store:
        assert CHUNKS.found(store, range(16)) == list(range(16))


def test_a_reset_while_a_tier_is_out_of_use_holds_when_it_is_back(tmp_path):
    config = two_tiers(tmp_path)
    with opened(config, Device()) as store:
        CHUNKS.put(store, range(16))
        store.flush()
    device = Device(DatabasePoint.OPEN, code=errno.EIO)
    with opened(config, device) as store:
        store.reset()
        device.mend()
        assert within_seconds(lambda: store.stats().secondary["bad"].is_open)
        assert CHUNKS.found(store, range(16)) == []
    with opened(config, Device()) as store:
        assert CHUNKS.found(store, range(16)) == []


def test_what_the_user_has_to_mend_is_an_error(tmp_path):
    config = two_tiers(tmp_path)
    (tmp_path / "bad").write_text("a file")
    with pytest.raises(CatalogError, match="bad"):
        opened(config, Device())
    (tmp_path / "bad").unlink()
    with opened(config, Device()):
        pass
    with pytest.raises(ConfigError, match="another backend"):
        opened(two_tiers(tmp_path, "lmdb"), Device())
    with pytest.raises(CatalogError, match="Permission"):
        opened(config, Device(DatabasePoint.OPEN, code=errno.EACCES))


@BACKENDS
def test_lookups_that_hang_are_waited_for_once(tmp_path, backend):
    config = two_tiers(tmp_path, backend)
    device = Device(DatabasePoint.READ)
    device.mend()
    with opened(config, device) as store:
        CHUNKS.put(store, range(16))
        store.flush()
    with opened(config, device) as store:
        device.spoil()
        assert CHUNKS.found(store, range(16)) == list(range(16)), "another tier has them"
        (bad, _) = store._stack.secondaries
        assert bad.is_stuck
        for _ in range(1000):  # each of which would wait, if any did
            assert store.match_prefix(CHUNKS.keys(range(100, 132))).chunk_count == 0
        with pytest.raises(BackendError, match="does not answer"):
            store.stats()
        assert "does not answer" in "".join(store.check())
        device.mend()
        assert within_seconds(lambda: not bad.is_stuck)
        assert store.check() == []
        assert all(bad.locate(CHUNKS.keys(range(16))))


def test_a_step_waits_for_a_lookup_that_hangs_once_and_not_for_long(tmp_path):
    device = Device(DatabasePoint.READ)
    device.mend()
    with opened(two_tiers(tmp_path), device) as store:
        CHUNKS.put(store, range(16))
        store.flush()
        (bad, good) = store._stack.secondaries
        device.spoil()
        keys = CHUNKS.keys(range(16))
        for _ in range(1000):
            states = bad.states(keys)
            bad.poll()
        assert {state.name for state in states} == {"ABSENT"}
        assert {state.name for state in good.states(keys)} <= {"RECORDED", "ARRIVING"}
        device.mend()
        assert within_seconds(lambda: {state.name for state in bad.states(keys)} == {"RECORDED"})


@BACKENDS
@pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])
def test_what_waited_for_a_tier_that_opens_late_is_written_without_a_further_call(
    tmp_path, backend, cascade
):
    device = Device(DatabasePoint.OPEN, code=errno.EIO)
    config = two_tiers(tmp_path, backend)
    config["secondary"][0]["cascade"] = cascade
    with opened(config, device) as store:
        for _ in range(2):  # `second_touch` wants to see them used
            assert CHUNKS.put(store, range(16)) == 16
        with pytest.raises(BackendError, match="16 chunks could not be written"):
            store.flush()
        device.mend()
        assert within_seconds(lambda: store.stats().secondary["bad"].record_count == 16, 60)


@BACKENDS
def test_a_flush_names_why_a_tier_is_not_open(tmp_path, backend):
    device = Device(DatabasePoint.OPEN, code=errno.EMFILE)
    with opened(two_tiers(tmp_path, backend), device) as store:
        assert CHUNKS.put(store, range(16)) == 16
        why = r"tier bad: .*16 chunks.*Too many open files"
        with pytest.raises(BackendError, match=why) as info:
            store.flush()
        assert " 0 chunks" not in str(info.value)
        device.mend()
        assert within_seconds(lambda: is_flushed(store), 60)


CALLS = {
    "get": lambda store: CHUNKS.found(store, range(16)),
    "match_prefix": lambda store: store.match_prefix(CHUNKS.keys(range(16))),
}


@BACKENDS
@pytest.mark.parametrize("call", CALLS)
def test_memory_is_hit_while_another_call_waits_for_a_lookup_that_hangs(tmp_path, backend, call):
    device = Device(DatabasePoint.READ)
    device.mend()
    config = config_of(tmp_path, backend=backend, primary="1MiB", io={"deadline": "20s"})
    with TierStore.open(config, CHUNKS.manifest) as store:
        CHUNKS.put(store, range(16))
        store.flush()
    resident = range(100, 116)
    with TierStore.open(
        config, CHUNKS.manifest, open_system=lambda _: device, patience=PATIENCE
    ) as store:
        CHUNKS.put(store, resident)
        store.flush()
        device.spoil()
        waiting = threading.Thread(target=CALLS[call], args=[store], daemon=True)
        waiting.start()
        assert within_seconds(lambda: device.wait_count > 0)
        for _ in range(10):
            assert CHUNKS.found(store, resident) == list(resident)
            assert store.match_prefix(CHUNKS.keys(resident)).chunk_count == len(resident)
        assert CHUNKS.put(store, range(200, 216)) == 16
        assert waiting.is_alive(), "memory was hit only after the lookup had been waited for"
        device.mend()
        waiting.join(300)
        assert CHUNKS.found(store, range(16)) == list(range(16))


def test_nothing_is_looked_up_before_a_catalog_has_carried_a_reset_out(tmp_path):
    """What it would find then could be taken for true after that."""
    device = Device(DatabasePoint.WRITE)
    device.mend()
    config = config_of(tmp_path, primary="1MiB")
    with TierStore.open(
        config, CHUNKS.manifest, open_system=lambda _: device, patience=PATIENCE
    ) as store:
        CHUNKS.put(store, range(16))
        store.flush()
        (tier,) = store._stack.secondaries
        keys = CHUNKS.keys(range(16))
        assert tier.look_ahead(keys) is not None
        device.spoil()
        store.reset()
        assert tier.look_ahead(keys) is None
        device.mend()
        assert within_seconds(lambda: tier.look_ahead(keys) is not None)
        assert CHUNKS.found(store, range(16)) == []
