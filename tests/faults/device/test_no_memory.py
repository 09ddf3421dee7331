"""The system has no memory left at any call to a device: an outage that passes."""

import itertools

import pytest
from lives import live_under

from tierstore.faults import DATABASE_CALLS
from tierstore.testing.faults import FaultPlan, FaultRule

POINTS = [point for point in DATABASE_CALLS if point != "database.committed"]


def live_without_memory(path, call, *, backend, nth=1, times=1):
    plan = FaultPlan(FaultRule(kind="memory", calls=(call,), nth=nth, times=times))
    outcome = live_under(path, plan, backend=backend, is_passing=times == 1)
    assert outcome.problems == [], (call, nth)
    return plan.strike_count > 0


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_no_memory_for_once_at_a_point_of_a_database_is_survived(tmp_path, backend):
    struck = [
        live_without_memory(tmp_path / f"{point}-{nth}", point, backend=backend, nth=nth)
        for point, nth in itertools.product(POINTS, (1, 9))
    ]
    assert sum(struck) > len(POINTS)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("point", ["database.read", "database.commit"])
def test_a_database_without_memory_is_an_outage_that_passes(tmp_path, point, backend):
    assert live_without_memory(tmp_path, point, backend=backend, nth=9, times=None)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_no_memory_at_a_call_to_the_device_is_an_outage_that_passes(tmp_path, backend):
    calls = ["open", "make_directory", "pwritev", "preadv", "allocate", "flush", "unlink"]
    struck = [
        live_without_memory(tmp_path / call, call, backend=backend, nth=2, times=3)
        for call in calls
    ]
    assert sum(struck) >= (5 if backend == "file" else 2)
