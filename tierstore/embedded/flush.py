"""A flush: each tier on its own, so that one that hangs takes no time from the others.

    writing  -> recording -> syncing -> over
    demotes     catalog      device

A tier may be given up at each step, when it has not moved for long enough.
"""

import logging
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

from tierstore.bounded_log import bounded
from tierstore.embedded.tier_pace import TierWait
from tierstore.errors import BackendError
from tierstore.executor.syncing import AfterSync, PendingSync
from tierstore.tier.stack import TierStack

__all__ = ["Flush", "Syncer"]

_logger = bounded(logging.getLogger(__name__))

Syncer: TypeAlias = Callable[[int, AfterSync], PendingSync]
"""`DataPlane.begin_sync`."""

_LOST_ROUNDS_MAX = 3
"""So often a flush writes again what is lost while it is done; then it complains."""


class _Step(Enum):
    WRITING = "writing"
    RECORDING = "recording"
    SYNCING = "syncing"
    OVER = "over"


class Flush:
    """Brings what the tiers have at its beginning to their devices, by as many steps as it takes.

    What is stored later is left to the next flush, or this one would not end while others store.
    """

    def __init__(self, stack: TierStack, begin_sync: Syncer, waits: list[TierWait]) -> None:
        """Ask the cascades for what is missing; `waits` are by tier."""
        self._tiers = [
            _TierFlush(stack, tier_idx, begin_sync, wait) for tier_idx, wait in enumerate(waits)
        ]

    def is_over(self, now: float) -> bool:
        """Go on with every tier as far as possible now; return whether all have come to an end."""
        are_over = [tier.advance(now) for tier in self._tiers]
        return all(are_over)

    def raise_complaints(self) -> None:
        """Raise what the flush could not do.

        Raises:
            BackendError: chunks are missing in a tier, or may not be on its device.
        """
        problems = [
            f"tier {tier.name}: {', '.join(complaints)}"
            for tier in self._tiers
            if (complaints := tier.complaints())
        ]
        if problems:
            raise BackendError(
                f"flush: {'; '.join(problems)}. What was not written is in memory only, and tried "
                "again by the next flush"
            )


