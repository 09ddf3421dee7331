"""Opening the control half of all configured tiers, or none of them."""

from collections.abc import Sequence

from tierstore.clock import Clock, MonotonicClock
from tierstore.config import StoreConfig
from tierstore.faults import SystemOpener, open_system
from tierstore.layout import GroupKind, GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters, Metric
from tierstore.tier.cascade import Cascade
from tierstore.tier.catalog import Catalog
from tierstore.tier.health import TierHealth
from tierstore.tier.primary import PrimaryTier
from tierstore.tier.residency import ResidencyLog
from tierstore.tier.secondary import SecondaryTier
from tierstore.tier.stack import TierStack

__all__ = ["check_tiers", "open_stack"]


def open_stack(
    config: StoreConfig,
    manifest: Manifest,
    *,
    rank_count: int,
    counters: Counters,
    residency: ResidencyLog | None = None,
    clock: Clock | None = None,
    open_system: SystemOpener = open_system,
) -> TierStack:
    """Open the control half of all configured tiers; `residency` is told what comes and goes.

    `clock` measures for how long a record that failed is not offered; tests give their own, and an
    `open_system` that lets a device fail.

    Raises:
        ConfigError: a capacity is too small.
        CatalogError, ManifestError: a secondary tier cannot be opened; none stays open.
    """
    groups = manifest.group_specs()
    primary = _primary(config, groups)
    secondaries: list[SecondaryTier] = []
    try:
        for tier_idx, tier in enumerate(config.secondary):
            secondaries.append(
                SecondaryTier.open(
                    tier,
                    manifest,
                    tier_idx=tier_idx,
                    rank_count=rank_count,
                    system=open_system(tier),
                )
            )
            _count_opening(secondaries[-1], tier.name, counters)
    except BaseException:
        for secondary in secondaries:
            secondary.close()
        raise
    # Write-behind pins chunks: half of the primary tier always stays free for the engine. One
    # chunk at least, or none would ever be written.
    share_bytes = config.primary.capacity_bytes // (2 * max(1, len(config.secondary)))
    chunk_bytes = max((group.chunk_bytes for group in groups), default=0)
    clock = clock or MonotonicClock()
    cascades = [
        Cascade(
            tier_idx=tier_idx,
            config=tier,
            groups=groups,
            primary=primary,
            secondary=secondary,
            health=TierHealth(secondary, tier.name, tier.io, clock, counters),
            counters=counters,
            queue_bytes_max=max(chunk_bytes, min(tier.io.write_queue_bytes, share_bytes)),
            residency=residency,
        )
        for tier_idx, (tier, secondary) in enumerate(
            zip(config.secondary, secondaries, strict=True)
        )
    ]
    return TierStack(
        groups,
        primary,
        secondaries,
        cascades,
        counters,
        hung_bytes_max=_hung_bytes_max(config),
        clock=clock,
        residency=residency,
    )


def check_tiers(config: StoreConfig, manifest: Manifest, *, rank_count: int) -> None:
    """Raise what `open_stack` would raise, for a process that does not need the tiers itself.

    Creates the directories of secondary tiers, as `open_stack` does; leaves nothing open.

    Raises:
        ConfigError: a capacity is too small, or a path belongs to another kind of tier.
        CatalogError, ManifestError: a secondary tier cannot be opened.
    """
    _primary(config, manifest.group_specs())
    for tier in config.secondary:
        Catalog.open(tier, manifest, rank_count=rank_count).close()


def _count_opening(tier: SecondaryTier, name: str, counters: Counters) -> None:
    if tier.damage:
        counters.add(Metric.DISCARDED_CATALOGS, label=name)
    if tier.is_foreign:
        counters.add(Metric.COLD_STARTS, label=name)


def _hung_bytes_max(config: StoreConfig) -> list[int]:
    """Return by tier what its reads may hold of the primary tier while they hang."""
    capacity_bytes = config.primary.capacity_bytes
    return [int(capacity_bytes * tier.io.breaker.hung_share) for tier in config.secondary]


def _primary(config: StoreConfig, groups: Sequence[GroupSpec]) -> PrimaryTier:
    slot_bytes = [0 if group.kind is GroupKind.UNCACHED else group.slot_bytes for group in groups]
    return PrimaryTier(config.primary, slot_bytes)
