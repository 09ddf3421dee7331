"""An LMDB environment that several threads use, closed when the last use has ended."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstore.errors import BackendCorruptError, ClosedError
from tierstore.lmdb_env.env import LmdbEnv

__all__ = ["SharedEnv"]


class SharedEnv:
    """Opens and closes one environment and counts its users. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Describe the environment, which is closed; `directory` is for messages."""
        self._directory = directory
        self._lock = threading.Lock()
        self._env: LmdbEnv | None = None
        self._user_count = 0
        self._is_open = False

    def open(self, open_env: Callable[[], LmdbEnv]) -> None:
        """Open the environment by `open_env`, unless it is open.

        Raises:
            BackendError: `open_env` raised it.
        """
        with self._lock:
            if self._env is None:
                self._env = open_env()
            self._is_open = True

    @contextmanager
    def used(self) -> Iterator[LmdbEnv]:
        """Use the environment for as long as the block lasts.

        A block that finds it corrupt marks it: its next exclusive opening begins an empty one.

        Raises:
            ClosedError: it is not open.
        """
        with self._lock:
            env = self._env
            if env is None or not self._is_open:
                raise ClosedError(f"{self._directory}: the backend is closed")
            self._user_count += 1
        try:
            yield env
        except BackendCorruptError as error:
            env.distrust(str(error))
            raise
        finally:
            with self._lock:
                self._user_count -= 1
                self._close_unused()

    def close(self) -> None:
        """Refuse further uses; close the environment after those under way. Idempotent."""
        with self._lock:
            self._is_open = False
            self._close_unused()

    def _close_unused(self) -> None:
        if not self._is_open and self._user_count == 0 and self._env is not None:
            self._env.close()
            self._env = None
