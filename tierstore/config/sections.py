"""The sections of a configuration as pydantic models, with the keys of the YAML file.

Defaults repeat those of `model`; a test compares the two.
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
    """Refuse an empty `integrity:`, which would silently have no effect. Quotes nothing."""
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
    """Which chunk is evicted first."""
    eviction_options: Options = Field(default={})
    """Keyword arguments for the plug-in that `eviction` names."""
    pinned: Literal["auto", "never"] = "auto"
    """`auto` pins the memory if CUDA is available; `never` leaves it pageable."""
    huge_pages: bool = True
    """Ask the kernel for transparent huge pages (a hint, never an error)."""
    hugetlb: bool = False
    """Use reserved huge pages (`vm.nr_hugepages`); warn if too few are free."""

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
    """When a failing tier is put out of use, and when it is tried again."""

    failures: int = Field(default=5, ge=1, le=1000)
    """Consecutive failed operations that put the tier out of use; a hang does so at once."""
    retry_after: Duration = Field(
        default=5.0, ge=0.01, le=3600, json_schema_extra={"default": "5s"}
    )
    """The first pause before a trial; it doubles with each failed trial."""
    retry_after_max: Duration = Field(
        default=60.0, ge=0.01, le=3600, json_schema_extra={"default": "60s"}
    )
    """The longest pause."""
    hung_share: float = Field(default=0.25, gt=0, le=1)
    """The share of `primary.capacity` that hung reads of this tier may hold."""

    def build(self) -> BreakerConfig:
        """Return the section as the rest of tierstore sees it."""
        return BreakerConfig(
            failures=self.failures,
            retry_after_seconds=self.retry_after,
            retry_after_max_seconds=self.retry_after_max,
            hung_share=self.hung_share,
        )


class FaultSection(_Section):
    """Injects faults into calls to a tier's device; only for game days."""

    kind: FaultKind
    """What happens to a call that the rule hits."""
    error: str = "EIO"
    """The name of the errno with which it fails."""
    calls: list[str] = Field(default=["*"], min_length=1, max_length=32)
    """Patterns of the names of calls."""
    files: str = "*"
    """A pattern of file paths, relative to the tier's path."""
    nth: int = Field(default=1, ge=1)
    """The first of the matching calls that the rule hits."""
    every: int = Field(default=1, ge=1)
    """From call `nth` on, the rule hits every n-th call."""
    times: int | None = Field(default=None, ge=1)
    """How often the rule hits at most."""
    probability: float = Field(default=1.0, gt=0, le=1)
    """The probability of each hit."""
    latency: Duration = Field(default=0.1, ge=0, json_schema_extra={"default": "100ms"})
    """How much longer the call takes."""
    at: Size | None = None
    """How many bytes are transferred, or which byte is corrupted."""
    switch: PathText | None = None
    """The rule is active only while this file exists."""
    seed: int = 0
    """The same seed gives the same faults."""

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
    """How one secondary tier uses its device."""

    mode: Literal["direct", "buffered", "mmap"] = "direct"
    """For the file backend; `direct` falls back to `buffered` where O_DIRECT is refused."""
    threads: int = Field(default=8, ge=1, le=64)
    """I/O threads per worker process."""
    deadline: Duration = Field(default=2.0, json_schema_extra={"default": "2s"})
    """How long a read may make no progress before it fails; `1ms` to `60min`."""
    write_queue: PositiveSize = Field(
        default=256 << 20, le=WRITE_QUEUE_BYTES_MAX, json_schema_extra={"default": "256MiB"}
    )
    """Write-behind limit: chunks beyond it are not written, and are counted."""
    durable: bool = False
    """Also flush payload to the device before a record becomes visible."""
    breaker: BreakerSection = Field(default=BreakerSection(), json_schema_extra={"default": {}})
    faults: list[FaultSection] = Field(default=[], max_length=64)
    """Fault injection for game days; refused unless the environment allows it."""

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
    """Authenticates the records of a secondary tier with a key, and can encrypt them."""

    key_file: KeyPathText = Field(min_length=1)
    """A file with one key per line; `~` is expanded; relative to the folder of the YAML file."""
    encrypt: bool = False
    """Also encrypt the payload of new records; block hashes and the catalog stay readable."""

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
    """A directory for this tier alone; `~` is expanded; relative to the YAML file's folder."""
    capacity: PositiveSize
    """Hard limit of all bytes below `path`: catalog, every rank and every engine included."""
    cascade: AdmissionName = "write_through"
    """When chunks are written: at once, when memory evicts them, or at their second use."""
    eviction: Literal["lru"] = "lru"
    """Which record is evicted first."""
    io: IoSection = Field(default=IoSection(), json_schema_extra={"default": {}})
    integrity: Annotated[IntegritySection | None, BeforeValidator(_integrity_mapping)] = Field(
        default=None, json_schema_extra=_leave_out_none
    )
    """Needs the extra `integrity`. Records that were made without the key are misses."""
    backend_options: Options = Field(default={})
    """Keyword arguments for the plug-in that `backend` names."""
    cascade_options: Options = Field(default={})
    """Keyword arguments for the plug-in that `cascade` names."""
    tier_options: Options = Field(default={})
    """Keyword arguments for the plug-in that `tier` names."""

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
    """Also offload blocks filled by generated tokens, not only those of the prompt."""
    on_reset: Literal["forget", "keep_disk"] = "forget"
    """What survives a reset of the engine's cache: nothing, or the records on disk."""
    events: bool = False
    """Publish stored and removed blocks of all tiers as the engine's KV cache events."""

    def build(self) -> OffloadConfig:
        """Return the section as the rest of tierstore sees it."""
        return OffloadConfig(
            blocks_per_chunk=self.blocks_per_chunk,
            decode=self.decode,
            on_reset=self.on_reset,
            events=self.events,
        )


class GpuSection(_Section):
    """How chunks travel between GPU and host memory; a missing value is measured at start."""

    kernel_below: Size | None = None
    """Runs smaller than this are gathered by a kernel; `0B` turns it off."""
    kernel_runs: int | None = Field(default=None, ge=1, le=1 << 20)
    """The least number of small runs for which the kernel is launched."""
    pitched_from: PositiveSize | None = None
    """Equally spaced rows of at least this size become one 2-D copy."""
    kernel_sms: int = Field(default=4, ge=1, le=64)
    """The most multiprocessors of the GPU that the kernel may occupy."""

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
    """Tiers on disk; the first one that has a chunk serves it."""
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
