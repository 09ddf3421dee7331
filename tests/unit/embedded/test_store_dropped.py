"""Stores that nobody closes: dropped, left open at the exit of the interpreter, or forked."""

import gc
import subprocess
import sys
import warnings
import weakref

import pytest
from open_resources import are_given_back, open_resources
from python_paths import environment
from store_kit import Chunks, config_of
from waiting import within_seconds

CHUNKS = Chunks(65_536)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_dropped_store_warns_and_gives_everything_back(tmp_path, backend):
    config = config_of(tmp_path, backend=backend, cascade="on_evict")
    with CHUNKS.open(config):
        pass  # what a process opens once and for all is open now
    before = open_resources()
    store = CHUNKS.open(config)
    CHUNKS.put(store, range(20))
    pool = weakref.ref(store._executor.pool)
    with pytest.warns(ResourceWarning, match=f"without close.*{tmp_path}"):
        del store
    assert within_seconds(lambda: are_given_back(before))
    assert within_seconds(lambda: gc.collect() >= 0 and pool() is None)
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(20)) == list(range(20))
        assert store.check() == []


def test_a_dropped_store_that_hangs_on_itself_is_given_back_by_the_garbage_collector(tmp_path):
    config = config_of(tmp_path)
    with CHUNKS.open(config):
        pass
    before = open_resources()
    store = CHUNKS.open(config)
    CHUNKS.put(store, range(20))
    store.itself = store
    del store
    with pytest.warns(ResourceWarning, match="TierStore"):
        gc.collect()
    assert within_seconds(lambda: are_given_back(before))


def test_a_torn_store_that_is_dropped_is_given_back(tmp_path):
    config = config_of(tmp_path)
    with CHUNKS.open(config):
        pass
    before = open_resources()
    store = CHUNKS.open(config)

    def interrupt():
        raise KeyboardInterrupt

    store._loop.pump = interrupt
    with pytest.raises(KeyboardInterrupt):
        store.match_prefix(CHUNKS.keys([1]))
    with pytest.warns(ResourceWarning, match="TierStore"):
        del store
    assert within_seconds(lambda: are_given_back(before))


def test_a_closed_store_is_dropped_without_a_word(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = CHUNKS.open(config_of(tmp_path))
        store.close()
        planes = weakref.ref(store._planes)
        del store
        gc.collect()
        assert planes() is None


SCRIPT = """
import os, sys, threading
from store_kit import Chunks, config_of
from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience

class Hung:
    def __init__(self, backend):
        self.backend = backend
    def write(self, records):
        threading.Event().wait()
    def __getattr__(self, name):
        return getattr(self.backend, name)

def opener(*args, **kwargs):
    backend = open_backend(*args, **kwargs)
    return Hung(backend) if sys.argv[2] == "hung" else backend

chunks = Chunks(65_536)
patience = Patience(put_seconds=0.3, close_seconds=0.3, exit_seconds=0.3)
if sys.argv[2] not in ("hung", "busy"):
    patience = None
config = config_of(sys.argv[1], cascade="on_evict")
store = TierStore.open(config, chunks.manifest, open_backend=opener, patience=patience)
chunks.put(store, range(20))
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit(0)
if sys.argv[2] == "fork":
    assert os.wait()[1] == 0
    assert chunks.found(store, range(20)) == list(range(20))
class Rows(list):
    def __len__(self):
        return self.act()
if sys.argv[2] == "inside":
    rows = Rows()
    rows.act = sys.exit
    store.get(chunks.keys([1]), rows)
if sys.argv[2] == "busy":
    stuck = threading.Event()
    rows = Rows()
    rows.act = lambda: stuck.set() or threading.Event().wait()
    threading.Thread(target=store.get, args=(chunks.keys([1]), rows), daemon=True).start()
    stuck.wait()
"""


def run_script(path, kind):
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT, str(path), kind],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("kind", ["open", "fork"])
def test_a_store_that_is_open_at_the_exit_is_closed_without_a_word(tmp_path, kind):
    run = run_script(tmp_path, kind)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    with CHUNKS.open(config_of(tmp_path, cascade="on_evict")) as store:
        assert CHUNKS.found(store, range(20)) == list(range(20))
        assert store.check() == []


@pytest.mark.parametrize("kind", ["hung", "busy", "inside"])
def test_an_exit_over_a_store_that_hangs_or_was_interrupted_ends(tmp_path, kind):
    run = run_script(tmp_path, kind)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    with CHUNKS.open(config_of(tmp_path, cascade="on_evict")) as store:
        assert store.check() == []
