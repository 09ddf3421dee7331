"""The sections of a configuration as pydantic models: the keys that people write.

Defaults repeat those of `model`; a test holds the two together.
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from tierstore.config.fault_rule import FaultKind, FaultRule
from tierstore.config.model import (
    WRITE_QUEUE_BYTES_MAX,
    BreakerConfig,
    GpuConfig,
    IntegrityConfig,
    IoConfig,
    OffloadConfig,
    PrimaryConfig,
    SecondaryConfig,
    StoreConfig,
)
from tierstore.config.values import (
    AdmissionName,
    BackendName,
    Duration,
    KeyPathText,
    Options,
    PathText,
    PolicyName,
    PositiveSize,
    Size,
    TierName,
    VersionNumber,
)

__all__ = [
    "BreakerSection",
    "Document",
    "FaultSection",
    "GpuSection",
    "IntegritySection",
    "IoSection",
    "OffloadSection",
    "PrimarySection",
    "SecondarySection",
]


def _integrity_mapping(raw: object) -> object:
    """Refuse `integrity:` without keys, which would silently mean nothing; quote nothing."""
    if not isinstance(raw, Mapping | IntegritySection):
        raise ValueError("expected a mapping with key_file")  # noqa: TRY004 - as above
    return raw


def _leave_out_none(schema: dict[str, Any]) -> None:
    """Describe a section that may be left out, but not be written as null."""
    del schema["default"]
    (section, _) = schema.pop("anyOf")
    schema.update(section)


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class PrimarySection(_Section):
    """The tier in host memory."""

    capacity: PositiveSize = Field(le=64 << 40)
    """Host memory for chunks, per worker process; rounded down to whole slots."""
    eviction: PolicyName = "arc"
    """Which chunk leaves first."""
    eviction_options: Options = Field(default={})
    """What a plug-in that `eviction` names is given, by the names of its arguments."""
    pinned: Literal["auto", "never"] = "auto"
    """`auto` pins the memory where CUDA is there; `never` leaves it pageable."""
    huge_pages: bool = True
    """Ask the kernel for transparent huge pages (a hint, never an error)."""
    hugetlb: bool = False
    """Take reserved huge pages (`vm.nr_hugepages`); a warning where there are too few."""

    def build(self) -> PrimaryConfig:
        """Return the section as the rest of tierstore sees it."""
        return PrimaryConfig(
            capacity_bytes=self.capacity,
            eviction=self.eviction,
            eviction_options=self.eviction_options,
            pinned=self.pinned,
            huge_pages=self.huge_pages,
            hugetlb=self.hugetlb,
        )


class BreakerSection(_Section):
    """When a tier that fails is put out of use, and when it is tried again."""

    failures: int = Field(default=5, ge=1, le=1000)
    """Operations in a row that fail until the tier is put out of use; a hang does so at once."""
    retry_after: Duration = Field(
        default=5.0, ge=0.01, le=3600, json_schema_extra={"default": "5s"}
    )
    """How long it stays so until a trial; twice as long after each trial that fails."""
    retry_after_max: Duration = Field(
        default=60.0, ge=0.01, le=3600, json_schema_extra={"default": "60s"}
    )
    """The longest such pause."""
    hung_share: float = Field(default=0.25, gt=0, le=1)
    """The share of `primary.capacity` that reads of this tier may hold while they hang."""

    def build(self) -> BreakerConfig:
        """Return the section as the rest of tierstore sees it."""
        return BreakerConfig(
            failures=self.failures,
            retry_after_seconds=self.retry_after,
            retry_after_max_seconds=self.retry_after_max,
            hung_share=self.hung_share,
        )


class FaultSection(_Section):
    """What goes wrong on purpose with calls to a tier's device; only for game days."""

    kind: FaultKind
    """What happens to a call that the rule strikes."""
    error: str = "EIO"
    """The name of the errno with which it fails."""
    calls: list[str] = Field(default=["*"], min_length=1, max_length=32)
    """Patterns of the names of calls."""
    files: str = "*"
    """A pattern of the files that are meant, by their paths below that of the tier."""
    nth: int = Field(default=1, ge=1)
    """The first call that is struck, of those that match."""
    every: int = Field(default=1, ge=1)
    """From there on, every n-th one is."""
    times: int | None = Field(default=None, ge=1)
    """How often the rule strikes at most."""
    probability: float = Field(default=1.0, gt=0, le=1)
    """Of a strike, each time."""
    latency: Duration = Field(default=0.1, ge=0, json_schema_extra={"default": "100ms"})
    """How much longer the call takes."""
    at: Size | None = None
    """Where in the bytes of the call: how many a part has, or which one is wrong."""
    switch: PathText | None = None
    """The rule holds only while this file exists."""
    seed: int = 0
    """The same seed, the same faults."""

    def build(self, folder: Path) -> FaultRule:
        """Return the section as the rest of tierstore sees it."""
        return FaultRule(
            kind=self.kind,
            error=self.error,
            calls=tuple(self.calls),
            files=self.files,
            nth=self.nth,
            every=self.every,
            times=self.times,
            probability=self.probability,
            latency_seconds=self.latency,
            at_bytes=self.at,
            switch=None if self.switch is None else folder / Path(self.switch).expanduser(),
            seed=self.seed,
        )

    @field_validator("error")
    @classmethod
    def _names_an_errno(cls, name: str) -> str:
        if name not in errno.errorcode.values():
            raise ValueError(f"expected the name of an errno such as 'ENOSPC', got {name[:32]!r}")
        return name


