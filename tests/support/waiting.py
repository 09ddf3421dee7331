"""Waiting for what another thread or process does, however long that takes."""

import time

_SECONDS_MAX = 120


def within_seconds(condition, seconds_max=_SECONDS_MAX):
    """Return whether a condition comes to hold; it is asked a hundred times a second."""
    until = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
