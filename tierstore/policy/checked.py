"""A policy of another package, whose victims are looked at before they leave."""

import logging
from collections.abc import Collection, Sequence

from tierstore.bounded_log import bounded
from tierstore.key import OffloadKey
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.protocol import EvictionPolicy
from tierstore.policy.use import UNKNOWN_USE, UseContext

__all__ = ["CheckedPolicy"]

_logger = bounded(logging.getLogger(__name__))


class CheckedPolicy:
    """Passes every call on; keys that must not leave are taken out of plans. See `EvictionPolicy`.

    The slot of a pinned chunk is being read or written: its bytes would be stored under the key of
    another one, with a checksum that fits. The policies of this package are trusted, and do not pay
    for this.
    """

    def __init__(self, policy: EvictionPolicy, name: str) -> None:
        """`name` is for the log."""
        self._policy = policy
        self._name = name
        self._is_logged = False
        self.needs_use = bool(policy.needs_use)
        self.locate = policy.locate
        self.holds_any = policy.holds_any
        self.holds_all = policy.holds_all
        self.insert = policy.insert
        self.touch = policy.touch
        self.evict = policy.evict
        self.remove = policy.remove
        self.clear = policy.clear

    def __len__(self) -> int:
        return len(self._policy)

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan what the policy plans, without keys that must not leave, and without repeated ones.

        If there are such keys, the plan may have fewer victims than could be evicted.
        """
        plan = self._policy.victims(count, pinned, incoming, use)
        slots = self._policy.locate(plan.keys)
        allowed = [
            key
            for key, slot in zip(plan.keys, slots, strict=True)
            if slot is not None and key not in pinned
        ]
        allowed = list(dict.fromkeys(allowed))[: max(count, 0)]
        if len(allowed) == len(plan.keys):
            return plan
        if not self._is_logged:
            self._is_logged = True
            _logger.error(
                "a policy names victims that are pinned, not resident, repeated or too many; they "
                "are passed over: policy=%s named=%d allowed=%d",
                self._name,
                len(plan.keys),
                len(allowed),
            )
        return EvictionPlan(allowed, incoming, use)
