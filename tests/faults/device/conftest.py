import threading

import pytest
from fuse_directory import HangingDirectory
from waiting import within_seconds


@pytest.fixture
def directory(tmp_path):
    """A directory whose device hangs and heals at the test's word."""
    before = threading.active_count()
    with HangingDirectory(tmp_path) as hanging:
        guard = threading.Timer(300, hanging.heal)  # a test that waits for ever would say nothing
        guard.start()
        yield hanging
        guard.cancel()
        guard.join()
        hanging.heal()
        # A mapped page of a server that has died ends the process: what hung goes on before that.
        assert within_seconds(lambda: threading.active_count() <= before)
