"""The path of a tier is removed, moved or replaced while stores use it."""

import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from python_paths import environment
from store_kit import MIB, Chunks, config_of, du
from waiting import within_seconds

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError

CAPACITY = 16 * MIB
SAMPLE_COUNT = 4
CHUNKS = Chunks(65_536)
PATIENCE = Patience(put_seconds=0.2, flush_seconds=5, close_seconds=20)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", ["file", "lmdb"])]


def opened(path, backend, cascade="write_through"):
    config = config_of(
        path, backend=backend, primary="4MiB", capacity=f"{CAPACITY}B", cascade=cascade
    )
    return TierStore.open(config, CHUNKS.manifest, patience=PATIENCE)


def fill(store, first, count=320):
    """Store more than the tier holds; what a lost path refuses stays in memory or is dropped."""
    for number in range(first, first + count, 16):
        with suppress(BackendError):
            CHUNKS.put(store, range(number, number + 16))
            store.flush()


def is_recorded(store, path, numbers):
    """Return whether chunks that are stored now lie below the path."""
    try:
        CHUNKS.put(store, numbers)
        store.flush()
    except BackendError:
        return False
    return store.stats().secondary["disk"].record_count > 0 and (path / "catalog").exists()


@contextmanager
def sampled(path):
    """Take `du` all the time; it stays within the capacity.

    A sample is no glance at one moment: files come and go under it. So it is too much if a number
    of them in a row are.
    """
    is_over = threading.Event()
    largest = [0]

    def sample():
        while not is_over.is_set():
            with suppress(OSError):
                largest[0] = max(largest[0], min(du(path) for _ in range(SAMPLE_COUNT)))
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert largest[0] <= CAPACITY, largest


def remove(path):
    while path.exists():  # it may be made again meanwhile
        shutil.rmtree(path, ignore_errors=True)
        break


def replace(path):
    path.rename(path.parent / f"away-{time.monotonic_ns()}")
    path.mkdir()


def remove_owners(path):
    shutil.rmtree(path / "owners")


def remove_catalog(path):
    shutil.rmtree(path / "catalog")


def remove_database(path):
    (path / "catalog" / "data.mdb").unlink()


@pytest.mark.parametrize("lose", [remove, replace, remove_owners, remove_catalog, remove_database])
def test_a_lost_path_is_opened_anew_by_those_who_use_it(tmp_path, backend, lose, caplog):
    path = tmp_path / "tier"
    with opened(path, backend) as store, sampled(path):
        fill(store, 0)
        lose(path)
        assert within_seconds(lambda: "removed, moved or unmounted" in caplog.text)
        numbers = range(3000, 3016)
        assert within_seconds(lambda: is_recorded(store, path, range(1000, 1016)))
        fill(store, 2000)
        assert store.check() == []
        CHUNKS.put(store, numbers)
        store.flush()
        assert du(path) > CAPACITY / 2
    with opened(path, backend) as store, sampled(path):
        assert CHUNKS.found(store, numbers) == list(numbers)
        fill(store, 4000)
        assert store.check() == []


def test_a_path_lost_again_and_again_stays_within_its_capacity(tmp_path, backend):
    path = tmp_path / "tier"
    with sampled(path):
        for round_number in range(3):
            with opened(path, backend) as first, opened(path, backend) as second:
                fill(first, 0, 160)
                remove(path)
                with opened(path, backend) as third:
                    for number in range(0, 320, 32):
                        for store in (first, second, third):
                            fill(store, 10_000 * round_number + number, 32)
                    assert third.check() == []
    with opened(path, backend) as store, sampled(path):
        fill(store, 50_000)
        assert store.check() == []
        stats = store.stats().secondary["disk"]
        assert du(path) <= stats.charged_bytes <= CAPACITY


ENGINE = """
import sys
from pathlib import Path
from test_lost_path import fill, opened
with opened(Path(sys.argv[1]), sys.argv[2]) as store:
    fill(store, 0, 160)
    print("filled", flush=True)
    sys.stdin.readline()
    fill(store, int(sys.argv[3]))
    print(store.check(), flush=True)
    sys.stdin.readline()
"""


