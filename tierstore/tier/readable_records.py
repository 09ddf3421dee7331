"""The records of one tier that can be read now.

A record may be in the catalog and still be unreadable: its read hangs, has just failed, or was
never begun because the tier makes no progress. The tier then answers *absent* for a while, so that
another tier is asked, or the chunk is computed and stored again. All lookups of records go through
this module. Add further reasons not to ask a tier here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.key import OffloadKey
from tierstore.metrics import Counters, Metric
from tierstore.tier.health.tier_health import TierHealth
from tierstore.tier.reservation import ChunkState
from tierstore.tier.secondary import SecondaryTier
from tierstore.transfer import FailureReason, Place

__all__ = ["HIDDEN_SECONDS", "STALLED_SECONDS", "ReadableRecords"]

HIDDEN_SECONDS = 30.0
"""How long a record stays hidden after its read failed: long enough to outlast a short failure of
the device, short enough to serve hits after it."""

STALLED_SECONDS = 2.0
"""The same for a record whose read was never begun: it may be sound."""

# Rejected: removing a record at its first failure (a short failure of the device would empty the
# tier), and keeping unreadable records (they would be found, and fail, at every request).
_FAILURES_MAX = 2
"""A record whose read failed this often is removed: the record is damaged, not the device."""

_REMEMBERED_MAX = 1 << 14
"""The oldest failures beyond these are forgotten: their records are offered again."""

_WORTHLESS = (FailureReason.ABSENT, FailureReason.CORRUPT)
_UNREADABLE = (FailureReason.IO_ERROR, FailureReason.FULL)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The failures of one record."""

    count: int
    """Reads that failed; 0: no read was begun."""
    hidden_until: float


