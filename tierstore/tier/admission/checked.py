"""An admission of another package, whose answers are looked at before they are followed."""

import logging
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet

from tierstore.bounded_log import bounded
from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.quoting import named
from tierstore.tier.admission.admitted import AdmittedChunks
from tierstore.tier.admission.protocol import Admission

__all__ = ["CheckedAdmission"]

_logger = bounded(logging.getLogger(__name__))


class CheckedAdmission:
    """Asks an admission, and follows it where it names chunks that it was asked about.

    A demote of any other chunk would read a slot that is not the chunk's, or fail within a change
    of the tiers. The admission gets copies of all that it may change. If it raises an exception, it
    is not asked again: chunks go down when they come if `admits_arrivals` is true, when they are
    about to leave if `admits_victims` is, and else when they are used again. See `Admission`.
    """

    def __init__(self, admission: Admission, name: str) -> None:
        """`name` is for the log."""
        self._admission: Admission | None = admission
        self._name = name
        self.needs_use = bool(admission.needs_use)
        self.admits_arrivals = bool(admission.admits_arrivals)
        self.admits_victims = bool(admission.admits_victims)
        self._admitted = AdmittedChunks()

    def on_resident(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote those of the chunks that the admission names."""
        chosen = self._ask(lambda admission: admission.on_resident(list(keys), use), keys)
        if chosen is None:
            return keys if self.admits_arrivals else ()
        return chosen

    def on_touched(
        self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE
    ) -> Sequence[OffloadKey]:
        """Demote those that the admission names and that are not admitted yet."""
        chosen = self._ask(lambda admission: admission.on_touched(list(keys), use), keys)
        if chosen is None:
            chosen = () if self.admits_arrivals or self.admits_victims else keys
        return self._admitted.missing(chosen)

    def on_victims(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Demote those that the admission names and that are not admitted yet."""
        chosen = self._ask(lambda admission: admission.on_victims(list(keys)), keys)
        if chosen is None:
            chosen = keys if self.admits_victims else ()
        return self._admitted.missing(chosen)

    def on_admitted(self, keys: Sequence[OffloadKey]) -> None:
        """Tell the admission (`Admission.on_admitted`)."""
        self._admitted.add(keys)
        self._tell(lambda admission: admission.on_admitted(list(keys)))

    def on_promoted(self, keys: Sequence[OffloadKey], use: UseContext = UNKNOWN_USE) -> None:
        """Tell the admission (`Admission.on_promoted`)."""
        self._admitted.add(keys)
        self._tell(lambda admission: admission.on_promoted(list(keys), use))

    def on_evicted(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many the admission wanted, at most those that were never asked for."""
        unasked_count = len(self._admitted.missing(keys))
        self._admitted.discard(keys)
        wanted: list[int] = []
        self._tell(lambda admission: wanted.append(int(admission.on_evicted(list(keys)))))
        return max(0, min(unasked_count, *wanted)) if wanted else 0

    def on_withdrawn(self, keys: Collection[OffloadKey]) -> None:
        """Tell the admission (`Admission.on_withdrawn`)."""
        self._admitted.discard(keys)
        self._tell(lambda admission: admission.on_withdrawn(list(keys)))

    def on_records_lost(self, queued: AbstractSet[OffloadKey]) -> None:
        """Tell the admission (`Admission.on_records_lost`)."""
        self._admitted.keep(queued)
        self._tell(lambda admission: admission.on_records_lost(frozenset(queued)))

    def reset(self, queued: AbstractSet[OffloadKey]) -> None:
        """Tell the admission (`Admission.reset`)."""
        self._admitted.keep(queued)
        self._tell(lambda admission: admission.reset(frozenset(queued)))

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that were asked for, or came from the tier; the admission is not asked."""
        return self._admitted.present(keys)

    def _ask(
        self, ask: Callable[[Admission], Sequence[OffloadKey]], keys: Sequence[OffloadKey]
    ) -> Sequence[OffloadKey] | None:
        """Return those of the keys that the admission names, in its order; None: it failed."""
        named_keys: list[OffloadKey] = []
        self._tell(lambda admission: named_keys.extend(dict.fromkeys(ask(admission))))
        if self._admission is None:
            return None
        asked_about = set(keys)
        return [key for key in named_keys if type(key) is bytes and key in asked_about]

    def _tell(self, call: Callable[[Admission], object]) -> None:
        if self._admission is None:
            return
        try:
            call(self._admission)
        except Exception as error:  # noqa: BLE001 - whatever another package raises
            self._admission = None
            _logger.error(
                "an admission failed and is not asked any more, chunks go down by a built-in rule: "
                "cascade=%s cause=%s",
                self._name,
                named(error),
            )
