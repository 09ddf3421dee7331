"""An admission of another package, whose answers are looked at before chunks go down."""

import logging
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.bounded_log import Causes, bounded
from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission.admitted import AdmittedChunks
from tierstore.tier.admission.protocol import Admission

__all__ = ["CheckedAdmission"]

_logger = bounded(logging.getLogger(__name__))


class CheckedAdmission:
    """Passes every call on; lets chunks through that it was told of and are not admitted yet.

    Others are not in memory, or are on their way already. What the admission raises ends here, and
    it lets nothing through then: the tiers would be left halfway between two of them. The
    admissions of this package are trusted, and do not pay for this.
    """

    def __init__(self, admission: Admission, name: str) -> None:
        """`name` is for the log."""
        self._admission = admission
        self._name = name
        self._admitted = AdmittedChunks()
        self._is_logged = False
        self._causes = Causes()
        self.needs_use = bool(admission.needs_use)
        self.admits_arrivals = bool(admission.admits_arrivals)
        self.admits_victims = bool(admission.admits_victims)

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote what it asks for (`Admission.on_resident`)."""
        return self._let_through(keys, self._tell(self._admission.on_resident, list(keys), use))

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote what it asks for (`Admission.on_touched`)."""
        return self._let_through(keys, self._tell(self._admission.on_touched, list(keys), use))

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote what it asks for (`Admission.on_victims`)."""
        return self._let_through(keys, self._tell(self._admission.on_victims, list(keys)))

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Let them through no more (`Admission.on_admitted`)."""
        self._admitted.add(keys)
        self._tell(self._admission.on_admitted, list(keys))

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Let them through no more (`Admission.on_promoted`)."""
        self._admitted.add(keys)
        self._tell(self._admission.on_promoted, list(keys), use)

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Return what it says, but not more than were not admitted (`Admission.on_evicted`)."""
        lost_count = self._tell(self._admission.on_evicted, list(keys))
        unasked_count = len(self._admitted.missing(keys))
        self._admitted.discard(keys)
        return min(max(lost_count, 0), unasked_count) if isinstance(lost_count, int) else 0

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Let them through again (`Admission.on_withdrawn`)."""
        self._admitted.discard(keys)
        self._tell(self._admission.on_withdrawn, list(keys))

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Let all others through again (`Admission.on_records_lost`)."""
        self._admitted.keep(queued)
        self._tell(self._admission.on_records_lost, frozenset(queued))

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Let all others through again (`Admission.reset`)."""
        self._admitted.keep(queued)
        self._tell(self._admission.reset, frozenset(queued))

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that were asked for, or came from the tier; it is not asked."""
        return self._admitted.present(keys)

    def _tell(self, call: Callable[..., object], *told: object) -> object:
        """Return its answer; if it raises, none of the chunks."""
        try:
            return call(*told)
        except Exception as error:
            if self._causes.is_new(type(error).__name__):
                _logger.exception(
                    "an admission fails, and lets nothing through then: admission=%s", self._name
                )
            return ()

    def _let_through(self, keys: Sequence[OffloadKey], answer: object) -> Sequence[OffloadKey]:
        asked = list(answer) if isinstance(answer, Collection) else [answer]
        if not asked:
            return ()
        wanted = {key for key in asked if isinstance(key, bytes)}
        allowed = [key for key in self._admitted.missing(keys) if key in wanted]
        if len(allowed) < len(asked) and not self._is_logged:
            self._is_logged = True
            _logger.error(
                "an admission asks for chunks that it was not told of, that are admitted or "
                "repeated; they are passed over: admission=%s asked=%d allowed=%d",
                self._name,
                len(asked),
                len(allowed),
            )
        return allowed
