"""A store that stops its process within a transaction of its catalog, when it is told to.

Arguments: path, backend, point of the database. Says "open", waits for a line, stores until it is
stopped, says "ended".
"""

import signal
import sys
import threading
from pathlib import Path

from store_kit import Chunks, config_of

from tierstore import TierStore
from tierstore.device.system import DatabasePoint, SystemCalls

CHUNKS = Chunks(4096)


class Stopping(SystemCalls):
    """Stops the process at a point, once it is armed."""

    is_armed = False

    def reach(self, point: DatabasePoint) -> None:
        if self.is_armed and point is DatabasePoint(sys.argv[3]):
            self.is_armed = False
            # To this thread: to the process, another thread might take it, and this one go on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


system = Stopping()
config = config_of(Path(sys.argv[1]), backend=sys.argv[2], primary="1MiB", capacity="16MiB")
with TierStore.open(config, CHUNKS.manifest, open_system=lambda _: system) as store:
    print("open", flush=True)
    sys.stdin.readline()
    system.is_armed = True
    CHUNKS.put(store, range(1000, 1016))
    store.flush()
    print("ended", flush=True)
    sys.stdin.readline()
