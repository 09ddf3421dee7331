"""The catalog of a secondary tier: records, their order of eviction, and the pages they hold.

One LMDB environment per path, shared by all processes. Synchronous and without threads: reads run
in the calling thread, writes in whichever thread opens a `transaction`.
"""

import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from tierstore.backend.inventory import stored_segments
from tierstore.config import SecondaryConfig
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    CatalogDamagedError,
    CatalogError,
    ConfigError,
    ManifestError,
)
from tierstore.geometry import SpaceGeometry
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env import LmdbEnv, Transaction
from tierstore.manifest import FORMAT_VERSION, Manifest, namespace_of
from tierstore.record import PLACE_BYTES
from tierstore.tier.catalog_check import check_catalog, verify_sums
from tierstore.tier.catalog_schema import Databases, StateRow
from tierstore.tier.catalog_txn import CatalogTxn
from tierstore.tier.orphans import release_orphans
from tierstore.tier.owners import OwnerLock, forget_owner_files, is_owner_dead
from tierstore.tier.space import Space
from tierstore.transfer import Place

__all__ = ["Catalog", "SecondaryStats"]

_logger = logging.getLogger(__name__)

_BACKENDS = ("file", "lmdb")
_RESERVE = [(b"reserve%d" % number, bytes(4000)) for number in range(32)]
"""Stored at the start of a transaction and deleted at its end, a page each: what is committed
leaves so many pages of the map free. In a map that is full to its last page no record could be
evicted ever again. Single pages, for a map may be full of those."""