class IoSection(_Section):
    """How one secondary tier talks to its device."""

    mode: Literal["direct", "buffered", "mmap"] = "direct"
    """Of the file backend only; `direct` falls back to `buffered` where O_DIRECT is refused."""
    threads: int = Field(default=8, ge=1, le=64)
    """I/O threads per worker process."""
    deadline: Duration = Field(default=2.0, json_schema_extra={"default": "2s"})
    """A load that takes longer fails and is recomputed; `1ms` to `60min`."""
    write_queue: PositiveSize = Field(
        default=256 << 20, le=WRITE_QUEUE_BYTES_MAX, json_schema_extra={"default": "256MiB"}
    )
    """Write-behind limit: what would wait beyond it is dropped and counted."""
    durable: bool = False
    """Also flush payload to the device before a record becomes visible."""
    breaker: BreakerSection = Field(default=BreakerSection(), json_schema_extra={"default": {}})
    faults: list[FaultSection] = Field(default=[], max_length=64)
    """For game days: what goes wrong on purpose; refused unless the environment allows it."""

    def build(self, folder: Path) -> IoConfig:
        """Return the section as the rest of tierstore sees it."""
        return IoConfig(
            mode=self.mode,
            threads=self.threads,
            deadline_seconds=self.deadline,
            write_queue_bytes=self.write_queue,
            durable=self.durable,
            breaker=self.breaker.build(),
            faults=tuple(rule.build(folder) for rule in self.faults),
        )


class IntegritySection(_Section):
    """Records of a secondary tier that only those who have the key can make, or read."""

    key_file: KeyPathText = Field(min_length=1)
    """A file with one key a line; `~` is expanded; relative to the folder of the YAML file."""
    encrypt: bool = False
    """Encrypt the payload of new records, too; block hashes and the catalog stay readable."""

    def build(self, folder: Path) -> IntegrityConfig:
        """Return the section as the rest of tierstore sees it; `folder` bases a relative path."""
        return IntegrityConfig(
            key_file=folder / Path(self.key_file).expanduser(), encrypt=self.encrypt
        )


