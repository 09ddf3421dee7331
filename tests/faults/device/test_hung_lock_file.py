"""A device hangs while the kernel writes a database's lock file back: only the tier waits.

Who begins or ends a reading writes to that file's mapping, which waits for the end of the
writeback; and the library does not give the interpreter away for it. Method: a store in a process
of its own over a directory that hangs (`fuse_directory`), and the writeback is begun by hand.
"""

import ctypes
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from threading import Timer

import pytest
from fuse_directory import HangingDirectory, why_there_is_none
from python_paths import environment
from waiting import within_seconds

pytestmark = [
    pytest.mark.skipif(bool(why_there_is_none()), reason=f"no FUSE: {why_there_is_none()}"),
    pytest.mark.timeout(600),
]

START_WRITEBACK = 2
"""SYNC_FILE_RANGE_WRITE: does not wait for its end."""
SILENCE_SECONDS_MAX = 60
"""For so long the process with the store says nothing only if it cannot."""
STORE = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from store_kit import Chunks, config_of
    from tierstore import TierStore
    from tierstore.embedded.planes import Patience

    path, backend = sys.argv[1:]
    chunks = Chunks(65_536)
    config = config_of(
        Path(path), backend=backend, primary="1MiB", capacity="16MiB", io={"deadline": "2s"}
    )
    patience = Patience(put_seconds=2, flush_seconds=20, close_seconds=4)
    with TierStore.open(config, chunks.manifest, patience=patience) as store:
        chunks.put(store, range(32))
        store.flush()
        print(len(chunks.found(store, range(16))), flush=True)
        for command in sys.stdin:
            print(len(chunks.found(store, range(*map(int, command.split())))), flush=True)
""")


class Store:
    """The process; it answers how many chunks of a range it finds, or a test fails."""

    def __init__(self, directory, backend):
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", STORE, directory.path / "tier", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def found(self, first=None, last=None):
        if first is not None:
            self._process.stdin.write(f"{first} {last}\n")
            self._process.stdin.flush()
        guard = Timer(SILENCE_SECONDS_MAX, self._give_up)
        guard.start()
        answer = self._process.stdout.readline()
        guard.cancel()
        assert answer, f"the process said nothing for {SILENCE_SECONDS_MAX} s"
        return int(answer)

    def _give_up(self):
        self._directory.heal()  # while it hangs, nobody can end the process
        self._process.kill()


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_lock_file_that_is_written_back_keeps_no_one_but_its_tier(tmp_path, backend):
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        directory = stack.enter_context(HangingDirectory(tmp_path))
        store = stack.enter_context(Store(directory, backend))
        stack.callback(directory.heal)
        assert store.found() == 16
        locks = list(directory.path.rglob("lock.mdb"))
        assert locks
        files = [stack.enter_context(path.open("rb")) for path in locks]
        directory.hang()
        for file in files:
            assert libc.sync_file_range(file.fileno(), 0, 0, START_WRITEBACK) == 0
        for _ in range(2):
            store.found(0, 32)  # it answers at all; how many of them are in memory is open
        directory.heal()
        assert within_seconds(lambda: store.found(0, 32) == 32), "the tier is not used again"
