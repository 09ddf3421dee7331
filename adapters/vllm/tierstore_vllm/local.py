"""Worker halves that live in the process of their scheduler half.

vLLM makes the two connectors apart from each other and hands nothing from one to the other that
every combination of connectors would pass on. In one process they meet here.
"""

from tierstore.config import StoreConfig
from tierstore_vllm.worker import WorkerHalf

__all__ = ["LocalWorkers", "local_workers"]


class LocalWorkers:
    """Worker halves that no scheduler half has met yet, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, StoreConfig, WorkerHalf]] = []

    def add(self, engine_id: str, config: StoreConfig, worker: WorkerHalf) -> None:
        """Let the scheduler half of the same engine and configuration find a worker half."""
        self._waiting.append((engine_id, config, worker))

    def take(self, engine_id: str, config: StoreConfig) -> WorkerHalf | None:
        """Return the worker half of an engine that came first, once; None: it lives elsewhere.

        Two connectors of one engine may have equal configurations. vLLM makes the halves of either
        kind in the order of its own configuration, so the first ones belong together.
        """
        for i, (their_id, their_config, worker) in enumerate(self._waiting):
            if (their_id, their_config) == (engine_id, config):
                del self._waiting[i]
                return worker
        return None

    def discard(self, worker: WorkerHalf) -> None:
        """Forget a worker half that is closed."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not worker]


local_workers = LocalWorkers()
"""Those of this process."""
