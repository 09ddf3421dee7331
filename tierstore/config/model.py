"""The configuration as the rest of tierstore sees it: frozen dataclasses, every size in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tierstore.config.fault_rule import FaultRule

__all__ = [
    "WRITE_QUEUE_BYTES_MAX",
    "BreakerConfig",
    "Cascade",
    "GpuConfig",
    "IntegrityConfig",
    "IoConfig",
    "IoMode",
    "OffloadConfig",
    "OnReset",
    "PrimaryConfig",
    "SecondaryConfig",
    "StoreConfig",
]

Cascade = Literal["write_through", "on_evict", "second_touch"]
"""The rules that are built in."""
IoMode = Literal["direct", "buffered", "mmap"]
OnReset = Literal["forget", "keep_disk"]

WRITE_QUEUE_BYTES_MAX = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimaryConfig:
    """The tier in host memory."""

    capacity_bytes: int
    """Host memory for chunks, per worker; rounded down to whole slots."""
    eviction: str = "arc"
    """`lru`, `arc`, or a plug-in."""
    eviction_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keyword arguments for a plug-in."""
    pinned: Literal["auto", "never"] = "auto"
    """`auto` pins the pool where CUDA is there, with a warning where pinning is refused."""
    huge_pages: bool = True
    """Ask the kernel for transparent huge pages (a hint, never an error)."""
    hugetlb: bool = False
    """Take reserved huge pages (`vm.nr_hugepages`); a warning where there are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a tier that fails is put out of use, and when it is tried again."""

    failures: int = 5
    """Operations in a row that fail until then; a hang is enough alone."""
    retry_after_seconds: float = 5.0
    """The first pause; it doubles with each trial that fails."""
    retry_after_max_seconds: float = 60.0
    hung_share: float = 0.25
    """The share of the primary tier that reads of the tier may hold while they hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig:
    """How one secondary tier talks to its device."""

    mode: IoMode = "direct"
    """Of the file backend; `direct` falls back to `buffered` where O_DIRECT is refused."""
    threads: int = 8
    deadline_seconds: float = 2.0
    """A load that takes longer fails and is recomputed."""
    write_queue_bytes: int = 256 << 20
    """Write-behind limit: demotes beyond it are dropped and counted."""
    durable: bool = False
    """Also flush payload to the device before a record becomes visible."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    faults: tuple[FaultRule, ...] = ()
    """For game days: what goes wrong on purpose; refused unless the environment allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityConfig:
    """How the records of one secondary tier are authenticated, and encrypted."""

    key_file: Path
    """See `key_file.read_key_file`; the keys themselves are no part of a configuration."""
    encrypt: bool = False
    """Encrypt payload, too: block hashes and the catalog stay readable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryConfig:
    """One tier below the memory."""

    name: str
    tier: str = "disk"
    """`disk`, or a plug-in: the half that knows which records there are."""
    backend: str
    """`file`, `lmdb`, or a plug-in; on disk, its records are placed and accounted as in `file`."""
    path: Path
    """The tier's directory; a plug-in tier is told it, and it is left to the plug-in."""
    capacity_bytes: int
    """Hard limit of all bytes below `path`: catalog, every rank and every engine included.

    A plug-in tier is told it.
    """
    cascade: str = "write_through"
    """A `Cascade`, or a plug-in."""
    eviction: Literal["lru"] = "lru"
    io: IoConfig = field(default_factory=IoConfig)
    integrity: IntegrityConfig | None = None
    """None: records have checksums, which find accidents only."""
    backend_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keyword arguments for a plug-in."""
    cascade_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keyword arguments for a plug-in."""
    tier_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keyword arguments for a plug-in."""

    @property
    def is_on_disk(self) -> bool:
        """Whether the tier is a directory of this machine, with a catalog."""
        return self.tier == "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """How chunks travel between GPU and host memory; None: measured at start."""

    kernel_below_bytes: int | None = None
    """Smaller runs are gathered by a kernel; 0: none are."""
    kernel_runs: int | None = None
    """Fewer small runs than this are not worth a kernel."""
    pitched_from_bytes: int | None = None
    """Equally spaced rows of at least this size become one 2-D copy."""
    kernel_sms: int = 4
    """Multiprocessors that the kernel occupies at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What an engine's connector offloads."""

    blocks_per_chunk: int = 1
    decode: bool = True
    """Offload blocks that generated tokens filled, not only those of the prompt."""
    on_reset: OnReset = "forget"
    """`forget` everything, on disk too; `keep_disk` is for weights that never change."""
    events: bool = False
    """Publish what comes to the tiers and leaves them as the engine's KV cache events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A whole configuration file."""

    version: Literal[1] = 1
    primary: PrimaryConfig
    secondary: tuple[SecondaryConfig, ...] = ()
    """In the order in which they are asked."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
