"""The catalog of a secondary tier: records, their order of eviction, and the pages they hold.

One LMDB environment per path, shared by all processes. Synchronous and without threads: reads run
in the calling thread, writes in whichever thread opens a `transaction`.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from tierstore.backend.foreign import foreign_content
from tierstore.backend.inventory import stored_segments
from tierstore.catalog.check import check_catalog
from tierstore.catalog.floors import Floors
from tierstore.catalog.opening import (
    enter_manifest,
    enter_owner,
    enter_state,
    enter_units,
    must_verify,
    require_version,
)
from tierstore.catalog.owners import OwnerLock, is_owner_dead
from tierstore.catalog.pages.budget import GROWTH_PAGES, Budget, CatalogSize, count_live_pages
from tierstore.catalog.pages.lost_releases import repeat_lost_releases
from tierstore.catalog.pages.space import Space
from tierstore.catalog.rows import Databases, StateRow
from tierstore.catalog.transaction import CatalogTxn
from tierstore.codec.record import PLACE_BYTES
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
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.lmdb_env.library import Transaction
from tierstore.manifest import Manifest
from tierstore.tier_events import SecondaryStats
from tierstore.transfer import Place

__all__ = ["Catalog"]

_MAP_BYTES = 1 << 38
"""Addresses, not memory: what a catalog takes is bounded by its `Budget`. The same for everybody,
since LMDB shuts out a process whose map is smaller than the file has become."""

_UNCOUNTED_ROWS_MAX = 128
"""Records that come or go before the pages of all rows are counted again."""

_MANIFEST_ROWS = 2 * _UNCOUNTED_ROWS_MAX
"""A manifest may have pages of its own: as many rows as to count again whenever one goes."""

_STALE_TRANSACTIONS = 4
"""A reader that has looked at one snapshot for so many transactions of others is not on its way."""

_NO_PINS: Mapping[OffloadKey, int] = {}


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
        self._map_pages = env.map_bytes() // PAGE_BYTES
        self._last_size: CatalogSize | None = None
        self._counted_rows = 0
        self._needed_pages = 0
        self._settled_pages = self._file_pages()

    @classmethod
    def open(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank_count: int,
        system: SystemCalls | None = None,
    ) -> Self:
        """Open or create the catalog, compare the manifest, become an owner.

        `system` is what the configuration says unless it is given.

        Raises:
            CatalogError: it cannot be opened; the message says what to do.
            ManifestError: the namespace is stored with another manifest.
            ConfigError: the capacity is too small, or the path belongs to another kind of tier.
        """
        SpaceGeometry.of(config, manifest, rank_count)  # before anything is made
        system = open_system(config) if system is None else system
        try:
            try:
                return cls._open(config, manifest, rank_count, system)
            except (BackendCorruptError, CatalogDamagedError):
                # It is noted, so that it starts anew, unless another process has it open.
                return cls._open(config, manifest, rank_count, system)
        except BackendForeignError as error:
            raise ConfigError(f"secondary {config.name!r}: {error}") from error
        except BackendError as error:
            raise CatalogError(f"secondary {config.name!r}: {error}") from error

    @classmethod
    def _open(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        rank_count: int,
        system: SystemCalls,
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
            # A segment has a row before it has a file: what is listed now and has none then is
            # nobody's. What is in an lmdb tier is bounded by its map, whoever wrote it.
            is_file = config.backend != "lmdb"
            segments = stored_segments(config, geometry) if is_file else {}
            foreign = foreign_content(config, rank_count=geometry.rank_count)
            with _numbers_in_range(), env.write() as txn:
                is_suspect = env.admission.is_suspect
                require_version(txn, databases, config, is_suspect=is_suspect)
                _verify_page_counts(txn, databases, env.used_bytes() // PAGE_BYTES)
                is_unknown = must_verify(txn, databases, env.admission)
                units = enter_units(txn, databases, units, is_certain=is_certain)
                geometry = SpaceGeometry.of(config, manifest, rank_count, units)
                if is_unknown:
                    _verify_rows(txn, databases, geometry)
                state = enter_state(
                    txn, databases, config, geometry, segments, is_suspect=is_suspect
                )
                if is_file and env.admission.is_alone:
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
                Space.write_state(txn, databases, state)
        except BaseException as error:
            if owner_lock is not None:
                owner_lock.close()
            if isinstance(error, BackendCorruptError | CatalogDamagedError):
                env.distrust(str(error))
            env.close()
            raise
        return cls(config, geometry, env, databases, owner_lock, is_foreign=is_foreign)

    @property
    def owner(self) -> int:
        """The id under which this process holds its places."""
        return self._owner_lock.owner

    @property
    def damage(self) -> str:
        """Why the catalog was started anew when it was opened; empty: it was not."""
        return self._env.admission.damage

    def is_lost(self) -> bool:
        """Return whether the path holds this catalog no longer, or us as its owner.

        It was removed, moved or unmounted. What comes there is somebody else's.
        """
        return self._env.is_lost() or not self._owner_lock.is_in_place()

    def segments(self) -> dict[int, int]:
        """List the segments below the path, for `release_orphans` in a later transaction.

        Raises:
            BackendError: the path cannot be read.
        """
        segments = stored_segments(self._config, self.geometry)
        # What is in an lmdb tier is bounded by its map, and charged nothing while it is removed.
        return segments if self._config.backend != "lmdb" else dict.fromkeys(segments, 0)

    def segments_in_use(self, segments: Iterable[int]) -> frozenset[int]:
        """Return those of the segments that have records, or into which some are being written.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            return frozenset(s for s in segments if Space.is_in_use(txn, self._databases, s))

    def locate(
        self,
        keys: Sequence[OffloadKey],
        passing: Callable[[Iterable[OffloadKey]], Iterable[OffloadKey]] = iter,
    ) -> list[Place | None]:
        """Return the place of each recorded key; one read transaction.

        `passing` is given the keys and hears by what is taken from it how far this has come.

        Raises:
            BackendError: the catalog cannot be read.
        """
        try:
            with self._env.read(self._databases.records) as txn:
                floors = Floors(txn, self._databases)
                values = list(map(txn.get, passing(keys)))
        except BackendCorruptError as error:
            self._env.distrust(str(error))
            raise
        if floors:
            return [
                None if value is None or floors.hide(key, value) else Place(value[:PLACE_BYTES])
                for key, value in zip(keys, values, strict=True)
            ]
        return [None if value is None else Place(value[:PLACE_BYTES]) for value in values]

    @contextmanager
    def transaction(self, pins: Mapping[OffloadKey, int] = _NO_PINS) -> Iterator[CatalogTxn]:
        """Run one write transaction, committed when the block ends without an exception.

        Records in `pins` are not evicted. What the block freed is stored with it, whoever asked for
        it (`CatalogTxn.freed`): pages that no row gives back would be charged for ever.

        Raises:
            BackendFullError: the device is full; nothing was changed.
            BackendError: the catalog failed; nothing was changed.
            CatalogError: a row is damaged; nothing was changed.
        """
        with self._distrusting(), self._env.write() as txn:
            space = Space(
                txn,
                self._databases,
                self.geometry,
                size=self._size(txn),
                owner=self.owner,
                active=self._active,
            )
            work = CatalogTxn(txn, self._databases, self.geometry, space, pins)
            yield work
            work.freed = space.emit()
            space.flush()
        self._active = space.active
        self._needed_pages = space.budget.needed_pages

    def is_outgrowing(self) -> bool:
        """Return whether the file grows because of a reader that keeps what is freed from reuse.

        Another process may have been stopped within a read transaction. Whoever writes on would
        make the file larger for good, so all but the necessary has to wait.
        """
        file_pages = self._file_pages()
        # Early enough for what has to be done meanwhile to fit into what is charged anyway.
        if file_pages <= max(self._needed_pages - 2 * GROWTH_PAGES, self._settled_pages):
            return False
        self._env.forget_dead_readers()
        if self._env.reader_lag() >= _STALE_TRANSACTIONS:
            return True
        self._settled_pages = file_pages
        return False

    @contextmanager
    def _distrusting(self) -> Iterator[None]:
        """Note damage that comes to light, lest it stay for ever."""
        try:
            with _numbers_in_range():
                yield
        except (BackendCorruptError, CatalogDamagedError) as error:
            self._env.distrust(str(error))
            raise

    def is_owner_dead(self, owner: int) -> bool:
        """Return whether the process that had this owner id is gone."""
        return is_owner_dead(self._owners_directory, owner)

    def budget(self) -> Budget:
        """Return the limits as of now.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            return self._measure(txn, self._state(txn))

    def stats(self) -> SecondaryStats:
        """Count records and bytes.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            state = self._state(txn)
            budget = self._measure(txn, state)
        fixed_bytes = budget.capacity_bytes - budget.space_pages_max * PAGE_BYTES
        return SecondaryStats(
            record_count=state.record_count,
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

    def sync(self) -> None:
        """Flush the catalog to the device.

        Raises:
            BackendError: the device refused.
        """
        self._env.sync()

    def abandon(self) -> None:
        """Let no data plane write for this owner any more: the catalog is lost."""
        self._owner_lock.remove()

    def close(self) -> None:
        """Close the environment and stop being an owner; idempotent."""
        self._owner_lock.close()
        self._env.close()

    def _state(self, txn: Transaction) -> StateRow:
        state = Space.read_state(txn, self._databases)
        if state is None:
            raise CatalogDamagedError("the state row is missing")
        return state

    def _measure(self, txn: Transaction, state: StateRow) -> Budget:
        size = CatalogSize(
            live_pages=count_live_pages(txn, self._databases),
            file_pages=self._file_pages(),
            map_pages=self._map_pages,
        )
        return Budget.measure(txn, self._databases, self.geometry, state, size=size)

    def _size(self, txn: Transaction) -> CatalogSize:
        """Return the size for a write transaction.

        Pages are counted again when the file or the rows grew: it costs as much as a few records.
        """
        size, file_pages = self._last_size, self._file_pages()
        row_count = int(txn.stat(db=self._databases.records)["entries"])
        row_count += _MANIFEST_ROWS * int(txn.stat(db=self._databases.namespaces)["entries"])
        grown_count = abs(row_count - self._counted_rows)
        if size is None or size.file_pages != file_pages or grown_count > _UNCOUNTED_ROWS_MAX:
            live_pages = count_live_pages(txn, self._databases)
            size = self._last_size = CatalogSize(
                live_pages=live_pages, file_pages=file_pages, map_pages=self._map_pages
            )
            self._counted_rows = row_count
        return size

    def _file_pages(self) -> int:
        return self._env.used_bytes() // PAGE_BYTES


def _refuse(foreign: str) -> None:
    if foreign:
        raise BackendForeignError(foreign)


@contextmanager
def _numbers_in_range() -> Iterator[None]:
    """Take a number that no row has room for as damage of the one that it was read from."""
    try:
        yield
    except (struct.error, OverflowError) as error:
        raise CatalogDamagedError(f"a number is out of range ({error})") from error


def _verify_page_counts(txn: Transaction, databases: Databases, file_pages: int) -> None:
    # The library stores what each tree takes and believes it ever after, and so does every budget.
    live_pages = count_live_pages(txn, databases)
    if live_pages > file_pages + GROWTH_PAGES:
        raise CatalogDamagedError(f"rows take {live_pages} pages of a file of {file_pages}")


def _verify_rows(txn: Transaction, databases: Databases, geometry: SpaceGeometry) -> None:
    problems = check_catalog(txn, databases, geometry)
    if problems:
        raise CatalogDamagedError(problems[0])
