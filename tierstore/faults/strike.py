"""What is decided about one call to a device: the call, and what happens to it."""

import os
import signal
from dataclasses import dataclass
from typing import NoReturn, Protocol

from tierstore.config import FaultKind

__all__ = ["EXIT_STATUS", "Call", "Strike", "Striker"]

EXIT_STATUS = 86
"""Of a process that a rule of kind `exit` has ended; no signal and no exception gives it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the device of a tier."""

    name: str
    tier: str = ""
    file: str = ""
    """Its path below that of the tier."""
    size_bytes: int = 0
    """How many bytes it moves, 0: none."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to a call; whoever wraps it carries it out."""

    kind: FaultKind
    code: int
    """The errno of a failure."""
    at_bytes: int = 0
    """How many bytes a part has, or which one is wrong."""
    has_part: bool = False
    """Of a death: whether the first `at_bytes` are done before."""

    def fail(self) -> NoReturn:
        """End the call: by an error, or with the process.

        Raises:
            MemoryError: of kind `memory`.
            OSError: of all other kinds that leave the process alive.
        """
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            case "exit":
                os._exit(EXIT_STATUS)
            case "memory":
                raise MemoryError("injected fault")
        raise OSError(self.code, f"injected fault: {os.strerror(self.code)}")


class Striker(Protocol):
    """Decides about calls: a plan, or a schedule of a test. Thread-safe."""

    def strike(self, call: Call) -> Strike | None:
        """Count a call, wait as long as it has to, and return what happens to it otherwise."""