_NO_PINS: Mapping[OffloadKey, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryStats:
    """A glance at one tier."""

    record_count: int
    payload_bytes: int
    """Of the records, on one rank."""
    charged_bytes: int
    """Everything on disk that counts against the capacity, the catalog included."""
    capacity_bytes: int
    evicted_count: int


class Catalog:
    """The records of one tier as this process, one owner of several, sees and changes them."""

    def __init__(
        self,
        config: SecondaryConfig,
        geometry: SpaceGeometry,
        env: LmdbEnv,
        databases: Databases,
        owner_lock: OwnerLock,
        *,
        is_foreign: bool,
    ) -> None:
        self.geometry = geometry
        self.is_foreign = is_foreign
        """Whether the path knew other identities alone when it was opened."""
        self._config = config
        self._env = env
        self._databases = databases
        self._owner_lock = owner_lock
        self._owners_directory = config.path / "owners"
        self._active: int | None = None

    @classmethod
    def open(cls, config: SecondaryConfig, manifest: Manifest, *, rank_count: int) -> Self:
        """Open or create the catalog, compare the manifest, become an owner.

        Raises:
            CatalogError: it cannot be opened; the message says what to do.
            ManifestError: the namespace is stored with another manifest.
            ConfigError: the capacity is too small, or the path belongs to another kind of tier.
        """
        geometry = SpaceGeometry.of(config, manifest, rank_count)
        try:
            try:
                return cls._open(config, manifest, geometry)
            except (BackendCorruptError, CatalogDamagedError):
                # It is noted, so that it starts anew, unless another process has it open.
                return cls._open(config, manifest, geometry)
        except BackendError as error:
            raise CatalogError(f"secondary {config.name!r}: {error}") from error

    @classmethod
    def _open(cls, config: SecondaryConfig, manifest: Manifest, geometry: SpaceGeometry) -> Self:
        env = LmdbEnv.open(
            config.path / "catalog", map_bytes=geometry.catalog_map_bytes, sealed=True
        )
        owner_lock: OwnerLock | None = None
        try:
            databases = Databases(env)
            with env.write() as txn:
                if env.admission.is_suspect:
                    _verify_rows(txn, databases, geometry)
                state = _enter_state(txn, databases, config, geometry)
                is_foreign = _enter_manifest(txn, databases, config, manifest)
                owner_lock = OwnerLock(config.path / "owners", state.next_owner)
                state.next_owner += 1
                Space.write_state(txn, databases, state)
                forget_owner_files(config.path / "owners", [owner_lock.owner])
        except BaseException as error:
            if owner_lock is not None:
                owner_lock.close()
            if isinstance(error, BackendCorruptError | CatalogDamagedError):
                env.distrust(str(error))
            env.close()
            raise
        return cls(config, geometry, env, databases, owner_lock, is_foreign=is_foreign)

    @property
    def damage(self) -> str:
        """Why the catalog was started anew when it was opened; empty: it was not."""
        return self._env.admission.damage

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; one read transaction.

        Raises:
            BackendError: the catalog cannot be read.
        """
        try:
            with self._env.read(self._databases.records) as txn:
                values = list(map(txn.get, keys))
        except BackendCorruptError as error:
            self._env.distrust(str(error))
            raise
        return [None if value is None else Place(value[:PLACE_BYTES]) for value in values]

    @contextmanager
    def transaction(
        self, pins: Mapping[OffloadKey, int] = _NO_PINS, *, spares_pages: bool = True
    ) -> Iterator[CatalogTxn]:
        """Run one write transaction, committed when the block ends without an exception.

        Records in `pins` are not evicted. `spares_pages`: it fails as long as there is still room
        in the map for those that evict a few records, which do not spare any.

        Raises:
            BackendMapFullError: the map is full; nothing was changed.
            BackendError: the catalog failed; nothing was changed.
            CatalogError: a row is damaged; nothing was changed.
        """
        with self._distrusting(), self._env.write() as txn:
            if spares_pages:
                with txn.cursor(db=self._databases.state) as cursor:
                    cursor.putmulti(_RESERVE)
            space = Space(
                txn,
                self._databases,
                self.geometry,
                owner=self._owner_lock.owner,
                active=self._active,
            )
            yield CatalogTxn(txn, self._databases, self.geometry, space, pins)
            space.flush()
            if spares_pages:
                for key, _ in _RESERVE:
                    txn.delete(key, db=self._databases.state)
        self._active = space.active

    @contextmanager
    def _distrusting(self) -> Iterator[None]:
        """Note damage that comes to light, lest it stay for ever."""
        try:
            yield
        except (BackendCorruptError, CatalogDamagedError) as error:
            self._env.distrust(str(error))
            raise
        except (struct.error, OverflowError) as error:
            damage = CatalogDamagedError(f"a number is out of range ({error})")
            self._env.distrust(str(damage))
            raise damage from error

    def is_owner_dead(self, owner: int) -> bool:
        """Say whether the process that had this owner id is gone."""
        return is_owner_dead(self._owners_directory, owner)

    def space_pages(self) -> int:
        """Return what pages of all ranks may be charged in total.

        A catalog that grew under a larger capacity does not shrink: it costs payload space.
        """
        excess_bytes = max(0, self._env.used_bytes() - self.geometry.catalog_map_bytes)
        return self.geometry.space_pages * self.geometry.rank_count - excess_bytes // PAGE_BYTES

    def stats(self) -> SecondaryStats:
        """Count records and bytes.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            state = Space.read_state(txn, self._databases)
            record_count = txn.stat(db=self._databases.records)["entries"]
        if state is None:
            raise CatalogDamagedError("the state row is missing")
        fixed_bytes = self._config.capacity_bytes - self.space_pages() * PAGE_BYTES
        return SecondaryStats(
            record_count=record_count,
            payload_bytes=state.payload_bytes,
            charged_bytes=fixed_bytes + state.charged_pages * PAGE_BYTES,
            capacity_bytes=self._config.capacity_bytes,
            evicted_count=state.evicted_count,
        )

    def check(self) -> list[str]:
        """Verify every invariant of the stored rows; return the violations in words."""
        try:
            with self._env.read() as txn:
                return check_catalog(txn, self._databases, self.geometry)
        except (BackendError, CatalogError) as error:
            return [str(error)]

    def forget_dead_readers(self) -> None:
        """Let pages be reused that only killed processes were looking at."""
        self._env.forget_dead_readers()

    def sync(self) -> None:
        """Flush the catalog to the device.

        Raises:
            BackendError: the device refused.
        """
        self._env.sync()

    def close(self) -> None:
        """Close the environment and stop being an owner; idempotent."""
        self._owner_lock.close()
        self._env.close()


def _verify_rows(txn: Transaction, databases: Databases, geometry: SpaceGeometry) -> None:
    problems = check_catalog(txn, databases, geometry)
    if problems:
        raise CatalogDamagedError(problems[0])


def _enter_state(
    txn: Transaction, databases: Databases, config: SecondaryConfig, geometry: SpaceGeometry
) -> StateRow:
    backend = _BACKENDS.index(config.backend)
    rank_count = geometry.rank_count
    state = Space.read_state(txn, databases)
    if state is None:
        state = StateRow(FORMAT_VERSION, backend, rank_count)
        release_orphans(txn, databases, state, stored_segments(config, geometry))
        return state
    verify_sums(txn, databases, state)
    where = f"secondary {config.name!r}: path {config.path}"
    if state.format_version != FORMAT_VERSION:
        raise CatalogError(
            f"{where} has format {state.format_version}, this version writes {FORMAT_VERSION}; "
            "remove the directory or choose another path"
        )
    if state.backend != backend:
        raise ConfigError(
            f"{where} holds a tier with another backend than {config.backend!r}; "
            "choose another path, or remove the directory"
        )
    if config.backend == "lmdb" and state.rank_count != rank_count:
        raise ConfigError(
            f"{where} was divided among {state.rank_count} ranks, not {rank_count}, which an lmdb "
            "tier cannot change; choose another path, or remove the directory"
        )
    return state


def _enter_manifest(
    txn: Transaction, databases: Databases, config: SecondaryConfig, manifest: Manifest
) -> bool:
    """Enter or compare our manifest; return whether the path held those of others alone."""
    stored = txn.get(manifest.namespace, db=databases.namespaces)
    if stored is not None and namespace_of(stored) != manifest.namespace:
        raise CatalogDamagedError("a manifest does not give its namespace")
    if stored is None:
        with txn.cursor(db=databases.namespaces) as cursor:
            others = [bytes(json) for _, json in cursor]
        difference = manifest.nearest_difference(others)
        if difference is not None:
            _logger.warning(
                "chunks of the same model are stored under another identity and will not be "
                "found: secondary=%s %s",
                config.name,
                difference,
            )
        txn.put(manifest.namespace, manifest.canonical_json, db=databases.namespaces)
        return bool(others)
    difference = manifest.difference(stored)
    if difference is not None:
        raise ManifestError(
            f"secondary {config.name!r}: path {config.path} holds another manifest under the same "
            f"namespace: {difference}; choose another path, or remove the directory"
        )
    return False
