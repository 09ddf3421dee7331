"""For how long a request waits for chunks that are arriving, or for room."""

from dataclasses import dataclass

__all__ = ["WAIT_COUNT_MAX", "WAIT_SECONDS_MAX", "Wait"]

WAIT_COUNT_MAX = 16
"""Times, and `WAIT_SECONDS_MAX`: a request is told to ask again while chunks are arriving, or while
other transfers hold the room that its hit needs, until both are exceeded; then it takes what is
there and has room.

Mostly they come for another request with the same prefix, in less time than computing them takes.
Questions alone are no measure, since an engine that has nothing else to do asks every millisecond;
nor are seconds, since a step may take as long, and arrivals are reported in the next one.
"""

WAIT_SECONDS_MAX = 2.0
"""The default deadline of a read; see `WAIT_COUNT_MAX`."""


@dataclass(slots=True)
class Wait:
    """For how long a request has been told to ask again, in a row."""

    since_seconds: float
    question_count: int = 0

    def is_over(self, now: float) -> bool:
        """Return whether the request has waited long enough."""
        waited_seconds = now - self.since_seconds
        return self.question_count > WAIT_COUNT_MAX and waited_seconds > WAIT_SECONDS_MAX