class _TierFlush:
    """The flush of one tier."""

    def __init__(self, stack: TierStack, tier_idx: int, begin_sync: Syncer, wait: TierWait) -> None:
        self._stack = stack
        self._tier_idx = tier_idx
        self._begin_sync = begin_sync
        self._wait = wait
        self._cascade = stack.cascades[tier_idx]
        self._demotes = self._cascade.demotes
        self._secondary = stack.secondaries[tier_idx]
        self._victims = (
            stack.primary.coldest(len(stack.primary)) if self._cascade.records_victims else []
        )
        self._hear_losses()
        self._loss_count = self._cascade.loss_count
        self._demotes.begin_retry()
        self._ticket: int | None = None
        """The last one that is waited for, once all is asked for."""
        self._was_out_of_use = False
        """When writing ended: what failed is asked for again if the tier is back before the end."""
        self._change_count = self._secondary.change_count
        self._step = _Step.WRITING
        self._sync: PendingSync | None = None
        self._rounds_left = _LOST_ROUNDS_MAX
        self._is_lost_still = False
        self._unsynced_count = 0
        self._given_up_at: _Step | None = None
        self._missing_count = 0

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._cascade.name

    def advance(self, now: float) -> bool:
        """Do what can be done now; return whether the tier has come to its end."""
        self._start_over()
        if self._step is _Step.WRITING and self._is_written():
            self._step = _Step.RECORDING
            self._was_out_of_use = not self._cascade.is_awaited
        if self._is_recorded():
            # After its end the payload is on the device as well as the catalog that names it.
            self._unsynced_count = self._wait.pace.unsynced_count
            self._sync = self._begin_sync(self._tier_idx, self._secondary.sync)
            self._step = _Step.SYNCING
        if self._step is _Step.SYNCING and self._sync is not None and self._sync.is_done:
            self._end_sync(self._sync)
        if self._step is not _Step.OVER and self._wait.is_vain(now):
            self._give_up(now)
        return self._step is _Step.OVER

    def _start_over(self) -> bool:
        """Write again if the tier is back, or its catalog was lost; return whether that is so.

        What a lost catalog has recorded is in memory only, if it is there still.
        """
        is_changed = self._secondary.change_count != self._change_count
        self._change_count = self._secondary.change_count
        is_back = self._was_out_of_use and self._demotes.retried_ticket > (self._ticket or 0)
        if self._given_up_at is not None or not (is_changed or is_back):
            return False
        self._step, self._sync = _Step.WRITING, None
        return True

    def _is_recorded(self) -> bool:
        """Return whether the catalog has done what it was asked for, and is still the same."""
        is_idle = self._step is _Step.RECORDING and self._secondary.wait(0)
        return not self._start_over() and is_idle

    def complaints(self) -> list[str]:
        """Return which chunks the tier lacks or may lose, and why, in words."""
        pace = self._wait.pace
        complaints = self._demotes.complaints()
        if complaints:
            catalog_cause = self._secondary.complaint
            causes = [cause for cause in (pace.cause, catalog_cause) if cause]
            complaints += [f"last cause: {cause}" for cause in causes]
        if self._secondary.is_lost:
            count = len(self._stack.primary)
            complaints.append(f"its path is lost, with the records of {count} chunks in memory")
        if self._given_up_at is _Step.WRITING:
            complaints.append(
                f"it refuses, or has not moved for {self._wait.stall_seconds:g} s, and "
                f"{self._missing_count} chunks wait for it"
            )
        if self._is_lost_still:
            complaints.append("its payload is removed again and again while it is written")
        if pace.unsynced_count:
            complaints += self._unsynced_complaints(pace.unsynced_count)
        return complaints

    def _unsynced_complaints(self, chunk_count: int) -> list[str]:
        if self._given_up_at is _Step.RECORDING:
            return [f"its catalog does not answer, and may lack {chunk_count} chunks"]
        if self._given_up_at is _Step.SYNCING:
            seconds = self._wait.stall_seconds
            return [f"no flush within {seconds:g} s, and {chunk_count} chunks may not be on it"]
        why = "" if self._sync is None else self._sync.why
        return [f"{chunk_count} chunks may not be on its device: {why}"] if why else []

    def _is_written(self) -> bool:
        """Return whether nothing that was asked for before this flush is on its way any more."""
        unrecorded_count = self._ask_for_victims()
        demotes = self._demotes
        if demotes.is_retrying or unrecorded_count:
            self._ticket = None
            return False
        if self._ticket is None:
            self._ticket = demotes.queue.newest_ticket
        # What failed is asked for again between two looks, too: after a trial, or an opening.
        self._ticket = max(self._ticket, demotes.retried_ticket)
        if not demotes.has_work():
            return True
        # Others store meanwhile: neither their chunks nor the bytes they evict are waited for.
        return demotes.queue.newest_ticket > self._ticket and not demotes.has_demotes(self._ticket)

    def _ask_for_victims(self) -> int:
        """Ask an `on_evict` tier for the chunks in memory; return how many it lacks still."""
        return self._stack.demote_resident(self._tier_idx, self._victims) if self._victims else 0

    def _end_sync(self, sync: PendingSync) -> None:
        self._step = _Step.OVER
        if self._is_lost():
            self._write_lost_again()
        elif not sync.why:
            self._wait.pace.unsynced_count -= self._unsynced_count
        elif not self._secondary.wait(0) and self._secondary.is_lost:
            self._step = _Step.RECORDING  # it is about to be closed, and opened again
        else:
            self._start_over()

    def _hear_losses(self) -> None:
        if self._cascade.hear_losses():
            _logger.warning(
                "payload was removed, or cut off; what is in memory is written again: tier=%s",
                self.name,
            )

    def _is_lost(self) -> bool:
        """Return whether payload was lost since this flush looked, or another one, which told."""
        self._hear_losses()
        return self._cascade.loss_count != self._loss_count

    def _write_lost_again(self) -> None:
        self._is_lost_still = not self._rounds_left
        if self._rounds_left:
            self._rounds_left -= 1
            self._loss_count = self._cascade.loss_count
            self._demotes.begin_retry()
            self._step, self._sync, self._ticket = _Step.WRITING, None, None

    def _give_up(self, now: float) -> None:
        if self._step is _Step.WRITING:
            self._wait.pace.stands_still = True
            self._missing_count = max(self._demotes.queue.held_count(), self._ask_for_victims())
            if not self._missing_count:
                # Evicted bytes that cannot be given back are no chunks that are missing.
                self._step = _Step.RECORDING
                self._wait = self._wait.rest_of(now)
                return
        self._given_up_at = self._step
        self._step = _Step.OVER
        self._was_out_of_use = False
