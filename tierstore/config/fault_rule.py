"""One rule of fault injection: which calls to a tier's device fail, when, and how."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

__all__ = ["FaultKind", "FaultRule"]

FaultKind = Literal[
    "error", "memory", "short", "torn", "flip", "zero", "lose", "latency", "hang", "kill", "exit"
]
"""What happens to a call:

`error`: it fails with `error` and changes nothing. `memory`: it raises `MemoryError`.
`short`: it transfers fewer bytes than requested. `torn`: it transfers a part, then fails with
`error`. `flip`: one bit of the data is flipped. `zero`: a sector of the data is zeroed.
`lose`: it does nothing and reports success. `latency`: it takes longer. `hang`: it blocks until
the fault ends. `kill`: the process ends by SIGKILL; `exit`: by `os._exit`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """Which calls to a tier's device fail, and how. The same seed gives the same faults.

    Calls that match are counted from 1. The rule hits call `nth` and every `every`-th one after
    it, each with `probability`, and at most `times` times.
    """

    kind: FaultKind
    error: str = "EIO"
    """The name of an errno."""
    calls: tuple[str, ...] = ("*",)
    """Names of calls, as patterns: `preadv`, `pwritev`, `database.commit`, `backend.read`."""
    files: str = "*"
    """A pattern of paths, relative to the tier's: `rank0/*.seg`, `catalog`, `rank0/payload`."""
    nth: int = 1
    every: int = 1
    times: int | None = None
    """None: until the fault is healed."""
    probability: float = 1.0
    latency_seconds: float = 0.1
    at_bytes: int | None = None
    """How many bytes a part has, or which byte is corrupted; None: chosen by `seed`."""
    switch: Path | None = None
    """The rule is active only while this file exists."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what types cannot say.

        Raises:
            ValueError: the message says what to write.
        """
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"kind: expected one of {get_args(FaultKind)}, got {self.kind!r}")
        if self.error not in errno.errorcode.values():
            raise ValueError(f"error: expected the name of an errno such as EIO, got {self.error}")
        if self.nth < 1 or self.every < 1 or (self.times is not None and self.times < 1):
            raise ValueError("nth, every, times: calls are counted from 1")
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability: expected above 0, at most 1, got {self.probability}")
        if self.latency_seconds < 0 or (self.at_bytes or 0) < 0:
            raise ValueError("latency, at: cannot be negative")

    @property
    def errno(self) -> int:
        """The number of `error`."""
        return int(getattr(errno, self.error))
