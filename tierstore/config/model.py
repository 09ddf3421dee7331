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
    """`auto` pins the pool if CUDA is available, and warns if pinning is refused."""
    huge_pages: bool = True
    """Ask the kernel for transparent huge pages (a hint, never an error)."""
    hugetlb: bool = False
    """Use reserved huge pages (`vm.nr_hugepages`); warn if too few are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a failing tier is put out of use, and when it is tried again."""

    failures: int = 5
    """Consecutive failed operations that put the tier out of use; one hang also does."""
    retry_after_seconds: float = 5.0
    """The first pause; it doubles with each trial that fails."""
    retry_after_max_seconds: float = 60.0
    hung_share: float = 0.25
    """The share of the primary tier that hung reads of this tier may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoConfig:
    """How one secondary tier uses its device."""

    mode: IoMode = "direct"
    """For the file backend; `direct` falls back to `buffered` where O_DIRECT is refused."""
    threads: int = 8
    deadline_seconds: float = 2.0
    """A read without progress for so long fails; its chunks are loaded elsewhere or recomputed."""
    write_queue_bytes: int = 256 << 20
    """Write-behind limit: demotes beyond it are dropped and counted."""
    durable: bool = False
    """Also flush payload to the device before a record becomes visible."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    faults: tuple[FaultRule, ...] = ()
    """Fault injection for game days; refused unless the environment allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityConfig:
    """How the records of one secondary tier are authenticated, and encrypted."""

    key_file: Path
    """See `key_file.read_key_file`; a configuration never contains the keys themselves."""
    encrypt: bool = False
    """Also encrypt payload; block hashes and the catalog stay readable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryConfig:
    """One tier below the memory."""

    name: str
    tier: str = "disk"
    """`disk`, or a plug-in: the half that knows which records there are."""
    backend: str
    """`file`, `lmdb`, or a plug-in; on disk, its records are placed and counted like those of
    `file`."""
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
    """None: records have checksums, which detect accidents only."""
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
    """Smaller runs are gathered by a kernel; 0 turns it off."""
    kernel_runs: int | None = None
    """The least number of small runs for which the kernel is launched."""
    pitched_from_bytes: int | None = None
    """Equally spaced rows of at least this size become one 2-D copy."""
    kernel_sms: int = 4
    """The most multiprocessors of the GPU that the kernel may occupy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """What an engine's connector offloads."""

    blocks_per_chunk: int = 1
    decode: bool = True
    """Also offload blocks filled by generated tokens, not only those of the prompt."""
    on_reset: OnReset = "forget"
    """`forget` everything, also on disk; `keep_disk` is for weights that never change."""
    events: bool = False
    """Publish stored and removed blocks of all tiers as the engine's KV cache events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A whole configuration file."""

    version: Literal[1] = 1
    primary: PrimaryConfig
    secondary: tuple[SecondaryConfig, ...] = ()
    """In the order in which they are asked for a chunk."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
