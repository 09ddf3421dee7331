"""What a policy has decided to evict, before it is done."""

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["EvictionPlan"]


@dataclass(slots=True, eq=False)
class EvictionPlan:
    """Victims, in order, and the keys for which they leave.

    `victims` of a policy returns one, `evict` of the same policy carries it out. In between the
    policy is not changed. A policy may return a subclass with what it has already worked out. A
    caller that evicts a part of the victims, or only reports misses, makes a plan of its own.
    """

    keys: list[OffloadKey]
    """The victims; fewer than were asked for if fewer can be evicted."""
    incoming: Sequence[OffloadKey] = ()
    """The keys that miss, and for which room is made."""
    use: UseContext = UNKNOWN_USE
    """On whose behalf they come."""
