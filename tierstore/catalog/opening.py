"""What is compared when a catalog is opened, version, kind and identity, and what is entered."""

import logging
import secrets

from xxhash import xxh3_64_intdigest

from tierstore.bounded_log import bounded
from tierstore.catalog.check import verify_sums
from tierstore.catalog.owners import OwnerLock, is_owner_dead, remove_dead
from tierstore.catalog.pages.budget import read_owners
from tierstore.catalog.pages.state import find_state, read_version
from tierstore.catalog.pages.unreferenced import release_unreferenced
from tierstore.catalog.rows import (
    CATALOG_VERSION,
    Databases,
    OwnerRow,
    SegmentRow,
    StateRow,
    segment_key,
)
from tierstore.config import SecondaryConfig
from tierstore.device.block_units import PAGE_UNITS, BlockUnits
from tierstore.errors import (
    CatalogDamagedError,
    CatalogError,
    ConfigError,
    ManifestError,
)
from tierstore.lmdb_env.library import Transaction
from tierstore.lmdb_env.seal import SealFindings
from tierstore.manifest import Manifest, namespace_of

__all__ = [
    "charged_segments",
    "enter_manifest",
    "enter_owner",
    "enter_state",
    "enter_units",
    "find_own_state",
    "merge_units",
    "must_verify",
    "require_ours",
    "require_version",
]

_logger = bounded(logging.getLogger(__name__))

_BACKENDS = ("file", "lmdb")
_PLUG_IN_MIN = 1 << 63
"""Numbers of backends that are plug-ins, from here on."""
_FIRST_NUMBER_MAX = 1 << 30
"""Segments and owners have 31 bits: half of them are left to count on."""
_FIRST_ID_MAX = 1 << 48
_VERSION_END = 1 << 6
"""No release writes such a version: one that is read is damage."""
_RANK_COUNT_END = 1 << 16
_UNITS_KEY = b"units"


def require_version(
    txn: Transaction, databases: Databases, config: SecondaryConfig, *, is_suspect: bool
) -> None:
    """Refuse the rows of another version, whatever they say.

    Raises:
        CatalogError: they are of another version.
        CatalogDamagedError: so it seems, in a file that `is_suspect`, or it cannot be.
    """
    version = read_version(txn, databases)
    if version is not None:
        _require_version(version, config, is_suspect=is_suspect)


def require_ours(value: bytes, config: SecondaryConfig, rank_count: int) -> None:
    """Refuse a state row of another version, or of another kind of tier, in a file without a seal.

    Raises:
        CatalogError: it is of another version.
        CatalogDamagedError: it is damaged.
        ConfigError: the path belongs to another kind of tier.
    """
    _require_version(StateRow.read_version(value), config, is_suspect=False)
    _require_kind(config, StateRow.unpack(value), rank_count, is_suspect=False)


def _require_version(version: int, config: SecondaryConfig, *, is_suspect: bool) -> None:
    if version != CATALOG_VERSION:
        if is_suspect or not 0 < version < _VERSION_END:
            raise CatalogDamagedError(f"the rows are of version {version}")
        raise CatalogError(
            f"{_where(config)} has a catalog of version {version}, this release writes version "
            f"{CATALOG_VERSION}; remove the directory, it is rebuilt from nothing, or choose "
            "another path"
        )


def must_verify(txn: Transaction, databases: Databases, findings: SealFindings) -> bool:
    """Return whether the rows must be verified: there are some, and no seal that fits.

    A power cut may mix older pages into them. Pages carry no mark of their age: a tree may be
    whole, and say what was never true. An opener that is not alone relies on the first one, which
    let no other in before it was done.
    """
    if findings.is_proven or not findings.is_alone:
        return False
    return any(txn.stat(db=database)["entries"] for database in databases.all())


def merge_units(
    txn: Transaction, databases: Databases, measured: BlockUnits, *, is_certain: bool
) -> BlockUnits:
    """Return the units by which the path is accounted: ours, or larger ones from before.

    Another file system may lie below a path that was copied or mounted again. What was measured
    with too little room counts only for a path on which nothing is accounted yet.

    Raises:
        CatalogDamagedError: what is there is accounted by smaller ones; or the row is damaged.
    """
    stored = _stored_units(txn, databases)
    units = stored.merged(measured)
    if units == stored or not txn.stat(db=databases.segments)["entries"]:
        return units
    if not is_certain:
        return stored
    raise CatalogDamagedError(
        "what it holds is accounted by smaller pieces than the file system below it gives out "
        f"and takes back now: {units}, not {stored}"
    )


def enter_units(
    txn: Transaction, databases: Databases, measured: BlockUnits, *, is_certain: bool
) -> BlockUnits:
    """Enter and return the units by which the path is accounted: see `merge_units`.

    Raises:
        CatalogDamagedError: as `merge_units`.
    """
    units = merge_units(txn, databases, measured, is_certain=is_certain)
    if units != _stored_units(txn, databases):
        txn.put(_UNITS_KEY, units.pack(), db=databases.state)
    return units


def _stored_units(txn: Transaction, databases: Databases) -> BlockUnits:
    value = txn.get(_UNITS_KEY, db=databases.state)
    stored = PAGE_UNITS if value is None else BlockUnits.unpack(value)
    if stored is None:
        raise CatalogDamagedError("the units of the file system are damaged")
    return stored


