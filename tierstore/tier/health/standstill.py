"""How long nothing has moved that should, as seen by a control plane that looks now and then."""

from tierstore.clock import Clock

__all__ = ["Standstill"]

_DEADLINES = 5
"""Writes of which none is answered for so many deadlines hang. More than one, for they wait behind
reads and behind each other."""

_LOOKS_MIN = 8
"""Times that a control plane must have looked for answers meanwhile: one that is idle looks rarely,
and answers that it has not fetched are no sign of a hang."""


class Standstill:
    """Adds up the time without an answer. One thread."""

    def __init__(self, deadline_seconds: float, clock: Clock) -> None:
        """Begin now, with nothing under way."""
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._seconds_max = _DEADLINES * deadline_seconds
        self._stood_seconds = 0.0
        self._looked_at = clock.seconds()
        self.has_stalled = False
        """Nothing has moved for a deadline since the user took note of it and cleared this."""

    def end(self) -> None:
        """Take note that something has moved, or nothing is under way."""
        self._stood_seconds = 0.0

    def look(self, *, is_expected: bool) -> bool:
        """Look again; `is_expected`: something is under way. True: it stands still."""
        now = self._clock.seconds()
        elapsed = min(now - self._looked_at, self._seconds_max / _LOOKS_MIN)
        self._looked_at = now
        if not is_expected:
            self.end()
            return False
        self._stood_seconds += elapsed
        self.has_stalled = self.has_stalled or self._stood_seconds > self._deadline_seconds
        if self._stood_seconds <= self._seconds_max:
            return False
        self.end()
        return True
