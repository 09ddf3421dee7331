"""The one place that knows which backend a configuration means."""

from functools import partial
from pathlib import Path
from typing import Protocol, cast

from tierstore.backend.lmdb.backend import LmdbBackend
from tierstore.backend.names import rank_directories
from tierstore.backend.plug_in import names_pool, open_plug_in
from tierstore.backend.protocol import Backend, PoolRegion
from tierstore.backend.segments.backend import FileBackend
from tierstore.codec.opening import open_codec
from tierstore.config import SecondaryConfig
from tierstore.device.block_units import forbid_speculation, measure_units
from tierstore.device.directory import Directory
from tierstore.device.marker import claim
from tierstore.device.remedies import explain
from tierstore.device.system import SystemCalls
from tierstore.errors import BackendError
from tierstore.faults import SystemOpener, open_system
from tierstore.geometry import SpaceGeometry
from tierstore.manifest import Manifest

__all__ = [
    "BackendOpener",
    "PoolBackendOpener",
    "backend_opener",
    "leftover_directories",
    "offer_pool",
    "open_backend",
]


class BackendOpener(Protocol):
    """A function such as `open_backend`; tests give one that wraps its backends in faults."""

    def __call__(
        self, config: SecondaryConfig, manifest: Manifest, *, rank: int, rank_count: int
    ) -> Backend:
        """Open the payload store of one rank."""


class PoolBackendOpener(Protocol):
    """A `BackendOpener` whose backends register the slots with a device; see `offer_pool`."""

    def __call__(
        self,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank: int,
        rank_count: int,
        pool: PoolRegion | None = None,
    ) -> Backend:
        """Open the payload store of one rank; `pool` is where the slots lie, if that is known."""


def open_backend(
    config: SecondaryConfig,
    manifest: Manifest,
    *,
    rank: int,
    rank_count: int,
    pool: PoolRegion | None = None,
    system: SystemCalls | None = None,
) -> Backend:
    """Open the payload store of one rank below `<path>/rank<r>`, or wherever a plug-in keeps it.

    `system` is what the configuration says unless it is given. Plug-ins that ask are told `pool`.

    Raises:
        BackendError: the path cannot be used; the message says what to change.
        ConfigError: the capacity is too small for the catalog and one segment, or the key file of
            the tier cannot be used.
        MissingExtraError: keyed records are wanted, and `cryptography` is not installed.
    """
    codec = open_codec(config, manifest)
    system = open_system(config) if system is None else system
    open_other = partial(
        open_plug_in,
        config,
        manifest,
        rank=rank,
        rank_count=rank_count,
        codec=codec,
        system=system,
        pool=pool,
    )
    if not config.is_on_disk:  # its path and its capacity are the plug-in's
        return open_other()
    _claim(config.path, system)
    directory = config.path / f"rank{rank}"
    backend: Backend
    if config.backend == "file":
        SpaceGeometry.of(config, manifest, rank_count)
        backend = FileBackend(
            directory,
            rank=rank,
            mode=config.io.mode,
            durable=config.io.durable,
            tier=config.path,
            leftovers=partial(leftover_directories, config.path, rank, rank_count),
            codec=codec,
            system=system,
        )
    elif config.backend == "lmdb":
        units, _ = measure_units(config.path, system)
        geometry = SpaceGeometry.of(config, manifest, rank_count, units)
        forbid_speculation(directory / "payload", system)
        backend = LmdbBackend(
            directory / "payload",
            rank=rank,
            map_bytes=geometry.payload_map_bytes,
            durable=config.io.durable,
            tier=config.path,
            codec=codec,
            system=system,
        )
    else:
        SpaceGeometry.of(config, manifest, rank_count)
        return open_other()
    backend.open()
    return backend


def backend_opener(open_system: SystemOpener) -> BackendOpener:
    """Return `open_backend` with the system calls that `open_system` gives for a tier."""

    def open_with(
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank: int,
        rank_count: int,
        pool: PoolRegion | None = None,
    ) -> Backend:
        return open_backend(
            config,
            manifest,
            rank=rank,
            rank_count=rank_count,
            pool=pool,
            system=open_system(config),
        )

    return open_with


def offer_pool(opener: BackendOpener, pool: PoolRegion) -> BackendOpener:
    """Return an opener that is told where the slots lie, if it has a parameter named `pool`.

    It is told at each opening. Others are returned as they are; so are those with `**kwargs`, which
    they may hand on to a function without this parameter.
    """
    if not names_pool(opener):
        return opener
    return partial(cast("PoolBackendOpener", opener), pool=pool)


def leftover_directories(path: Path, rank: int, rank_count: int) -> list[Path]:
    """Find the directories of ranks k >= `rank_count` that rank k modulo `rank_count` cleans up.

    An earlier run had more ranks; what the catalog evicts of it is released by us.

    Raises:
        OSError: the path cannot be read.
    """
    try:
        with Directory.open(path) as base:
            found = rank_directories(base)
    except FileNotFoundError:
        return []
    return [
        path / name
        for number, name in found.items()
        if number >= rank_count and number % rank_count == rank
    ]


def _claim(path: Path, system: SystemCalls) -> None:
    try:
        claim(path, system=system).close()
    except OSError as error:
        raise BackendError(explain(path, error)) from error
