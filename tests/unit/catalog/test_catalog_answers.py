"""Every ticket has one answer, whichever transaction of the catalog fails."""

import collections

import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.messages import (
    CommitTicket,
    Evict,
    ForgetNamespace,
    ReleaseDone,
    RequestPlaces,
)
from tierstore.errors import BackendFullError
from tierstore.tier_events import Committed, Placed, Refused

CHUNK = 4096
MANY = range(7000, 8200)
"""More records than one transaction evicts for them."""


class FailingWrites:
    """Transactions of an environment, of which the n-th to begin, or to commit, fails."""

    def __init__(self, env, fail_at, *, at_commit):
        self.count = 0
        self._write = env.write
        self._fail_at = fail_at
        self._at_commit = at_commit
        env.write = self

    def __call__(self, database=None):
        self.count += 1
        fails = self.count == self._fail_at
        if fails and not self._at_commit:
            raise BackendFullError("no space")
        return _Failing(self._write(database)) if fails else self._write(database)


class _Failing:
    def __init__(self, context):
        self._context = context

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        failure = BackendFullError("no space")
        self._context.__exit__(BackendFullError, failure, None)
        if error[0] is None:
            raise failure


def fill(harness):
    for first in range(0, 2400, 200):
        assert isinstance(harness.store(*range(first, first + 200)), Placed)


def live(harness):
    """Commit, request, request what evicts in several transactions, reset; return all events."""
    writer, events = harness.writer, []

    def handle(*operations):
        writer.handle(operations)
        while writer.events:
            event = writer.events.popleft()
            events.append(event)
            if hasattr(event, "release_id"):
                writer.handle([ReleaseDone(event.release_id)])

    handle(RequestPlaces(1001, tuple(harness.keys(*range(5000, 5008))), CHUNK))
    handle(
        CommitTicket(1001, frozenset()),
        RequestPlaces(1002, tuple(harness.keys(*range(6000, 6008))), CHUNK),
        RequestPlaces(1003, tuple(harness.keys(*MANY)), CHUNK),
    )
    for _ in range(20):
        handle(Evict())
    placed = {event.ticket for event in events if isinstance(event, Placed)}
    handle(*(CommitTicket(ticket, frozenset()) for ticket in sorted(placed - {1001})))
    handle(ForgetNamespace(harness.manifest.namespace))
    for _ in range(3):
        handle(Evict())
    return events


@pytest.mark.parametrize("at_commit", [False, True], ids=["begin", "commit"])
def test_every_ticket_is_answered_once_whichever_transaction_fails(tmp_path, at_commit):
    """Goal: what was committed is not given up; what failed is, once.

    Method: one life of a catalog, whose n-th transaction fails, for every n there is.
    """
    fail_at = 0
    while True:
        fail_at += 1
        harness = Harness(tmp_path / str(fail_at), capacity=8 * MIB, chunk=CHUNK)
        fill(harness)
        writes = FailingWrites(harness.catalog._env, fail_at, at_commit=at_commit)
        events = live(harness)
        answers = collections.Counter(
            event.ticket for event in events if isinstance(event, Placed | Refused)
        )
        assert answers == {1001: 1, 1002: 1, 1003: 1}, f"transaction {fail_at}"
        placed = collections.Counter(e.ticket for e in events if isinstance(e, Placed))
        committed = collections.Counter(e.ticket for e in events if isinstance(e, Committed))
        assert committed == placed, f"transaction {fail_at}"
        assert not any(harness.located(*range(2400), *range(5000, 5008), *MANY))
        assert harness.catalog.check() == []
        harness.catalog.close()
        if writes.count < fail_at:
            break
    assert fail_at > 6, "hardly any transaction failed: the test tests nothing"
