"""How a process becomes an owner of a path: its catalog is opened, compared, repaired, entered."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from tierstore.backend.foreign import foreign_content
from tierstore.backend.inventory import stored_segments, trim_segments
from tierstore.catalog.check import check_catalog, numbers_in_range
from tierstore.catalog.opening import (
    charged_segments,
    enter_manifest,
    enter_owner,
    enter_state,
    enter_units,
    find_own_state,
    merge_units,
    must_verify,
    require_ours,
    require_version,
)
from tierstore.catalog.owners import OwnerLock
from tierstore.catalog.pages.budget import GROWTH_PAGES, count_live_pages
from tierstore.catalog.pages.lost_releases import repeat_lost_releases
from tierstore.catalog.pages.state import read_version, write_state
from tierstore.catalog.rows import Databases
from tierstore.config import SecondaryConfig
from tierstore.device.block_units import (
    PAGE_UNITS,
    BlockUnits,
    forbid_speculation,
    measure_units,
)
from tierstore.device.directory import Directory
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
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.lmdb_env.peek import peek_row
from tierstore.lmdb_env.seal import DATA_NAME, DISTRUST_NAME, SEAL_NAME
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
        pace: VerifyPace = UNHURRIED,
    ) -> Self:
        """Open or create the catalog of a path, compare the manifest, become an owner.

        A damaged catalog is noted as such and opened once more: it starts empty then, unless
        another process has it open. What takes longer the more records there are is done before
        the catalog is written to, in steps of `pace`; others wait for their turn to open it, and
        nobody waits for its write lock.

        Raises:
            CatalogError, ManifestError, ConfigError: see `Catalog.open`.
            ClosedError: see `VerifyPace.step`.
        """
        SpaceGeometry.of(config, manifest, rank_count)  # before anything is made
        system = open_system(config) if system is None else system
        opening = _Opening(config, manifest, rank_count, system, pace)
        try:
            try:
                return cls._make(opening)
            except (BackendCorruptError, CatalogDamagedError):
                return cls._make(opening)
        except BackendForeignError as error:
            raise ConfigError(f"secondary {config.name!r}: {error}") from error
        except BackendError as error:
            raise CatalogError(f"secondary {config.name!r}: {error}") from error

    @classmethod
    def _make(cls, opening: "_Opening") -> Self:
        config, manifest = opening.config, opening.manifest
        opening.prepare()
        opening.refuse_early()
        env = LmdbEnv.open(
            config.path / "catalog",
            map_bytes=_MAP_BYTES,
            sealed=True,
            durable=config.io.durable,
            tier=config.path,
            system=opening.system,
            verify=opening.verify,
            pace=opening.pace,
        )
        owner_lock: OwnerLock | None = None
        try:
            databases = Databases(env)
            segments = opening.list_segments(env, databases)
            foreign = foreign_content(config, rank_count=opening.rank_count)
            with numbers_in_range(), env.write() as txn:
                is_suspect = env.findings.is_suspect
                require_version(txn, databases, config, is_suspect=is_suspect)
                _verify_page_counts(txn, databases, env.used_bytes() // PAGE_BYTES)
                units = enter_units(txn, databases, opening.units, is_certain=opening.is_certain)
                state = enter_state(
                    txn, databases, config, opening.rank_count, segments, is_suspect=is_suspect
                )
                _refuse(foreign)
                is_foreign = enter_manifest(txn, databases, config, manifest)
                owner_lock = enter_owner(txn, databases, config, manifest, state)
                write_state(txn, databases, state)
        except BaseException as error:
            if owner_lock is not None:
                owner_lock.close()
            _note_damage(env, error)
            env.close()
            raise
        return cls(env, databases, opening.geometry(units), owner_lock, is_foreign)


@dataclass(slots=True)
class _Opening:
    """One try to open a catalog, or two."""

    config: SecondaryConfig
    manifest: Manifest
    rank_count: int
    system: SystemCalls
    pace: VerifyPace
    units: BlockUnits = PAGE_UNITS
    is_certain: bool = False

    def prepare(self) -> None:
        """Claim the path, and measure what is below it."""
        path = self.config.path
        try:
            claim(path, system=self.system).close()
        except OSError as error:
            raise BackendError(explain(path, error)) from error
        self.units, self.is_certain = measure_units(path, self.system)
        self.geometry(self.units)
        forbid_speculation(path / "catalog", self.system)

    def refuse_early(self) -> None:
        """Refuse a catalog that takes long to verify, and is of another version or kind of tier.

        The user has to act then, and would not wait for it. One with a seal is read fast enough.

        Raises:
            CatalogError, ConfigError: see `require_ours`.
        """
        value = None
        with suppress(OSError, BackendError):  # for the opening to say
            value = self._peek_state()
        if value is not None:
            with suppress(CatalogDamagedError):  # for the verification to say
                require_ours(value, self.config, self.rank_count)

    def _peek_state(self) -> bytes | None:
        with Directory.open(self.config.path) as base, base.subdirectory("catalog") as directory:
            is_left_to_verify = not (
                directory.has_file(SEAL_NAME) or directory.has_file(DISTRUST_NAME)
            )
            if not is_left_to_verify or not self.pace.is_long(directory.status(DATA_NAME).st_size):
                return None
            descriptor = directory.open_file(DATA_NAME, os.O_RDONLY)
            try:
                return peek_row(descriptor, b"state", b"state")
            finally:
                os.close(descriptor)

    def geometry(self, units: BlockUnits) -> SpaceGeometry:
        return SpaceGeometry.of(self.config, self.manifest, self.rank_count, units)

    def list_segments(self, env: LmdbEnv, databases: Databases) -> dict[int, int]:
        """Return the segments that lie below the path, of which some may have no row.

        A segment has a row before it has a file: one that is listed now and has no row later is
        unreferenced. What is in an lmdb tier is bounded by its map, whoever wrote it.
        """
        if self.config.backend == "lmdb":
            with env.read() as txn:
                if read_version(txn, databases) is not None:
                    return {}
        return stored_segments(self.config, self.geometry(self.units))

    def verify(self, env: LmdbEnv) -> None:
        """Verify the rows as no other process can change them, and repeat lost releases.

        O(records) after a kill or a power cut. In a read transaction: not even other threads wait.
        """
        try:
            databases = Databases(env)
            with numbers_in_range(), env.read() as txn:
                self._verify(env, txn, databases)
        except (BackendCorruptError, CatalogDamagedError) as error:
            _note_damage(env, error)
            raise

    def _verify(self, env: LmdbEnv, txn: Transaction, databases: Databases) -> None:
        is_suspect = env.findings.is_suspect
        file_pages = env.used_bytes() // PAGE_BYTES
        require_version(txn, databases, self.config, is_suspect=is_suspect)
        _verify_page_counts(txn, databases, file_pages)
        units = merge_units(txn, databases, self.units, is_certain=self.is_certain)
        geometry = self.geometry(units)
        if must_verify(txn, databases, env.findings):
            problems = check_catalog(txn, databases, geometry, self.pace)
            if problems:
                raise CatalogDamagedError(problems[0])
        state = find_own_state(txn, databases, self.config, self.rank_count, is_suspect=is_suspect)
        if self.config.backend == "lmdb":
            return
        # Here, where no other process has the path open: a system call per segment under the
        # write lock would let all of them wait.
        trim_segments(self.config, charged_segments(txn, databases))
        stored = stored_segments(self.config, geometry)
        if state is not None or stored:
            repeat_lost_releases(
                txn,
                databases,
                self.config,
                geometry,
                stored,
                catalog_pages=file_pages,
                system=self.system,
                pace=self.pace,
            )


def _refuse(foreign: str) -> None:
    if foreign:
        raise BackendForeignError(foreign)


def _verify_page_counts(txn: Transaction, databases: Databases, file_pages: int) -> None:
    # LMDB stores how many pages each tree has and never counts again. Every budget relies on it.
    live_pages = count_live_pages(txn, databases)
    if live_pages > file_pages + GROWTH_PAGES:
        raise CatalogDamagedError(f"rows take {live_pages} pages of a file of {file_pages}")


def _note_damage(env: LmdbEnv, error: BaseException) -> None:
    """Let the next opener start with an empty catalog."""
    if isinstance(error, BackendCorruptError | CatalogDamagedError):
        env.distrust(str(error))