class ReadableRecords:
    """One tier's catalog without the records that cannot be read now. One thread."""

    def __init__(
        self,
        secondary: SecondaryTier,
        health: TierHealth,
        clock: Clock,
        counters: Counters,
        *,
        hung_bytes_max: int,
        on_removed: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        """Share the tier, which is not asked while hung reads hold more than `hung_bytes_max`.

        `on_removed` is called with records that are removed because they cannot be read.
        """
        self._secondary = secondary
        secondary.tell_of_hidden(self._count_hidden)
        self._counters = counters
        self._counted: set[OffloadKey] = set()
        """Chunks that could not be looked up, and were counted as missed."""
        self.health = health
        """The health of the tier's device; chunks beyond what it allows are absent."""
        self._was_readable = True
        self._clock = clock
        self._hung_bytes_max = hung_bytes_max
        self._on_removed = on_removed
        self._hung: set[OffloadKey] = set()
        self._hung_bytes = 0
        self._failures: OrderedDict[OffloadKey, _Failure] = OrderedDict()

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Do as `SecondaryTier.locate`; None also for records that cannot be read now."""
        asked = self._askable(keys)
        if asked is keys:
            return self._secondary.locate(keys)
        places = dict(zip(asked, self._secondary.locate(asked), strict=True)) if asked else {}
        return [places.get(key) for key in keys]

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Callable[[], None] | None:
        """Do as `SecondaryTier.look_ahead`, for the keys that `locate` would ask for."""
        asked = self._askable(keys)
        return self._secondary.look_ahead(asked) if asked else None

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Do as `SecondaryTier.states`; records that cannot be read now are absent, too."""
        asked = self._askable(keys)
        if asked is keys:
            return self._secondary.states(keys)
        states = dict(zip(asked, self._secondary.states(asked), strict=True)) if asked else {}
        return [states.get(key, ChunkState.ABSENT) for key in keys]

    def hang(self, keys: Sequence[OffloadKey], slot_bytes: int) -> None:
        """Take note of reads that hang; their slots have `slot_bytes` bytes in total."""
        self._hung.update(keys)
        self.health.hang(len(keys))
        self._hung_bytes += slot_bytes

    def end_hang(
        self, keys: Sequence[OffloadKey], slot_bytes: int, failed: Sequence[FailureReason]
    ) -> None:
        """Take note that hung reads have ended, and why some of them failed."""
        self._hung.difference_update(keys)
        self._hung_bytes -= slot_bytes
        self.health.end_hang(len(keys), failed)

    def fail(self, reasons: Mapping[OffloadKey, FailureReason]) -> None:
        """Take note of records that were not read; remove those that are absent or damaged.

        Reasons that concern neither the record nor its device are ignored. While the tier is out
        of use, failures are the device's, and no record is removed for them.
        """
        worthless: list[OffloadKey] = []
        count_max = _FAILURES_MAX if self.health.is_readable else _FAILURES_MAX - 1
        for key, reason in reasons.items():
            known = self._failures.get(key)
            count = known.count if known else 0
            if reason in _WORTHLESS:
                count = _FAILURES_MAX
            elif reason in _UNREADABLE:
                count = max(count, min(count_max, count + 1))
            elif reason is not FailureReason.STALLED:
                continue
            is_tried = reason is not FailureReason.STALLED
            self._remember(key, count, HIDDEN_SECONDS if is_tried else STALLED_SECONDS)
            if is_tried and count == _FAILURES_MAX:
                worthless.append(key)
        if worthless:
            self._remove(worthless)

    def succeed(self, keys: Iterable[OffloadKey]) -> None:
        """Take note that records were read: their earlier failures are forgotten."""
        if self._failures:
            for key in keys:
                self._failures.pop(key, None)

    def give_way(self, keys: Iterable[OffloadKey]) -> None:
        """Remove unreadable records of chunks that are in memory again.

        Otherwise the tier would treat the chunks as recorded and not write them.
        """
        if not self._failures:
            return
        counts = {key: self._failures[key].count for key in keys if key in self._failures}
        unreadable = [key for key, count in counts.items() if 0 < count < _FAILURES_MAX]
        if unreadable:  # those beyond were removed when they failed
            self._remove(unreadable)
        self.succeed(key for key, count in counts.items() if count)

    def reset(self) -> None:
        """Forget failures, since the records are gone; hung reads still count."""
        self._failures.clear()

    def _remove(self, keys: Sequence[OffloadKey]) -> None:
        self._secondary.remove(keys)
        self._on_removed(keys)

    def _remember(self, key: OffloadKey, count: int, hidden_seconds: float) -> None:
        self._failures[key] = _Failure(count, self._clock.seconds() + hidden_seconds)
        self._failures.move_to_end(key)
        if len(self._failures) > _REMEMBERED_MAX:
            self._failures.popitem(last=False)

    def _askable(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that the tier may be asked for: `keys` itself if all of them."""
        count_max = self.health.read_count_max()
        is_readable = self.health.is_readable
        if is_readable and not self._was_readable:
            self._failures.clear()  # the device caused them, not the records
        self._was_readable = is_readable
        if not count_max or self._hung_bytes > self._hung_bytes_max:
            self._count_hidden(keys, FailureReason.STALLED)
            return ()
        if self._counted:
            self._counted.difference_update(keys)
        if is_readable and not self._failures and not self._hung:
            return keys
        now = self._clock.seconds()
        failures, hung = self._failures, self._hung
        askable = [
            key
            for key in keys
            if key not in hung and (key not in failures or failures[key].hidden_until <= now)
        ]
        if len(askable) > count_max:
            self._count_hidden(askable[count_max:], FailureReason.STALLED)
            return askable[:count_max]
        return askable

    def _count_hidden(self, keys: Sequence[OffloadKey], reason: FailureReason) -> None:
        """Count chunks that the tier may have, but that cannot be looked up, each once."""
        fresh = set(keys).difference(self._counted)
        if fresh:
            self._counters.add(Metric.MISSES, len(fresh), label=reason.value)
            if len(self._counted) > _REMEMBERED_MAX:
                self._counted.clear()
            self._counted |= fresh