class SecondarySection(_Section):
    """One tier below the memory: on disk, or as a plug-in says."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Names the tier in logs and metrics: letters, digits, `_`, `.`, `-`."""
    tier: TierName = "disk"
    """`disk`: a directory of this machine."""
    backend: BackendName
    """`file`: segment files, for large tiers; `lmdb`: one database file, for small ones."""
    path: PathText = Field(min_length=1)
    """A directory of its own; `~` is expanded; relative to the folder of the YAML file."""
    capacity: PositiveSize
    """Hard limit of all bytes below `path`: catalog, every rank and every engine included."""
    cascade: AdmissionName = "write_through"
    """When chunks are written: at once, when memory evicts them, or at their second use."""
    eviction: Literal["lru"] = "lru"
    """Which record leaves first."""
    io: IoSection = Field(default=IoSection(), json_schema_extra={"default": {}})
    integrity: Annotated[IntegritySection | None, BeforeValidator(_integrity_mapping)] = Field(
        default=None, json_schema_extra=_leave_out_none
    )
    """Needs the extra `integrity`. Records that were made without the key are misses."""
    backend_options: Options = Field(default={})
    """What a plug-in that `backend` names is given, by the names of its arguments."""
    cascade_options: Options = Field(default={})
    """What a plug-in that `cascade` names is given, by the names of its arguments."""
    tier_options: Options = Field(default={})
    """What a plug-in that `tier` names is given, by the names of its arguments."""

    def build(self, folder: Path) -> SecondaryConfig:
        """Return the section as the rest of tierstore sees it; `folder` bases a relative path."""
        return SecondaryConfig(
            name=self.name,
            tier=self.tier,
            backend=self.backend,
            path=folder / Path(self.path).expanduser(),
            capacity_bytes=self.capacity,
            cascade=self.cascade,
            eviction=self.eviction,
            io=self.io.build(folder),
            integrity=None if self.integrity is None else self.integrity.build(folder),
            backend_options=self.backend_options,
            cascade_options=self.cascade_options,
            tier_options=self.tier_options,
        )


class OffloadSection(_Section):
    """What an engine's connector offloads."""

    blocks_per_chunk: int = Field(default=1, ge=1, le=1024)
    """Consecutive blocks of the engine that are kept and evicted together."""
    decode: bool = True
    """Offload blocks that generated tokens filled, not only those of the prompt."""
    on_reset: Literal["forget", "keep_disk"] = "forget"
    """What a reset of the engine's cache leaves: nothing, or what is on disk."""
    events: bool = False
    """Publish what comes to the tiers and leaves them as the engine's KV cache events."""

    def build(self) -> OffloadConfig:
        """Return the section as the rest of tierstore sees it."""
        return OffloadConfig(
            blocks_per_chunk=self.blocks_per_chunk,
            decode=self.decode,
            on_reset=self.on_reset,
            events=self.events,
        )


class GpuSection(_Section):
    """How chunks travel between GPU and host memory; what is not given is measured at start."""

    kernel_below: Size | None = None
    """Runs smaller than this are gathered by a kernel; `0B`: none are."""
    kernel_runs: int | None = Field(default=None, ge=1, le=1 << 20)
    """Fewer small runs than this are not worth a kernel."""
    pitched_from: PositiveSize | None = None
    """Equally spaced rows of at least this size become one 2-D copy."""
    kernel_sms: int = Field(default=4, ge=1, le=64)
    """Multiprocessors of the GPU that the kernel occupies at most."""

    def build(self) -> GpuConfig:
        """Return the section as the rest of tierstore sees it."""
        return GpuConfig(
            kernel_below_bytes=self.kernel_below,
            kernel_runs=self.kernel_runs,
            pitched_from_bytes=self.pitched_from,
            kernel_sms=self.kernel_sms,
        )


class Document(_Section):
    """A tierstore configuration file."""

    version: VersionNumber = 1
    """Version of this file format."""
    primary: PrimarySection
    secondary: list[SecondarySection] = Field(default=[], max_length=8)
    """Tiers on disk, in the order in which they are asked."""
    offload: OffloadSection = Field(default=OffloadSection(), json_schema_extra={"default": {}})
    gpu: GpuSection = Field(default=GpuSection(), json_schema_extra={"default": {}})

    def build(self, folder: Path) -> StoreConfig:
        """Return the document as the rest of tierstore sees it."""
        return StoreConfig(
            version=self.version,
            primary=self.primary.build(),
            secondary=tuple(tier.build(folder) for tier in self.secondary),
            offload=self.offload.build(),
            gpu=self.gpu.build(),
        )
