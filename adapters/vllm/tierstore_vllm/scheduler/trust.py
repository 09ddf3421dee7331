"""Hooks that never raise into the engine, and whether the half behind them is still trusted."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from tierstore.bounded_log import bounded

__all__ = ["Trust", "guarded"]

_logger = bounded(logging.getLogger(__name__))

_FAILURE_COUNT_MAX = 8
"""Failed hooks of single requests after which nothing is cached any more."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Trust:
    """Counts failed hooks; is lost when planning is in doubt or failures repeat.

    Once it is lost, no offload is published and no load is planned any more, so that blocks without
    a fence can do no harm.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._failure_count = 0
        self._failure_causes: set[tuple[str, str]] = set()

    def note_failure(self, hook: str, error: Exception, *, is_fatal: bool) -> None:
        """Log a cause once; lose the trust if that is due."""
        cause = (hook, type(error).__name__)
        if cause not in self._failure_causes:
            self._failure_causes.add(cause)
            _logger.error("scheduler hook failed: hook=%s cause=%s", *cause, exc_info=error)
        self._failure_count += 1
        if is_fatal or self._failure_count >= _FAILURE_COUNT_MAX:
            self.lose(f"{self._failure_count} failed hooks")

    def lose(self, cause: str) -> None:
        """Cache nothing from now on; say so once."""
        if not self.is_lost:
            self.is_lost = True
            _logger.error("tierstore caches nothing from now on: cause=%s", cause)


class _Trusted(Protocol):
    """Whose hooks are guarded."""

    trust: Trust


def guarded(without: object, *, is_fatal: bool) -> Callable[[Hook], Hook]:
    """Answer `without` where a hook fails or the trust is lost; never raise into the engine."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def hook_or_without(half: _Trusted, *args: object) -> object:
            if half.trust.is_lost:
                return without
            try:
                return hook(half, *args)
            except Exception as error:  # noqa: BLE001 - the outermost frame below the engine
                half.trust.note_failure(hook.__name__, error, is_fatal=is_fatal)
                return without

        return cast("Hook", hook_or_without)

    return decorate
