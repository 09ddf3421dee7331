"""What a request says of itself in its `kv_transfer_params`.

    tierstore.cache    false: nothing of the request is stored or loaded
    tierstore.parent   the request whose answer this one continues
    tierstore.turn     how many requests of the same conversation came before
    tierstore.hints    further words, by name, for policies and admissions that know them

Users choose these values: each has a bound, and one that is not understood is left out.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tierstore.bounded_log import bounded
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.quoting import quoted

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["HINT_CHARS_MAX", "HINT_COUNT_MAX", "PARENT_CHARS_MAX", "TURN_MAX", "RequestParams"]

_logger = bounded(logging.getLogger(__name__))

HINT_COUNT_MAX = 8
HINT_CHARS_MAX = 64
"""Of a name or a value."""
PARENT_CHARS_MAX = 128
TURN_MAX = 1_000_000

_CACHE_PARAM = "tierstore.cache"
_PARENT_PARAM = "tierstore.parent"
_TURN_PARAM = "tierstore.turn"
_HINTS_PARAM = "tierstore.hints"


class RequestParams:
    """Reads the parameters of an engine's requests; warns once of each that it does not take."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def may_be_cached(self, request: "Request") -> bool:
        """Return whether the request may be cached; what cannot be understood may not."""
        params = request.kv_transfer_params or {}
        value = params.get(_CACHE_PARAM, True) if isinstance(params, Mapping) else params
        if not isinstance(value, bool):
            self._warn("request is not cached", _CACHE_PARAM, value, "true or false")
        return value is True

    def use_of(self, request: "Request") -> UseContext:
        """Return what is known of a request that may be cached, but for its id."""
        params = request.kv_transfer_params or {}
        priority = getattr(request, "priority", 0)
        if not priority and params.keys().isdisjoint((_PARENT_PARAM, _TURN_PARAM, _HINTS_PARAM)):
            return UNKNOWN_USE
        return UseContext.of(
            parent_id=self._parent(params.get(_PARENT_PARAM, "")),
            turn=self._turn(params.get(_TURN_PARAM, 0)),
            priority=priority,
            hints=self._hints(params.get(_HINTS_PARAM, {})),
        )

    def _parent(self, value: object) -> str:
        if _is_text(value, PARENT_CHARS_MAX):
            return str(value)
        self._warn(
            "parameter is left out",
            _PARENT_PARAM,
            value,
            f"text of at most {PARENT_CHARS_MAX} characters",
        )
        return ""

    def _turn(self, value: object) -> int:
        if type(value) is int and 0 <= value <= TURN_MAX:
            return value
        expected = f"an integer of 0 to {TURN_MAX}"
        self._warn("parameter is left out", _TURN_PARAM, value, expected)
        return 0

    def _hints(self, value: object) -> tuple[tuple[str, str], ...]:
        if (
            type(value) is dict
            and len(value) <= HINT_COUNT_MAX
            and all(_is_text(word, HINT_CHARS_MAX) for pair in value.items() for word in pair)
        ):
            return tuple(sorted(value.items()))
        self._warn(
            "parameter is left out",
            _HINTS_PARAM,
            value,
            f"at most {HINT_COUNT_MAX} names with values, each text of at most {HINT_CHARS_MAX} "
            f"characters",
        )
        return ()

    def _warn(self, what: str, param: str, value: object, expected: str) -> None:
        if param in self._warned:
            return
        self._warned.add(param)  # each request may bring one
        _logger.warning(
            "%s: kv_transfer_params.%s=%s, expected %s (further ones are not logged)",
            what,
            param,
            quoted(value),
            expected,
        )


def _is_text(value: object, chars_max: int) -> bool:
    """Return whether a value is plain text, of no class that could do anything when it is read."""
    return type(value) is str and len(value) <= chars_max
