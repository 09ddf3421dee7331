"""What the calls of an embedded store answer."""

from dataclasses import dataclass

from tierstore.tier_events import SecondaryStats

__all__ = ["PrefixMatch", "StoreStats"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prefix can be loaded now."""

    chunk_count: int
    """So many leading keys would `get` answer True for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds and what it did since it was opened."""

    primary_chunk_count: int
    primary_capacity_bytes: int
    secondary: dict[str, SecondaryStats]
    """By the tier's name."""
    counters: dict[str, float]
    """By the metric's name and label, as in `metrics.Metric`."""
    why_interpreted: str = ""
    """Why the interpreter moves the payload of all tiers, in words; empty: the native library does,
    except for keyed records and mapped files, and where system calls are injected."""
