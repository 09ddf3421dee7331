"""The YAML document, as pydantic models: the keys that people write, and nothing else.

The one module that imports pydantic; `loader` imports it lazily, so that `import tierstore` stays
quick. Defaults repeat those of `model`; a test holds the two together.
"""

import difflib
import errno
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import ErrorDetails

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
from tierstore.config.plain import plain_document
from tierstore.config.problems import PROBLEM_COUNT_MAX, key_path, problems_of
from tierstore.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size
from tierstore.errors import ConfigError
from tierstore.key_file import looks_like_key
from tierstore.quoting import named, quoted

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
    "json_schema",
    "parse_document",
]


def _schema(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


def _is_python(info: ValidationInfo) -> bool:
    """Return whether the document was made by a program, whose bare numbers have a meaning."""
    return bool(info.context)


def _size(raw: object, info: ValidationInfo) -> int:
    return parse_size(raw, is_python=_is_python(info))


def _duration(raw: object, info: ValidationInfo) -> float:
    return parse_duration(raw, is_python=_is_python(info))


def _path_text(raw: object) -> object:
    text = str(raw) if isinstance(raw, Path) else raw
    if not isinstance(text, str):
        return text
    too_long = (
        f"expected names of at most {_NAME_BYTES_MAX} bytes, and {_PATH_BYTES_MAX} in all, "
        f"got {quoted(text)}"
    )
    if len(text) > _PATH_BYTES_MAX:
        raise ValueError(too_long)
    if "\0" in text:
        raise ValueError(f"a path has no zero bytes, got {quoted(text)}")
    if any(unicodedata.category(char) in _UNPRINTED for char in text):
        raise ValueError(f"a path has no line breaks or control characters: {quoted(text)}")
    try:
        whole = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{quoted(text)} names an unknown home; give a whole path") from None
    longest = max((len(os.fsencode(part)) for part in whole.parts), default=0)
    if longest > _NAME_BYTES_MAX or len(os.fsencode(whole)) > _PATH_BYTES_MAX:
        raise ValueError(too_long)
    if len(whole.parts) > _NAME_COUNT_MAX:
        raise ValueError(f"expected at most {_NAME_COUNT_MAX} folders, got {quoted(text)}")
    return text


def _version(raw: object) -> object:
    # To Python, and to the checks of a literal, `true` and `1.0` are equal to 1.
    if type(raw) is not int:
        raise ValueError(f"expected 1, got {quoted(raw)}")
    return raw


def _key_path(raw: object) -> object:
    """Refuse a key in the place of its file, without quoting it."""
    if not isinstance(raw, str | os.PathLike):
        raise ValueError("expected the path of a file")  # noqa: TRY004 - pydantic asks for it
    if looks_like_key(str(raw)):
        raise ValueError("this is a key; write it to a file, and give the path of that")
    return _path_text(raw)


def _integrity_mapping(raw: object) -> object:
    """Refuse `integrity:` without keys, which would silently mean nothing; quote nothing."""
    if not isinstance(raw, Mapping | IntegritySection):
        raise ValueError("expected a mapping with key_file")  # noqa: TRY004 - as above
    return raw


_UNPRINTED = ("Cc", "Zl", "Zp")
_NAME_BYTES_MAX = 255
_NAME_COUNT_MAX = 100
_PATH_BYTES_MAX = 3_500
"""The kernel takes 4,096; a tier has names of its own below its path."""
_WORD_CHARS_MAX = 60
"""Of an unknown key, to find the nearest valid one; that takes time by the square."""

Size = Annotated[int, BeforeValidator(_size), _schema(SIZE_PATTERN, "20GiB")]
PositiveSize = Annotated[Size, Field(gt=0)]
Duration = Annotated[float, BeforeValidator(_duration), _schema(DURATION_PATTERN, "2s")]
PathText = Annotated[str, BeforeValidator(_path_text)]
KeyPathText = Annotated[str, BeforeValidator(_key_path)]


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
    eviction: Literal["lru", "arc"] = "arc"
    """Which chunk leaves first."""
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
    """From there on, each so-manieth is."""
    times: int | None = Field(default=None, ge=1)
    """How often the rule strikes at most."""
    probability: float = Field(default=1.0, gt=0, le=1)
    """With which it strikes each time."""
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
    """How one secondary tier keeps records that nobody else can make, or read."""

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
    """One tier on disk."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Names the tier in logs and metrics: letters, digits, `_`, `.`, `-`."""
    backend: Literal["file", "lmdb"]
    """`file`: segment files, for large tiers; `lmdb`: one database file, for small ones."""
    path: PathText = Field(min_length=1)
    """A directory of its own; `~` is expanded; relative to the folder of the YAML file."""
    capacity: PositiveSize
    """Hard limit of all bytes below `path`: catalog, every rank and every engine included."""
    cascade: Literal["write_through", "on_evict", "second_touch"] = "write_through"
    """When chunks are written: at once, when memory evicts them, or at their second use."""
    eviction: Literal["lru"] = "lru"
    """Which record leaves first."""
    io: IoSection = Field(default=IoSection(), json_schema_extra={"default": {}})
    integrity: Annotated[IntegritySection | None, BeforeValidator(_integrity_mapping)] = Field(
        default=None, json_schema_extra=_leave_out_none
    )
    """Needs the extra `integrity`. Records that were made without the key are misses."""

    def build(self, folder: Path) -> SecondaryConfig:
        """Return the section as the rest of tierstore sees it; `folder` bases a relative path."""
        return SecondaryConfig(
            name=self.name,
            backend=self.backend,
            path=folder / Path(self.path).expanduser(),
            capacity_bytes=self.capacity,
            cascade=self.cascade,
            eviction=self.eviction,
            io=self.io.build(folder),
            integrity=None if self.integrity is None else self.integrity.build(folder),
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

    version: Annotated[Literal[1], BeforeValidator(_version)] = 1
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


def json_schema() -> dict[str, object]:
    """Return the JSON Schema of the document."""
    schema = Document.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def parse_document(raw: object, *, is_python: bool) -> Document:
    """Check the keys of a document and the form of their values.

    `is_python`: a program made it, so that a bare number is one of bytes or seconds.

    Raises:
        ConfigError: one line per wrong key, and the number of those that are not named.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a mapping with 'primary', got {type(raw).__name__}")
    try:
        return Document.model_validate(plain_document(raw), context=is_python)
    except ValidationError as error:
        details = error.errors(include_url=False)
    except (ValueError, OverflowError) as error:  # what the library itself stumbles over
        raise ConfigError(f"the mapping cannot be read: {named(error)}") from None
    # Not chained: the library's own text quotes every wrong value, however large.
    shown = [_describe(detail) for detail in details[:PROBLEM_COUNT_MAX]]
    raise problems_of(shown, len(details))


def _describe(detail: ErrorDetails) -> str:
    location, got = detail["loc"], detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            name = str(location[-1])[:_WORD_CHARS_MAX]
            text = "unknown key; " + _nearest(name, _valid_keys(location[:-1]))
        case "missing":
            text = "this key is required"
        case "model_type":
            text = f"expected a mapping, got {quoted(got)}"
        case "literal_error":
            text = f"expected {context['expected']}, got {quoted(got)}"
        case "too_long":
            text = f"expected at most {context['max_length']} items, got {context['actual_length']}"
        case "value_error":
            text = str(context["error"])
        case _:
            message = detail["msg"].removeprefix("Input").removeprefix("String")
            text = f"must{message.removeprefix(' should')}, got {quoted(got)}"
    return f"{key_path(location)}: {text}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "primary": PrimarySection,
    "secondary": SecondarySection,
    "io": IoSection,
    "integrity": IntegritySection,
    "breaker": BreakerSection,
    "faults": FaultSection,
    "offload": OffloadSection,
    "gpu": GpuSection,
}


def _valid_keys(location: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = Document
    for part in location:
        if isinstance(part, str):
            section = _SECTIONS[part]
    return list(section.model_fields)


def _nearest(name: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"{hint}valid keys are {', '.join(valid)}"
