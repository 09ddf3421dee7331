"""A store on a device that somebody fills and frees: `python full_device_process.py PATH BACKEND`.

PATH is the root of a file system of 40 MiB, made for this test.
"""

import contextlib
import os
import sys
from pathlib import Path

from store_kit import MIB, Chunks, config_of
from waiting import within_seconds

from tierstore.errors import BackendError

CHUNKS = Chunks(65_536)
STORED = range(200)


class Filler:
    """A file of somebody else."""

    def __init__(self, path):
        # Open from the beginning: a full device may refuse even that.
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def fill(self):
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while os.write(self._file, bytes(size)):
                    pass

    def free(self):
        os.ftruncate(self._file, 0)


def store_all(store, numbers):
    for first in numbers[::10]:
        assert CHUNKS.put(store, range(first, first + 10)) == 10


def is_flushed(store):
    """Return whether all is written; a tier that has been full is tried again after a pause."""
    try:
        store.flush()
    except BackendError:
        return False
    return True


def main(path, backend):
    filler = Filler(path / "filler")
    config = config_of(path / "tier", backend=backend, primary="4MiB", capacity="32MiB")
    with CHUNKS.open(config) as store:
        store_all(store, STORED)
        store.flush()
        filler.fill()
        store_all(store, range(1000, 1300))
        assert CHUNKS.found(store, STORED) == list(STORED), "lost, because the device is full"
        assert store.check() == []
        assert store.stats().secondary["disk"].evicted_count == 0
        filler.free()
        assert within_seconds(lambda: is_flushed(store))
        store_all(store, range(2000, 2600))
        store.flush()
        assert store.check() == []
        newest = range(2300, 2600)
        assert CHUNKS.found(store, newest) == list(newest), "smaller than before it was full"
    filler.fill()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, newest) == list(newest), "cannot be read from a full device"
        store_all(store, range(100))
        filler.free()
        assert within_seconds(lambda: is_flushed(store))
        store_all(store, range(3000, 3600))
        store.flush()
        assert store.check() == []
        assert CHUNKS.found(store, range(3300, 3600)) == list(range(3300, 3600))
    print("sound")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
