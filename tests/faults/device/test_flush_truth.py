"""`flush` says what a device refused: which tier, how many chunks, in the system's words.

Then the device works again, and the next flush brings everything to it.
"""

import errno
import os
import subprocess
import sys
from functools import partial

import pytest
from failing_device import CATALOG_POINTS, PAYLOAD_CALLS, FailingDevice
from python_paths import environment
from small_mount import on_small_mount
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.errors import BackendError

CHUNKS = Chunks(65_536)
STORED, REFUSED = range(8), range(100, 112)
CODES = [errno.EIO, errno.ENOSPC, errno.EFBIG]


def recorded(store, numbers):
    places = store._stack.secondaries[0].locate(CHUNKS.keys(numbers))
    return [n for n, place in zip(numbers, places, strict=True) if place is not None]


def flush_refused_and_again(store, device, message, stored=STORED):
    """Flush to a device that refuses, and to one that works again."""
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            store.flush()
    assert CHUNKS.found(store, [*stored, *REFUSED]) == [*stored, *REFUSED]
    device.heal()
    store.flush()
    assert recorded(store, REFUSED) == list(REFUSED)
    assert store.check() == []


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("calls", PAYLOAD_CALLS)
def test_a_flush_names_what_the_payload_refused(tmp_path, calls, code, cascade):
    backend, names = PAYLOAD_CALLS[calls]
    stored = () if calls == "allocate" else STORED  # a segment is allocated when it is begun
    device = FailingDevice()
    config = config_of(tmp_path, backend=backend, cascade=cascade)
    opener = partial(open_backend, system=device)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        if stored:
            CHUNKS.put(store, stored)
            store.flush()
        device.refuse(*names, code=code)
        CHUNKS.put(store, REFUSED)
        message = rf"tier disk: .*chunks .*({errno.errorcode[code]}|{os.strerror(code)})"
        flush_refused_and_again(store, device, message, stored)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, [*stored, *REFUSED]) == [*stored, *REFUSED]


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("point", CATALOG_POINTS)
def test_a_flush_names_what_the_catalog_refused(tmp_path, point, code, backend):
    device = FailingDevice()
    config = config_of(tmp_path, backend=backend)
    with TierStore.open(
        config,
        CHUNKS.manifest,
        open_backend=open_backend,
        open_system=lambda _tier: device,
    ) as store:
        CHUNKS.put(store, STORED)
        store.flush()
        device.refuse(CATALOG_POINTS[point], code=code)
        CHUNKS.put(store, REFUSED)
        flush_refused_and_again(store, device, rf"tier disk: 12 chunks .*{os.strerror(code)}")
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, [*STORED, *REFUSED]) == [*STORED, *REFUSED]


def test_a_flush_that_follows_a_failed_one_says_again_what_is_not_on_the_device(tmp_path):
    device = FailingDevice()
    opener = partial(open_backend, system=device)
    config = config_of(tmp_path)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        CHUNKS.put(store, range(5))
        device.refuse("flush")
        with pytest.raises(BackendError, match="tier disk: 5 chunks may not be on its device"):
            store.flush()
        CHUNKS.put(store, range(5, 9))
        with pytest.raises(BackendError, match="tier disk: 9 chunks may not be on its device"):
            store.flush()
        device.heal()
        store.flush()


def test_what_was_refused_is_written_without_a_flush_when_the_device_is_back(tmp_path):
    device = FailingDevice()
    opener = partial(open_backend, system=device)
    with TierStore.open(config_of(tmp_path), CHUNKS.manifest, open_backend=opener) as store:
        device.refuse("pwritev")
        CHUNKS.put(store, REFUSED)
        with pytest.raises(BackendError, match="EIO"):
            store.flush()
        device.heal()
        CHUNKS.put(store, STORED)
        assert within_seconds(lambda: recorded(store, REFUSED) == list(REFUSED))


REAL = """
import resource, sys
from store_kit import Chunks, config_of
from tierstore.errors import BackendError

chunks = Chunks(65_536)
path, backend, kind = sys.argv[1:]
config = config_of(path, backend=backend, primary="16MiB", capacity="32MiB")
with chunks.open(config) as store:
    chunks.put(store, range(4))
    store.flush()
    if kind == "size":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    else:
        filler = open(path + "/filler", "wb", buffering=0)
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
    chunks.put(store, range(100, 220))
    try:
        store.flush()
        print("complete")
    except BackendError as error:
        print(error)
    if kind == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        filler.truncate(0)
    store.flush()
    assert store.check() == []
with chunks.open(config) as store:
    print(len(chunks.found(store, range(100, 220))))
"""


def command_of(path, backend, kind):
    return [sys.executable, "-c", REAL, str(path), backend, kind]


def run_real(command):
    run = subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    message, found = run.stdout.rsplit("\n", 2)[:2]
    assert found == "120"
    return message


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_flush_beyond_the_limit_of_a_files_size_is_told_and_made_good(tmp_path, backend):
    message = run_real(command_of(tmp_path, backend, "size"))
    assert "tier disk: " in message
    assert "chunks" in message
    assert "EFBIG" in message or "File too large" in message


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_flush_to_a_full_device_is_told_and_made_good(tmp_path, backend):
    message = run_real(on_small_mount(tmp_path, command_of(tmp_path, backend, "full")))
    assert "tier disk: " in message
    assert "ENOSPC" in message or "No space left" in message or "MDB_MAP_FULL" in message
