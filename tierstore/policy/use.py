"""On whose behalf chunks are stored, found and used: what policies and admissions may go by."""

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["UNKNOWN_USE", "UseContext"]

_INTERNED_MAX = 4096


@dataclass(frozen=True, slots=True)
class UseContext:
    """One request's use of a batch of chunks of one prefix.

    It is made once per request and batch, and passed by reference from the planner through the
    tiers to policies, admissions and catalogs. If none needs uses, all are `UNKNOWN_USE`.
    """

    request_id: str = ""
    """The engine's name of the request; empty: unknown, or several requests in one batch."""
    parent_id: str = ""
    """The request whose answer this one continues; empty: none, or unknown."""
    turn: int = 0
    """How many requests of the same conversation came before."""
    depth: int = 0
    """How many chunks of the prefix lie before the first one of the batch. Chunks that one load
    brings are told with the depth of the first one that it loads, from memory or from disk."""
    priority: int = 0
    """As the engine's: the smaller, the more urgent."""
    hints: tuple[tuple[str, str], ...] = ()
    """What the user said of the request, by name, in the order of the names."""
    cost_seconds: float = 0.0
    """What it takes to compute one chunk of the batch again; 0: unknown."""

    @classmethod
    @lru_cache(maxsize=_INTERNED_MAX)
    def of(
        cls,
        request_id: str = "",
        *,
        parent_id: str = "",
        turn: int = 0,
        depth: int = 0,
        priority: int = 0,
        hints: tuple[tuple[str, str], ...] = (),
        cost_seconds: float = 0.0,
    ) -> "UseContext":
        """Return the one value of these fields, as long as it is among the last few thousand."""
        return cls(request_id, parent_id, turn, depth, priority, hints, cost_seconds)

    def by(self, request_id: str) -> "UseContext":
        """Return what is known here of a request, under the name that the engine gives it."""
        return self._with(request_id, 0)

    def at_depth(self, depth: int) -> "UseContext":
        """Return the same request's use of a batch before which so many chunks lie."""
        return self._with(self.request_id, depth)

    def _with(self, request_id: str, depth: int) -> "UseContext":
        # Through `of`, so that equal uses are one object.
        return self.of(
            request_id,
            parent_id=self.parent_id,
            turn=self.turn,
            depth=depth,
            priority=self.priority,
            hints=self.hints,
            cost_seconds=self.cost_seconds,
        )


UNKNOWN_USE = UseContext()
"""Nothing is known of a use, or it was not asked for."""
