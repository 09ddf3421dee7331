"""Opens the control half of all configured tiers, as far as their devices allow it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar, cast

from tierstore.catalog.catalog import Catalog
from tierstore.clock import Clock, MonotonicClock
from tierstore.config import SecondaryConfig, StoreConfig
from tierstore.config.plug_ins import PlugInGroup, load_plug_in, require_members
from tierstore.errors import ConfigError, TierStoreError
from tierstore.faults import SystemOpener, open_system
from tierstore.layout import GroupKind, GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters, Metric
from tierstore.quoting import named, quoted
from tierstore.tier.admission import make_admission
from tierstore.tier.cascade import Cascade
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.health.tier_health import TierHealth
from tierstore.tier.memory.primary import PrimaryTier
from tierstore.tier.movement_log import MovementLog
from tierstore.tier.readable_records import ReadableRecords
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.stack import TierStack
from tierstore.tier.write_behind.demotes import Demotes

__all__ = ["TierMaker", "check_tiers", "open_stack", "open_tiers"]

AnyTier = TypeVar("AnyTier", bound=SecondaryTier)

_OPEN_SECONDS_MAX = 10.0
"""How long to wait for devices; after that, tiers are opened in the background."""
_CHECK_CLOSE_SECONDS = 5.0
"""For a tier that is closed again at once."""


class TierMaker(Protocol):
    """A function that makes the control half of a tier; the data half is a `BackendOpener`'s.

    A plug-in of `tierstore.tiers` is one, which takes its `tier_options`, too.
    """

    def __call__(
        self, config: SecondaryConfig, manifest: Manifest, *, tier_idx: int, rank_count: int
    ) -> SecondaryTier:
        """Return a tier that is not open yet.

        Raises:
            ConfigError, MissingExtraError: the configuration cannot work.
        """


def open_stack(
    config: StoreConfig,
    manifest: Manifest,
    *,
    rank_count: int,
    counters: Counters,
    movements: MovementLog | None = None,
    clock: Clock | None = None,
    open_system: SystemOpener = open_system,
    lookup_seconds_max: float | None = None,
    make_tier: TierMaker | None = None,
) -> TierStack:
    """Open the control half of all configured tiers; `movements` logs what enters and leaves them.

    A tier whose device fails, hangs or is held by a stopped process (`tier.disk.outage`) is opened
    as soon as possible (`SecondaryTier.is_open`); the others are used meanwhile.

    `lookup_seconds_max` bounds how long a lookup of places may hang (None: as long as a read).
    `clock` measures how long a record stays hidden after a failed read. Tests pass their own clock,
    and an `open_system` that makes a device fail. `make_tier` makes the tiers (None: as each
    one's `tier` says).

    Raises:
        ConfigError, MissingExtraError: a capacity is too small, or a key file or a plug-in cannot
            be used.
        CatalogError, ManifestError, BackendError: the user has to change something about a
            secondary tier; none stays open.
    """
    groups = manifest.group_specs()
    primary = _primary(config, groups)
    if make_tier is None:
        make_tier = _configured(_disk_maker(counters, open_system, lookup_seconds_max))
    secondaries = [
        make_tier(tier, manifest, tier_idx=tier_idx, rank_count=rank_count)
        for tier_idx, tier in enumerate(config.secondary)
    ]
    open_tiers(secondaries)
    clock = clock or MonotonicClock()
    with _closed_on_error(secondaries):
        cascades = _cascades(
            config,
            groups,
            primary,
            secondaries,
            counters=counters,
            clock=clock,
            movements=movements,
        )
        _connect(secondaries, cascades)
        return TierStack(
            groups,
            primary,
            secondaries,
            cascades,
            _records(config, secondaries, cascades, counters, clock),
            counters=counters,
            clock=clock,
            movements=movements,
        )


def _configured(make_disk: TierMaker) -> TierMaker:
    """Return what makes each tier as its configuration says; `make_disk` those on disk."""

    def make(
        config: SecondaryConfig, manifest: Manifest, *, tier_idx: int, rank_count: int
    ) -> SecondaryTier:
        maker = make_disk if config.is_on_disk else _make_plug_in
        return maker(config, manifest, tier_idx=tier_idx, rank_count=rank_count)

    return make


def _make_plug_in(
    config: SecondaryConfig, manifest: Manifest, *, tier_idx: int, rank_count: int
) -> SecondaryTier:
    make = load_plug_in(PlugInGroup.TIERS, config.tier)
    what = f"secondary[{tier_idx}].tier: {quoted(config.tier)}"
    try:
        tier = make(
            config, manifest, tier_idx=tier_idx, rank_count=rank_count, **config.tier_options
        )
    except TierStoreError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: the plug-in makes no tier: {named(error)}; see "
            f"secondary[{tier_idx}].tier_options"
        ) from error
    require_members(tier, SecondaryTier, what)
    return cast("SecondaryTier", tier)


def _disk_maker(
    counters: Counters, open_system: SystemOpener, lookup_seconds_max: float | None
) -> TierMaker:
    def make(
        config: SecondaryConfig, manifest: Manifest, *, tier_idx: int, rank_count: int
    ) -> SecondaryTier:
        return DiskTier(
            config,
            manifest,
            tier_idx=tier_idx,
            rank_count=rank_count,
            system=open_system(config),
            lookup_seconds_max=lookup_seconds_max,
            on_opened=partial(_count_opening, counters, config.name),
        )

    return make


def _cascades(
    config: StoreConfig,
    groups: Sequence[GroupSpec],
    primary: PrimaryTier,
    secondaries: Sequence[SecondaryTier],
    *,
    counters: Counters,
    clock: Clock,
    movements: MovementLog | None,
) -> list[Cascade]:
    # Write-behind pins at most half of the primary tier, so that there is room to offload; the
    # configured queue alone could pin all of a small tier. The queue takes at least one chunk, or
    # nothing would ever be written.
    share_bytes = config.primary.capacity_bytes // (2 * max(1, len(config.secondary)))
    queue_bytes_min = max((group.chunk_bytes for group in groups), default=0)
    cascades: list[Cascade] = []
    for tier_idx, (tier, secondary) in enumerate(zip(config.secondary, secondaries, strict=True)):
        admission = make_admission(tier.cascade, tier.cascade_options)
        health = TierHealth(secondary, tier.name, tier.io, clock, counters)
        demotes = Demotes(
            tier_idx=tier_idx,
            name=tier.name,
            admission=admission,
            groups=groups,
            primary=primary,
            secondary=secondary,
            health=health,
            counters=counters,
            queue_bytes_max=max(queue_bytes_min, min(tier.io.write_queue_bytes, share_bytes)),
            movements=movements,
        )
        cascades.append(
            Cascade(
                name=tier.name,
                admission=admission,
                demotes=demotes,
                primary=primary,
                secondary=secondary,
                health=health,
                counters=counters,
                movements=movements,
            )
        )
    return cascades


def check_tiers(config: StoreConfig, manifest: Manifest, *, rank_count: int) -> None:
    """Raise what `open_stack` would raise, for a process that does not need the tiers itself.

    Creates the directories of secondary tiers, as `open_stack` does. Leaves nothing open, except a
    tier whose device hangs.

    Raises:
        ConfigError: a capacity is too small, a key file or a plug-in cannot be used, or a path
            belongs to another kind of tier.
        MissingExtraError: a tier wants keyed records, and `cryptography` is not installed.
        CatalogError, ManifestError, BackendError: the user has to change something about a
            secondary tier.
    """
    _primary(config, manifest.group_specs())
    for tier in config.secondary:
        make_admission(tier.cascade, tier.cascade_options)
    make_tier = _configured(DiskTier)
    tiers = [
        make_tier(tier, manifest, tier_idx=tier_idx, rank_count=rank_count)
        for tier_idx, tier in enumerate(config.secondary)
    ]
    for opened in open_tiers(tiers):
        opened.close(_CHECK_CLOSE_SECONDS)


def open_tiers(tiers: Sequence[AnyTier]) -> Sequence[AnyTier]:
    """Open all tiers or none, concurrently: several that hang take no longer than one.

    A tier whose device fails or does not answer in time is opened in the background
    (`SecondaryTier.is_open`).

    Raises:
        CatalogError, ManifestError, ConfigError, BackendError: what the user has to change
            (`disk.outage`); the message says how.
    """
    until = time.monotonic() + _OPEN_SECONDS_MAX
    with _closed_on_error(tiers):
        for tier in tiers:
            tier.begin()
        for tier in tiers:
            tier.wait_open(until - time.monotonic())
    return tiers


@contextmanager
def _closed_on_error(tiers: Sequence[SecondaryTier]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for tier in tiers:
            tier.close(_CHECK_CLOSE_SECONDS)
        raise


def _connect(secondaries: Sequence[SecondaryTier], cascades: Sequence[Cascade]) -> None:
    for secondary, cascade in zip(secondaries, cascades, strict=True):
        secondary.tell_of_loss(cascade.on_catalog_lost)


def _count_opening(counters: Counters, name: str, catalog: Catalog) -> None:
    if catalog.damage:
        counters.add(Metric.DISCARDED_CATALOGS, label=name)
    if catalog.is_foreign:
        counters.add(Metric.COLD_STARTS, label=name)


def _records(
    config: StoreConfig,
    secondaries: Sequence[SecondaryTier],
    cascades: Sequence[Cascade],
    counters: Counters,
    clock: Clock,
) -> list[ReadableRecords]:
    """Return the readable records of each tier, with the bound of what its hung reads may hold."""
    return [
        ReadableRecords(
            secondary,
            cascade.health,
            clock,
            counters,
            hung_bytes_max=int(config.primary.capacity_bytes * tier.io.breaker.hung_share),
            on_removed=cascade.on_erased,
        )
        for tier, secondary, cascade in zip(config.secondary, secondaries, cascades, strict=True)
    ]


def _primary(config: StoreConfig, groups: Sequence[GroupSpec]) -> PrimaryTier:
    slot_bytes = [0 if group.kind is GroupKind.UNCACHED else group.slot_bytes for group in groups]
    return PrimaryTier(config.primary, slot_bytes)
