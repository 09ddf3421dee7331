"""Which chunks leave so that others find slots of their size."""

from collections.abc import Collection, Sequence

from tierstore.key import OffloadKey
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.protocol import EvictionPolicy
from tierstore.policy.use import UseContext
from tierstore.tier.memory.slot_pool import SlotPool

__all__ = ["plan_eviction"]


def plan_eviction(
    policy: EvictionPolicy,
    slots: SlotPool,
    pinned: Collection[OffloadKey],
    group_idx: int,
    keys: Sequence[OffloadKey],
    *,
    use: UseContext,
) -> EvictionPlan | None:
    """Plan the evictions after which each of the keys has a slot of the group; change nothing.

    None: pins leave too little room.
    """
    shortage = len(keys) - slots.free_count(group_idx)
    if shortage <= 0:
        return EvictionPlan([], keys, use)
    if slots.uniform_slot_count is not None:
        plan = policy.victims(shortage, pinned, keys, use)
        return plan if len(plan.keys) == shortage else None
    asked = shortage
    while True:
        victims = policy.victims(asked, pinned, keys, use).keys
        victim_slots = [slot for slot in policy.locate(victims) if slot is not None]
        chosen = slots.choose(group_idx, shortage, victim_slots)
        if chosen is not None:
            return EvictionPlan([victims[position] for position in chosen], keys, use)
        if len(victims) < asked:
            return None
        asked *= 2
