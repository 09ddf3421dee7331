"""How long `flush`, `close`, `check` and `put` take at most, whatever hangs, and how much of it.

Method: tiers of which some hang in a write, a read, a flush, or a point of their catalog, with a
patience of some seconds. The bounds have room for a busy machine: without a common deadline each
tier and each step would take its own, several times the bound in all.
"""

import threading
import time

import pytest
from store_kit import Chunks, config_of

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError

CHUNKS = Chunks(65_536)
SECONDS = 3.0
"""Of patience of each kind."""
BUSY_SECONDS = 6.0
"""More than that is no busy machine: with four tiers, four waits of their own would be."""
TIER_COUNT = 6
PATIENCE = Patience(
    put_seconds=0.5, flush_seconds=SECONDS, check_seconds=SECONDS, close_seconds=SECONDS
)


class HungDevice(SystemCalls):
    """A device that hangs in some calls until it is told to go on."""

    def __init__(self):
        self.hung = set()
        self.goes_on = threading.Event()

    def _hang(self, call):
        if call in self.hung:
            self.goes_on.wait()

    def preadv(self, fd, buffers, offset):
        self._hang("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._hang("pwritev")
        return super().pwritev(fd, buffers, offset)

    def flush(self, fd):
        self._hang("flush")
        super().flush(fd)

    def reach(self, point):
        self._hang(point)


HANGS = {
    "write": ["pwritev"],
    "flush": ["flush"],
    "catalog write": [DatabasePoint.WRITE],
    "catalog commit": [DatabasePoint.COMMIT],
    "catalog sync": [DatabasePoint.SYNC],
    "all": ["preadv", "pwritev", "flush", *DatabasePoint],
}


class Tiers:
    """A store with several tiers, of which all but the last hang when told to."""

    def __init__(self, path, backend="file", patience=PATIENCE):
        self.devices = {f"tier{i}": HungDevice() for i in range(TIER_COUNT)}
        tiers = []
        for name in self.devices:
            (tier,) = config_of(path / name, backend=backend, capacity="16MiB")["secondary"]
            tiers.append(tier | {"name": name, "io": {"threads": 2, "deadline": "1s"}})
        self.config = {"version": 1, "primary": {"capacity": "8MiB"}, "secondary": tiers}
        self.store = TierStore.open(
            self.config,
            CHUNKS.manifest,
            open_backend=lambda tier, manifest, **ranks: open_backend(
                tier, manifest, system=self.devices[tier.name], **ranks
            ),
            open_system=lambda tier: self.devices[tier.name],
            patience=patience,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for device in self.devices.values():
            device.hung.clear()
            device.goes_on.set()
        self.store.close()

    def hang(self, calls):
        for device in [*self.devices.values()][:-1]:
            device.hung.update(calls)


def seconds_of(call):
    started = time.monotonic()
    try:
        call()
    except BackendError as error:
        return time.monotonic() - started, str(error)
    return time.monotonic() - started, ""


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("hang", HANGS)
def test_flush_and_close_take_their_time_once_for_all_tiers(tmp_path, caplog, hang, backend):
    with Tiers(tmp_path, backend) as tiers:
        CHUNKS.put(tiers.store, range(8))
        tiers.store.flush()
        tiers.hang(HANGS[hang])
        CHUNKS.put(tiers.store, range(100, 112))
        seconds, message = seconds_of(tiers.store.flush)
        assert seconds < SECONDS + BUSY_SECONDS
        is_noticed = hang not in ("write", "flush") or backend == "file"
        if is_noticed:
            for name in [*tiers.devices][:-1]:
                assert f"tier {name}: " in message
            assert "chunks" in message
            assert "tier5" not in message
        seconds, _ = seconds_of(tiers.store.close)
        assert seconds < SECONDS + BUSY_SECONDS
        if is_noticed:
            assert "close without a complete flush" in caplog.text
    with CHUNKS.open({**tiers.config, "secondary": tiers.config["secondary"][-1:]}) as store:
        numbers = [*range(8), *range(100, 112)]
        assert CHUNKS.found(store, numbers) == numbers, "the sound tier lacks something"


@pytest.mark.parametrize("hang", ["write", "catalog write"])
def test_a_put_waits_for_tiers_that_hang_once_and_briefly(tmp_path, hang):
    with Tiers(tmp_path) as tiers:
        tiers.hang(HANGS[hang])
        seconds, _ = seconds_of(
            lambda: [CHUNKS.put(tiers.store, range(n, n + 4)) for n in range(0, 400, 4)]
        )
        assert seconds < BUSY_SECONDS


def test_a_check_over_a_catalog_that_hangs_says_so_and_keeps_nobody(tmp_path):
    with Tiers(tmp_path) as tiers:
        CHUNKS.put(tiers.store, range(8))
        tiers.store.flush()
        assert tiers.store.check() == []
        tiers.hang([DatabasePoint.READ])
        answers = []
        checking = threading.Thread(target=lambda: answers.append(tiers.store.check()))
        checking.start()
        assert CHUNKS.found(tiers.store, range(8)) == list(range(8))
        checking.join(60)
        assert [problem.split(" ")[1] for problem in answers[0]] == [*tiers.devices][:-1]
        assert all("does not answer" in problem for problem in answers[0])
        for _ in range(3):  # threads that hang are not joined by others
            seconds, _ = seconds_of(tiers.store.check)
            assert seconds < SECONDS + BUSY_SECONDS
        with pytest.raises(BackendError, match="does not answer"):
            tiers.store.stats()
        readers = [t for t in threading.enumerate() if t.name == "tierstore-read"]
        assert len(readers) == TIER_COUNT


def test_a_close_takes_no_longer_while_calls_of_others_wait(tmp_path):
    with Tiers(tmp_path) as tiers:
        CHUNKS.put(tiers.store, range(8))
        tiers.store.flush()
        tiers.hang(HANGS["all"])
        CHUNKS.put(tiers.store, range(100, 112))

        def flush():
            with pytest.raises(Exception, match=r"closed|tier0"):
                tiers.store.flush()

        waiting = [threading.Thread(target=flush) for _ in range(4)]
        for thread in waiting:
            thread.start()
        seconds, _ = seconds_of(tiers.store.close)
        assert seconds < SECONDS + BUSY_SECONDS
        for thread in waiting:
            thread.join(60)
            assert not thread.is_alive()


def test_a_slow_tier_that_moves_is_flushed_to_its_end_beyond_the_time(tmp_path):
    class SlowDevice(SystemCalls):
        def pwritev(self, fd, buffers, offset):
            threading.Event().wait(0.2)
            return super().pwritev(fd, buffers, offset)

    config = config_of(tmp_path, io={"threads": 1})
    store = TierStore.open(
        config,
        CHUNKS.manifest,
        open_backend=lambda *args, **ranks: open_backend(*args, system=SlowDevice(), **ranks),
        patience=Patience(put_seconds=60, flush_seconds=SECONDS, close_seconds=SECONDS),
    )
    for number in range(40):  # each a command of its own
        CHUNKS.put(store, [number])
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started > SECONDS, "too quick: the test tests nothing"
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(40)) == list(range(40))
