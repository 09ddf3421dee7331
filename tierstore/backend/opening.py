"""The one place that knows which backend a configuration means."""

from typing import Protocol

from tierstore.backend.file import FileBackend
from tierstore.backend.lmdb import LmdbBackend
from tierstore.backend.protocol import Backend
from tierstore.config import SecondaryConfig
from tierstore.geometry import SpaceGeometry
from tierstore.manifest import Manifest

__all__ = ["BackendOpener", "open_backend"]


class BackendOpener(Protocol):
    """A function such as `open_backend`; tests give one that wraps its backends in faults."""

    def __call__(
        self, config: SecondaryConfig, manifest: Manifest, *, rank: int, rank_count: int
    ) -> Backend:
        """Open the payload store of one rank."""


def open_backend(
    config: SecondaryConfig, manifest: Manifest, *, rank: int, rank_count: int
) -> Backend:
    """Open the payload store of one rank below `<path>/rank<r>`.

    Raises:
        BackendError: the path cannot be used; the message says what to change.
        ConfigError: the capacity is too small for the catalog and one segment.
    """
    geometry = SpaceGeometry.of(config, manifest, rank_count)
    directory = config.path / f"rank{rank}"
    backend: Backend
    if config.backend == "file":
        backend = FileBackend(
            directory,
            rank=rank,
            segment_bytes=geometry.segment_bytes,
            mode=config.io.mode,
            durable=config.io.durable,
        )
    else:
        backend = LmdbBackend(
            directory / "payload",
            rank=rank,
            map_bytes=geometry.payload_map_bytes,
            durable=config.io.durable,
        )
    backend.open()
    return backend