def test_engines_in_processes_follow_a_second_one_that_opens_the_path_anew(tmp_path, backend):
    path = tmp_path / "tier"
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, path, backend, str(first)],
            env=environment(Path(__file__).parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (10_000, 20_000)
    ]
    try:
        for engine in engines:
            assert engine.stdout.readline() == "filled\n"
        with sampled(path):
            remove(path)
            with opened(path, backend) as store:
                for engine in engines:
                    engine.stdin.write("\n")
                    engine.stdin.flush()
                fill(store, 30_000)
                for engine in engines:
                    assert engine.stdout.readline() == "[]\n"
                fill(store, 40_000, 32)
                assert store.check() == []
                for engine in engines:
                    engine.communicate("\n")
                    assert engine.returncode == 0
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()
    with opened(path, backend) as store, sampled(path):
        fill(store, 50_000)
        assert store.check() == []


def test_what_is_in_memory_is_recorded_again_by_the_next_flush(tmp_path, backend):
    path = tmp_path / "tier"
    with opened(path, backend) as store:
        CHUNKS.put(store, range(16))
        store.flush()
        remove(path)
        assert within_seconds(lambda: is_flushed(store) and (path / "catalog").exists())
        store.flush()
    with opened(path, backend) as store:
        assert CHUNKS.found(store, range(16)) == list(range(16))


def is_flushed(store):
    try:
        store.flush()
    except BackendError:
        return False
    return True


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a fresh file system, and one that takes it away."""
    path = tmp_path / "mounted"
    path.mkdir()

    def mount():
        command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", path]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs to mount")
        return path

    def unmount():
        subprocess.run(["umount", "-l", path], check=True)

    yield mount, unmount
    while path.is_mount():
        unmount()


def test_an_unmounted_path_is_used_again_when_it_is_mounted(mount, backend):
    mount, unmount = mount
    path = mount()
    with opened(path, backend) as store:
        assert is_recorded(store, path, range(16))
        unmount()
        assert within_seconds(lambda: not store.stats().secondary["disk"].is_open)
        assert not is_recorded(store, path, range(16, 32))
        assert list(path.iterdir()) == [], "nothing is written beside a missing mount"
        mount()
        assert within_seconds(lambda: is_recorded(store, path, range(32)))
        assert store.check() == []
        assert du(path) <= CAPACITY


def test_a_path_without_its_parent_is_waited_for(tmp_path, backend):
    path = tmp_path / "mount" / "tier"
    with opened(path, backend) as store:
        CHUNKS.put(store, range(16))
        store.flush()
        (tmp_path / "mount").rename(tmp_path / "unmounted")
        assert within_seconds(lambda: not store.stats().secondary["disk"].is_open)
        with pytest.raises(BackendError, match="tier disk"):
            store.flush()
        assert CHUNKS.found(store, range(16)) == list(range(16))
        assert not (tmp_path / "mount").exists()
        (tmp_path / "unmounted").rename(tmp_path / "mount")
        assert within_seconds(lambda: is_recorded(store, path, range(16, 32)))
        assert store.check() == []
    with opened(path, backend) as store:
        assert CHUNKS.found(store, range(32)) == list(range(32))


CASCADES = pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])


def put_twice(store, numbers):
    """Store chunks; `second_touch` wants to see them used."""
    for _ in range(2):
        CHUNKS.put(store, numbers)


@CASCADES
def test_a_flush_is_the_first_to_see_that_the_path_is_gone(tmp_path, backend, cascade):
    path = tmp_path / "mount" / "tier"
    with opened(path, backend, cascade) as store:
        put_twice(store, range(16))
        store.flush()
        (tmp_path / "mount").rename(tmp_path / "unmounted")
        for _ in range(2):
            with pytest.raises(BackendError, match="tier disk: 16 chunks could not be written"):
                store.flush()
        (tmp_path / "unmounted").rename(tmp_path / "mount")
        assert within_seconds(lambda: is_flushed(store))
        assert store.stats().secondary["disk"].record_count == 16
        assert store.check() == []


@CASCADES
def test_a_flush_that_ends_well_has_recorded_all_in_the_path_that_is_there(
    tmp_path, backend, cascade
):
    path = tmp_path / "tier"
    with opened(path, backend, cascade) as store:
        put_twice(store, range(16))
        store.flush()
        for _ in range(3):
            remove(path)
            assert within_seconds(lambda: is_flushed(store))
            assert store.stats().secondary["disk"].record_count == 16
        assert store.check() == []
