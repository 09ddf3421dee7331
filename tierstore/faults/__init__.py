"""Which device a tier has: the kernel as it is, or one with faults on demand.

`plan` decides which calls go wrong, `system` does it to system calls, and `opening` to those of a
tier whose configuration asks for it.
"""

from tierstore.config import FaultKind, FaultRule
from tierstore.faults.opening import ALLOW_FAULTS, SystemOpener, open_system
from tierstore.faults.plan import FaultPlan, Injection
from tierstore.faults.strike import EXIT_STATUS, Call, Strike, Striker
from tierstore.faults.system import DATABASE_CALLS, SYSTEM_CALLS, StruckSystem

__all__ = [
    "ALLOW_FAULTS",
    "DATABASE_CALLS",
    "EXIT_STATUS",
    "SYSTEM_CALLS",
    "Call",
    "FaultKind",
    "FaultPlan",
    "FaultRule",
    "Injection",
    "Strike",
    "Striker",
    "StruckSystem",
    "SystemOpener",
    "open_system",
]
