"""A policy of another package: it says who leaves, and is believed nothing else."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from tierstore.bounded_log import bounded
from tierstore.key import OffloadKey
from tierstore.policy.lru import LruPolicy
from tierstore.policy.plan import EvictionPlan
from tierstore.policy.protocol import EvictionPolicy
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.quoting import named

__all__ = ["CheckedPolicy"]

_logger = bounded(logging.getLogger(__name__))


@dataclass(slots=True, eq=False)
class _CheckedPlan(EvictionPlan):
    """A plan, and the one of the other package from which it was made without a change."""

    made: EvictionPlan | None = None


class CheckedPolicy:
    """Keeps the slots of all keys itself; asks the policy for victims, and looks at them.

    A slot that the policy got wrong, or a victim that is pinned, would store the bytes of one chunk
    under the key of another one, with a checksum that fits. A table of our own costs one more
    change per key, and about 50 bytes. The policies of this package are trusted, and do not pay for
    this.

    The policy gets copies of all that it may change. If it raises an exception, it is not asked
    again: the table is in the order of use, so that the least recently used keys leave then.
    """

    def __init__(self, policy: EvictionPolicy, name: str) -> None:
        """`name` is for the log."""
        self._policy: EvictionPolicy | None = policy
        self._name = name
        self._is_logged = False
        self.needs_use = bool(policy.needs_use)
        self._own = LruPolicy()
        self.locate = self._own.locate
        self.holds_any = self._own.holds_any
        self.holds_all = self._own.holds_all

    def __len__(self) -> int:
        return len(self._own)

    def insert(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], use: UseContext = UNKNOWN_USE
    ) -> None:
        """Add keys that became resident, and tell the policy."""
        self._own.insert(keys, slots)
        self._tell(lambda policy: policy.insert(list(keys), list(slots), use))

    def touch(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Record one use of each key, and tell the policy."""
        self._own.touch(keys)
        self._tell(lambda policy: policy.touch(list(keys), use))

    def victims(
        self,
        count: int,
        pinned: Collection[OffloadKey],
        incoming: Sequence[OffloadKey] = (),
        use: UseContext = UNKNOWN_USE,
    ) -> EvictionPlan:
        """Plan what the policy plans, without keys that must not leave, and without repeated ones.

        If too few are left, the least recently used keys follow.
        """
        named_keys: list[OffloadKey] = []
        made: list[EvictionPlan] = []

        def ask(policy: EvictionPolicy) -> None:
            plan = policy.victims(count, _read_only(pinned), list(incoming), use)
            named_keys.extend(map(_require_bytes, plan.keys))
            made.append(plan)

        self._tell(ask)
        slots = self._own.locate(named_keys)
        allowed = [
            key
            for key, slot in zip(named_keys, slots, strict=True)
            if slot is not None and key not in pinned
        ]
        chosen = list(dict.fromkeys(allowed))[: max(count, 0)]
        is_as_named = bool(made) and len(chosen) == len(named_keys)
        if len(chosen) < count:
            passed_over = set(chain(pinned, chosen))
            added = self._own.victims(count - len(chosen), passed_over).keys
            is_as_named = is_as_named and not added
            chosen += added
        if not is_as_named and made:
            self._log_victims(len(named_keys), len(chosen))
        return _CheckedPlan(chosen, incoming, use, made[0] if is_as_named else None)

    def evict(self, plan: EvictionPlan) -> list[int]:
        """Remove the victims, and tell the policy; return their slots."""
        slots = self._own.evict(plan)
        made = plan.made if isinstance(plan, _CheckedPlan) else None
        if made is None:
            made = EvictionPlan(list(plan.keys), list(plan.incoming), plan.use)
        self._tell(lambda policy: policy.evict(made))
        return slots

    def remove(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Remove resident keys, and tell the policy; return their slots."""
        slots = self._own.remove(keys)
        self._tell(lambda policy: policy.remove(list(keys)))
        return slots

    def clear(self) -> None:
        """Forget everything, and let the policy do so."""
        self._own.clear()
        self._tell(lambda policy: policy.clear())

    def _tell(self, call: Callable[[EvictionPolicy], object]) -> None:
        """Call the policy, once what is kept here is as it says."""
        if self._policy is None:
            return
        try:
            call(self._policy)
        except Exception as error:  # noqa: BLE001 - whatever another package raises
            self._policy = None
            _logger.error(
                "a policy failed and is not asked any more, the least recently used chunks leave: "
                "policy=%s cause=%s",
                self._name,
                named(error),
            )

    def _log_victims(self, named_count: int, count: int) -> None:
        if not self._is_logged:
            self._is_logged = True
            _logger.error(
                "a policy names victims that are pinned, not resident, repeated, too many or too "
                "few; others leave, or they are passed over: policy=%s named=%d leaving=%d",
                self._name,
                named_count,
                count,
            )


def _read_only(keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
    """Return a view of the keys of a mapping, in O(1), or a copy of other keys."""
    return keys.keys() if isinstance(keys, Mapping) else frozenset(keys)


def _require_bytes(key: object) -> OffloadKey:
    if type(key) is not bytes:
        raise TypeError(f"victims: expected keys, got one of type {type(key).__name__}")
    return OffloadKey(key)
