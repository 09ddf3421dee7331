"""The catalog of a secondary tier: records, their order of eviction, and the pages they hold.

One LMDB environment per path, shared by all processes. Synchronous and without threads: reads run
in the calling thread, writes in whichever thread opens a `transaction`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Self

from tierstore.backend.inventory import stored_segments
from tierstore.catalog.check import check_catalog, numbers_in_range
from tierstore.catalog.entry import Entry
from tierstore.catalog.garbage import Floors
from tierstore.catalog.index.cache import IndexCache
from tierstore.catalog.index.index import Index
from tierstore.catalog.owners import is_owner_dead
from tierstore.catalog.pages.budget import Budget, read_owners
from tierstore.catalog.pages.cluster_row import ClusterRow
from tierstore.catalog.pages.file_size import FileSize
from tierstore.catalog.pages.order import Spot
from tierstore.catalog.pages.segments import is_in_use
from tierstore.catalog.pages.space import Space
from tierstore.catalog.pages.state import LastWrite, read_state
from tierstore.catalog.records import Records
from tierstore.catalog.rows import StateRow, wide_key
from tierstore.catalog.transaction import CatalogTxn
from tierstore.config import SecondaryConfig
from tierstore.device.system import SystemCalls
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    CatalogDamagedError,
    CatalogError,
)
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.manifest import Manifest
from tierstore.tier_events import SecondaryStats
from tierstore.transfer import Place

__all__ = ["Catalog"]

_NO_PINS: Mapping[OffloadKey, int] = {}


class Catalog:
    """The records of one tier as this process, one owner of several, sees and changes them."""

    def __init__(self, config: SecondaryConfig, entry: Entry) -> None:
        """Take over what was opened; use `open`."""
        self.geometry = entry.geometry
        self.is_foreign = entry.is_foreign
        """Whether the path knew other identities alone when it was opened."""
        self._config = config
        self._env = entry.env
        self._databases = entry.databases
        self._owner_lock = entry.owner_lock
        self._size = FileSize(entry.env, entry.databases)
        self._active: int | None = None
        self._last: LastWrite | None = None
        self._cache = IndexCache()
        """Of all threads: it is known by checksums what a snapshot is to see."""

    @classmethod
    def open(
        cls,
        config: SecondaryConfig,
        manifest: Manifest,
        *,
        rank_count: int,
        system: SystemCalls | None = None,
        pace: VerifyPace = UNHURRIED,
    ) -> Self:
        """Open or create the catalog, compare the manifest, become an owner.

        `system` is what the configuration says unless it is given. Files are verified in steps of
        `pace`.

        Raises:
            ClosedError: see `VerifyPace.step`.
            CatalogError: it cannot be opened; the message says what to do.
            ManifestError: the namespace is stored with another manifest.
            ConfigError: the capacity is too small, or the path belongs to another kind of tier.
        """
        entry = Entry.make(config, manifest, rank_count=rank_count, system=system, pace=pace)
        return cls(config, entry)

    @property
    def owner(self) -> int:
        """The id under which this process holds its places."""
        return self._owner_lock.owner

    @property
    def damage(self) -> str:
        """Why the catalog was replaced by an empty one when it was opened; empty: it was not."""
        return self._env.findings.damage

    def is_lost(self) -> bool:
        """Return whether the path holds this catalog no longer, or us as its owner.

        It was removed, moved or unmounted. What comes there later is another tier's.
        """
        return self._env.is_lost() or not self._owner_lock.is_in_place()

    def segments(self) -> dict[int, int]:
        """List the segments below the path, for `release_unreferenced` in a later transaction.

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
            return frozenset(s for s in segments if is_in_use(txn, self._databases, s))

    def locate(
        self,
        keys: Sequence[OffloadKey],
        passing: Callable[[Iterable[bytes]], Iterable[bytes]] = iter,
    ) -> list[Place | None]:
        """Return the place of each recorded key; one read transaction.

        `passing` is given the keys and hears by what is taken from it how far this has come.

        Raises:
            BackendError: the catalog cannot be read.
            CatalogError: the index is damaged. A damaged cluster hides its own records alone.
        """
        clusters: dict[int, ClusterRow | None] = {}

        def row_of(cluster: int) -> ClusterRow | None:
            value = txn.get(wide_key(cluster), db=self._databases.clusters)
            try:
                clusters[cluster] = row = None if value is None else ClusterRow.unpack(value)
            except CatalogDamagedError as error:
                self._env.distrust(str(error))
                return None
            return row

        places: list[Place | None] = []
        with self._distrusting():
            with self._env.read() as txn:
                index = Index(txn, self._databases, self._cache)
                records = Records(index, Floors(txn, self._databases), row_of)
                spots = records.find(keys, passing)
            for cluster, run in groupby(spots, _cluster_of):
                row = None if cluster is None else clusters[cluster]
                if cluster is None or row is None:
                    places += [None] * len(list(run))
                else:
                    indices = [spot[1] for spot in run if spot is not None]
                    places += row.places(cluster, indices, self.geometry.header_pages)
        return places

    @contextmanager
    def transaction(self, pins: Mapping[OffloadKey, int] = _NO_PINS) -> Iterator[CatalogTxn]:
        """Run one write transaction, committed when the block ends without an exception.

        Records in `pins` are not evicted. What the block freed is stored with it, whoever asked for
        it (`CatalogTxn.freed`): pages that no row gives back would stay charged.

        Raises:
            BackendFullError: the device is full; nothing was changed.
            BackendError: the catalog failed; nothing was changed.
            CatalogError: a row is damaged; nothing was changed.
        """
        last, self._last = self._last, None
        with self._distrusting(), self._env.write() as txn:
            if last is not None and not last.is_last_before(txn):
                last = None
            space = Space(
                txn,
                self._databases,
                self.geometry,
                size=self._size,
                owner=self.owner,
                active=self._active,
                last=last,
            )
            work = CatalogTxn(
                txn, self._databases, self.geometry, space, pins=pins, cache=self._cache, last=last
            )
            yield work
            last = work.flush()
        self._last = last
        self._active = space.active
        self._size.note(space.budget)

    def is_outgrowing(self) -> bool:
        """Return whether only what is necessary may be written; see `FileSize.is_outgrowing`."""
        return self._size.is_outgrowing()

    @contextmanager
    def _distrusting(self) -> Iterator[None]:
        """Note damage that comes to light, so that the next opener that is alone starts empty."""
        try:
            with numbers_in_range():
                yield
        except (BackendCorruptError, CatalogDamagedError) as error:
            self._env.distrust(str(error))
            raise

    def is_owner_dead(self, owner: int) -> bool:
        """Return whether the process that had this owner id is gone."""
        return is_owner_dead(self._config.path / "owners", owner)

    def budget(self) -> Budget:
        """Return the limits as of now.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            return self._measure(txn, read_state(txn, self._databases))

    def stats(self) -> SecondaryStats:
        """Count records and bytes.

        Raises:
            BackendError: the catalog cannot be read.
        """
        with self._env.read() as txn:
            state = read_state(txn, self._databases)
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
        """Stop all data planes from writing for this owner: the catalog is lost."""
        self._owner_lock.remove()

    def close(self) -> None:
        """Close the environment and stop being an owner; idempotent."""
        self._owner_lock.close()
        self._env.close()

    def _measure(self, txn: Transaction, state: StateRow) -> Budget:
        size = self._size.count(txn)
        owners = read_owners(txn, self._databases)
        return Budget.measure(self.geometry, state, owners, size=size)


def _cluster_of(spot: Spot | None) -> int | None:
    return None if spot is None else spot[0]
