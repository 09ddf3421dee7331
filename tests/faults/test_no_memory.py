"""The system has no memory left at any call to a device: an outage that passes."""

import itertools

import pytest
from lives import live_under

from tierstore.faults import DATABASE_CALLS
from tierstore.testing.faults import FaultPlan, FaultRule


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("times", [pytest.param(1, id="once"), pytest.param(None, id="for_good")])
def test_no_memory_at_a_point_of_a_database_is_an_outage_that_passes(tmp_path, backend, times):
    points = [point for point in DATABASE_CALLS if point != "database.committed"]
    struck = 0
    for point, nth in itertools.product(points, (1, 9)):
        plan = FaultPlan(FaultRule(kind="memory", calls=(point,), nth=nth, times=times))
        path = tmp_path / f"{point}-{nth}"
        outcome = live_under(path, plan, backend=backend, is_passing=times == 1)
        assert outcome.problems == [], (point, nth)
        struck += plan.strike_count > 0
    assert struck > len(points)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_no_memory_at_a_call_to_the_device_is_an_outage_that_passes(tmp_path, backend):
    calls = ["open", "make_directory", "pwritev", "preadv", "allocate", "flush", "unlink"]
    for call in calls:
        plan = FaultPlan(FaultRule(kind="memory", calls=(call,), nth=2, times=3))
        outcome = live_under(tmp_path / call, plan, backend=backend, is_passing=True)
        assert outcome.problems == [], call