def find_own_state(
    txn: Transaction,
    databases: Databases,
    config: SecondaryConfig,
    rank_count: int,
    *,
    is_suspect: bool,
) -> StateRow | None:
    """Return the state, compared with its segments and with ours; None: the catalog is new.

    Raises:
        CatalogDamagedError: rows contradict each other; or, in a file that `is_suspect`, us.
        ConfigError: the path belongs to another kind of tier.
    """
    state = find_state(txn, databases)
    if state is not None:
        verify_sums(txn, databases, state)
        _require_kind(config, state, rank_count, is_suspect=is_suspect)
    return state


def enter_state(
    txn: Transaction,
    databases: Databases,
    config: SecondaryConfig,
    rank_count: int,
    segments: dict[int, int],
    *,
    is_suspect: bool,
) -> StateRow:
    """Return the state, compared with ours, with all `segments` that lie below the path charged.

    O(segments).

    Raises:
        CatalogDamagedError, ConfigError: as `find_own_state`.
    """
    state = find_own_state(txn, databases, config, rank_count, is_suspect=is_suspect)
    if state is None:
        state = _first_state(_backend_number(config.backend), rank_count)
        release_unreferenced(txn, databases, state, segments)
        return state
    release_unreferenced(txn, databases, state, segments)
    return state


def _backend_number(name: str) -> int:
    """Return what tells a backend from others in the rows; of a plug-in, a digest of its name."""
    if name in _BACKENDS:
        return _BACKENDS.index(name)
    return xxh3_64_intdigest(name.encode()) | _PLUG_IN_MIN


def _require_kind(
    config: SecondaryConfig, state: StateRow, rank_count: int, *, is_suspect: bool
) -> None:
    backend = _backend_number(config.backend)
    if len(_BACKENDS) <= state.backend < _PLUG_IN_MIN or not 0 < state.rank_count < _RANK_COUNT_END:
        raise CatalogDamagedError("its kind of tier is unknown")
    is_ours = state.backend == backend
    is_ours &= config.backend != "lmdb" or state.rank_count == rank_count
    if is_suspect and not is_ours:
        raise CatalogDamagedError("it seems to be of another kind of tier")
    if state.backend != backend:
        raise ConfigError(
            f"{_where(config)} holds a tier with another backend than {config.backend!r}; "
            "choose another path, or remove the directory"
        )
    if config.backend == "lmdb" and state.rank_count != rank_count:
        raise ConfigError(
            f"{_where(config)} was divided among {state.rank_count} ranks, not {rank_count}, which "
            "an lmdb tier cannot change; choose another path, or remove the directory"
        )


def charged_segments(txn: Transaction, databases: Databases) -> dict[int, tuple[int, int]]:
    """Return pages and ranks of each segment: what its files may take."""
    with txn.cursor(db=databases.segments) as cursor:
        rows = {int.from_bytes(key, "big"): SegmentRow.unpack(value) for key, value in cursor}
    return {segment: (row.page_count, row.rank_count) for segment, row in rows.items()}


def _first_state(backend: int, rank_count: int) -> StateRow:
    """Return the state of a new catalog.

    Its numbers begin at random, not at 1: those of a catalog that was removed while it was in use
    must not come again, since its owners and their ranks may still act on them.
    """
    return StateRow(
        CATALOG_VERSION,
        backend,
        rank_count,
        next_segment=1 + secrets.randbelow(_FIRST_NUMBER_MAX),
        next_pending=1 + secrets.randbelow(_FIRST_ID_MAX),
        next_owner=1 + secrets.randbelow(_FIRST_NUMBER_MAX),
    )


def enter_manifest(
    txn: Transaction, databases: Databases, config: SecondaryConfig, manifest: Manifest
) -> bool:
    """Enter or compare our manifest; return whether the path held those of others alone.

    Raises:
        CatalogDamagedError: a manifest is stored under a namespace that is not its own.
        ManifestError: the namespace is stored with another manifest.
    """
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
            f"{_where(config)} holds another manifest under the same namespace: {difference}; "
            "choose another path, or remove the directory"
        )
    return False


def enter_owner(
    txn: Transaction,
    databases: Databases,
    config: SecondaryConfig,
    manifest: Manifest,
    state: StateRow,
) -> OwnerLock:
    """Become an owner: a locked file, and a row with the capacity that it was promised.

    Raises:
        CatalogError: the file cannot be made or locked.
        ConfigError: an lmdb tier is open with another capacity.
    """
    directory = config.path / "owners"
    remove_dead(directory)
    # Of several capacities the smallest living one holds (`Budget`). With the first or the last
    # opener's, another one would find more on disk than it was promised.
    for owner, row in read_owners(txn, databases).items():
        if row.capacity_bytes == config.capacity_bytes or is_owner_dead(directory, owner):
            continue
        if config.backend == "lmdb":
            raise ConfigError(
                f"{_where(config)} is open with a capacity of {row.capacity_bytes} bytes, not "
                f"{config.capacity_bytes}, which an lmdb tier cannot share; give all stores on one "
                "path the same capacity"
            )
        _logger.warning(
            "stores on one path have different capacities, the smallest counts as long as it is "
            "open: secondary=%s ours=%d another=%d",
            config.name,
            config.capacity_bytes,
            row.capacity_bytes,
        )
        break
    lock = OwnerLock.create(directory, state.next_owner)
    try:
        row = OwnerRow(manifest.namespace, config.capacity_bytes)
        txn.put(segment_key(lock.owner), row.pack(), db=databases.owners)
    except BaseException:
        lock.close()  # or the next try would find its number locked, by us
        raise
    state.next_owner += 1
    return lock


def _where(config: SecondaryConfig) -> str:
    return f"secondary {config.name!r}: path {config.path}"
