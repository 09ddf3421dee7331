"""A catalog with many records: lookups, opening, and what a record costs. No payload is written."""

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

from tierstore.config import SecondaryConfig
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import Manifest
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.opening import open_tiers
from tierstore.tier_events import Committed, Placed, Refused

__all__ = ["measure_catalog"]

BATCH = 4096
RUN_KEYS = 8192
PATIENCE_SECONDS = 60.0
MANIFEST = Manifest.simple("bench", PAGE_BYTES)


def measure_catalog(
    directory: Path, record_count: int, sizes: list[int], run_count: int
) -> dict[str, Any]:
    """Fill a catalog and measure it, opened again; its pages stay in the kernel's cache."""
    config = SecondaryConfig(
        name="bench",
        backend="file",
        path=directory,
        capacity_bytes=2 * record_count * PAGE_BYTES + (64 << 20),
    )
    start = time.perf_counter()
    keys = _fill(config, record_count)
    fill_seconds = time.perf_counter() - start
    opens = [_open_ms(config, keys[:256]) for _ in range(run_count)]
    unsealed = []
    for _ in range(run_count):
        # As after a kill: the structure is verified page by page.
        (directory / "catalog" / "seal.bin").unlink()
        unsealed.append(_open_ms(config, keys[:256]))
    tracemalloc.start()
    tier = _open(config)
    tier.locate(keys)
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    lookups: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        row = lookups[str(size)] = {"locate, hit": [], "locate, miss": []}
        for _ in range(run_count):
            row["locate, hit"].append(_lookup_us(tier, keys, size))
            row["locate, miss"].append(_lookup_us(tier, _new_keys(RUN_KEYS), size))
    tier.close()
    catalog_bytes = sum(
        path.stat().st_blocks * 512 for path in (directory / "catalog").rglob("*") if path.is_file()
    )
    return {
        "records": record_count,
        "open_and_first_lookup_ms": opens,
        "open_and_first_lookup_after_kill_ms": unsealed,
        "locate_us_per_key": lookups,
        "catalog_bytes_per_record": catalog_bytes / record_count,
        "python_bytes_per_record": traced / record_count,
        "fill_us_per_record": fill_seconds / record_count * 1e6,
    }


def _open(config: SecondaryConfig) -> DiskTier:
    return open_tiers([DiskTier(config, MANIFEST, tier_idx=0, rank_count=1)])[0]


def _new_keys(count: int) -> list[OffloadKey]:
    return make_offload_keys(MANIFEST.namespace, 0, [os.urandom(32) for _ in range(count)])


def _fill(config: SecondaryConfig, record_count: int) -> list[OffloadKey]:
    """Record so many chunks; return some keys, of all ages."""
    sample: list[OffloadKey] = []
    batches = -(-record_count // BATCH)
    step = max(1, batches * BATCH // RUN_KEYS)
    tier = _open(config)
    try:
        for ticket in range(1, batches + 1):
            keys = _new_keys(BATCH)
            sample += keys[::step]
            tier.request_places(ticket, keys, PAGE_BYTES)
            while not _is_committed(tier, ticket):
                tier.wait(PATIENCE_SECONDS)
    finally:
        tier.close()
    return sample[:RUN_KEYS]


def _is_committed(tier: DiskTier, ticket: int) -> bool:
    for event in tier.poll():
        if isinstance(event, Placed):
            tier.commit(ticket)
        if isinstance(event, Committed):
            return True
        reason = event.reason if isinstance(event, Refused) else None
        if reason:
            raise RuntimeError(f"no place for records: {reason}")
    return False


def _open_ms(config: SecondaryConfig, keys: list[OffloadKey]) -> float:
    start = time.perf_counter()
    tier = _open(config)
    places = tier.locate(keys)
    elapsed = time.perf_counter() - start
    tier.close()
    if None in places:
        raise RuntimeError("a record is not found any more")
    return elapsed * 1e3


def _lookup_us(tier: DiskTier, keys: list[OffloadKey], size: int) -> float:
    requests = [keys[first : first + size] for first in range(0, len(keys), size)]
    start = time.perf_counter()
    for request in requests:
        tier.locate(request)
    return (time.perf_counter() - start) / len(keys) * 1e6
