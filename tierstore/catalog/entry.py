"""How a process becomes an owner of a path: its catalog is opened, compared, repaired, entered."""

from dataclasses import dataclass
from typing import Self

from tierstore.backend.foreign import foreign_content
from tierstore.backend.inventory import stored_segments
from tierstore.catalog.check import check_catalog, numbers_in_range
from tierstore.catalog.opening import (
    enter_manifest,
    enter_owner,
    enter_state,
    enter_units,
    must_verify,
    require_version,
)
from tierstore.catalog.owners import OwnerLock
from tierstore.catalog.pages.budget import GROWTH_PAGES, count_live_pages
from tierstore.catalog.pages.lost_releases import repeat_lost_releases
from tierstore.catalog.pages.state import write_state
from tierstore.catalog.rows import Databases
from tierstore.config import SecondaryConfig
from tierstore.device.block_units import forbid_speculation, measure_units
from tierstore.device.marker import claim
from tierstore.device.remedies import explain
from tierstore.device.system import SystemCalls
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendForeignError,
    CatalogDamagedError,
    CatalogError,
    ConfigError,
)
from tierstore.faults import open_system
from tierstore.geometry import SpaceGeometry
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Transaction
from tierstore.manifest import Manifest

__all__ = ["Entry"]

# The map is virtual: the size of a catalog is bounded by its accounted bytes (`Budget`). With the
# map as the limit, a stopped reader or another chunk size meant lost records. It is the same in
# every process, since LMDB shuts out a process whose map is smaller than the file.
_MAP_BYTES = 1 << 38


@dataclass(frozen=True, slots=True)
class Entry:
    """What an owner has of an open catalog. It owns the environment and the lock."""

    env: LmdbEnv
    databases: Databases
    geometry: SpaceGeometry
    owner_lock: OwnerLock
    is_foreign: bool
    """Whether the path knew other identities alone when it was opened."""

    @classmethod
    def make(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank_count: int,
        system: SystemCalls | None = None,
    ) -> Self:
        """Open or create the catalog of a path, compare the manifest, become an owner.

        A damaged catalog is noted as such and opened once more: it starts empty then, unless
        another process has it open.

        Raises:
            CatalogError, ManifestError, ConfigError: see `Catalog.open`.
        """
        SpaceGeometry.of(config, manifest, rank_count)  # before anything is made
        system = open_system(config) if system is None else system
        try:
            try:
                return cls._make(config, manifest, rank_count, system)
            except (BackendCorruptError, CatalogDamagedError):
                return cls._make(config, manifest, rank_count, system)
        except BackendForeignError as error:
            raise ConfigError(f"secondary {config.name!r}: {error}") from error
        except BackendError as error:
            raise CatalogError(f"secondary {config.name!r}: {error}") from error

    @classmethod
    def _make(
        cls, config: SecondaryConfig, manifest: Manifest, rank_count: int, system: SystemCalls
    ) -> Self:
        try:
            claim(config.path, system=system).close()
        except OSError as error:
            raise BackendError(explain(config.path, error)) from error
        units, is_certain = measure_units(config.path, system)
        geometry = SpaceGeometry.of(config, manifest, rank_count, units)
        forbid_speculation(config.path / "catalog", system)
        env = LmdbEnv.open(
            config.path / "catalog",
            map_bytes=_MAP_BYTES,
            sealed=True,
            durable=config.io.durable,
            tier=config.path,
            system=system,
        )
        owner_lock: OwnerLock | None = None
        try:
            databases = Databases(env)
            # A segment has a row before it has a file: one that is listed now and has no row later
            # is unreferenced. What is in an lmdb tier is bounded by its map, whoever wrote it.
            is_file = config.backend != "lmdb"
            segments = stored_segments(config, geometry) if is_file else {}
            foreign = foreign_content(config, rank_count=geometry.rank_count)
            with numbers_in_range(), env.write() as txn:
                is_suspect = env.findings.is_suspect
                require_version(txn, databases, config, is_suspect=is_suspect)
                _verify_page_counts(txn, databases, env.used_bytes() // PAGE_BYTES)
                is_unknown = must_verify(txn, databases, env.findings)
                units = enter_units(txn, databases, units, is_certain=is_certain)
                geometry = SpaceGeometry.of(config, manifest, rank_count, units)
                if is_unknown:
                    _verify_rows(txn, databases, geometry)
                state = enter_state(
                    txn, databases, config, geometry, segments, is_suspect=is_suspect
                )
                if is_file and env.findings.is_alone:
                    repeat_lost_releases(
                        txn,
                        databases,
                        config,
                        geometry,
                        segments,
                        catalog_pages=env.used_bytes() // PAGE_BYTES,
                        system=system,
                    )
                _refuse(foreign)
                is_foreign = enter_manifest(txn, databases, config, manifest)
                owner_lock = enter_owner(txn, databases, config, manifest, state)
                write_state(txn, databases, state)
        except BaseException as error:
            if owner_lock is not None:
                owner_lock.close()
            if isinstance(error, BackendCorruptError | CatalogDamagedError):
                env.distrust(str(error))
            env.close()
            raise
        return cls(env, databases, geometry, owner_lock, is_foreign)


def _refuse(foreign: str) -> None:
    if foreign:
        raise BackendForeignError(foreign)


def _verify_page_counts(txn: Transaction, databases: Databases, file_pages: int) -> None:
    # LMDB stores how many pages each tree has and never counts again. Every budget relies on it.
    live_pages = count_live_pages(txn, databases)
    if live_pages > file_pages + GROWTH_PAGES:
        raise CatalogDamagedError(f"rows take {live_pages} pages of a file of {file_pages}")


def _verify_rows(txn: Transaction, databases: Databases, geometry: SpaceGeometry) -> None:
    problems = check_catalog(txn, databases, geometry)
    if problems:
        raise CatalogDamagedError(problems[0])
