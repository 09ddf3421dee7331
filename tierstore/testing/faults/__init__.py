"""Faults on demand, deterministic by seed: of a tier's device, or of a whole backend.

The device, with the catalog, the payload and all other files of a tier:

    plan = FaultPlan(FaultRule(kind="torn", error="ENOSPC", calls=("pwritev",), probability=0.1))
    with TierStore.open(config, manifest, open_system=plan.open_system) as store: ...

A backend, ours or another one, whatever it asks its device through:

    plan = FaultPlan(FaultRule(kind="hang", calls=("backend.read",), nth=3))
    open_backend = faulty_backend_opener(plan)
    with TierStore.open(config, manifest, open_backend=open_backend) as store: ...

Every call of a scenario fails once, or always from then on: run it with a rule of `nth` 1, 2, ...
and `times` 1 or None until `plan.strike_count` stays 0. `plan.trace` says what was injected, and
`Injection.rule` injects it again. `ReadFaults` chooses records by their key. What a power cut or a
kill may leave on a disk is the matter of `testing.crash`.
"""

from tierstore.faults import FaultKind, FaultPlan, FaultRule, Injection
from tierstore.testing.faults.backend import (
    BACKEND_CALLS,
    FaultyBackend,
    PlannedBackend,
    faulty_backend_opener,
    faulty_opener,
)
from tierstore.testing.faults.reads import ReadFaults, UnreadableBackend, unreadable_opener
from tierstore.testing.faults.schedule import FaultSchedule
from tierstore.testing.faults.system import FaultySystem, ShortIoSystem, faulty_system_opener

__all__ = [
    "BACKEND_CALLS",
    "FaultKind",
    "FaultPlan",
    "FaultRule",
    "FaultSchedule",
    "FaultyBackend",
    "FaultySystem",
    "Injection",
    "PlannedBackend",
    "ReadFaults",
    "ShortIoSystem",
    "UnreadableBackend",
    "faulty_backend_opener",
    "faulty_opener",
    "faulty_system_opener",
    "unreadable_opener",
]
