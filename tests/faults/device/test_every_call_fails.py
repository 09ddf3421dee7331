"""Every single call to a device, a database or a backend fails: nothing acknowledged is lost.

Method: two lives of a store (store, promote, reset, evict, restart) are run with their n-th call
failing, once or from then on, for n = 1, 2, ... to the last; see `lives` for what has to be kept.
The sampled tests take every so-manieth n, from a random first one; those marked `exhaustive` all.
"""

import itertools
import random
import shutil

import pytest
from lives import live_under, random_rules

from tierstore.testing.faults import FaultPlan, FaultRule

RUNS_SAMPLED = 4
NEVER = 1 << 40


def count_calls(tmp_path, **kind):
    plan = FaultPlan()
    outcome = live_under(tmp_path / "sound", plan, **kind)
    assert outcome.problems == []
    shutil.rmtree(tmp_path / "sound")
    return outcome.counts["calls"]


def fail_each(tmp_path, numbers, times, code, **kind):
    """Run lives with call n failing, for each number; return how many of them had such a call."""
    struck = 0
    for n in numbers:
        plan = FaultPlan(FaultRule(kind="error", error=code, nth=n, times=times))
        outcome = live_under(tmp_path / str(n), plan, is_passing=times == 1, **kind)
        assert outcome.problems == [], (n, *map(str, plan.trace[:3]))
        shutil.rmtree(tmp_path / str(n))
        struck += plan.strike_count > 0
    return struck


def sample(tmp_path, times, code, **kind):
    call_count = count_calls(tmp_path, **kind)
    step = call_count // RUNS_SAMPLED
    first = random.randrange(1, step + 1)
    print(f"{call_count} calls, every {step}th from {first}")
    numbers = range(first, call_count + 1, step)
    # How many calls there are depends a little on which thread is faster.
    assert fail_each(tmp_path, numbers, times, code, **kind) >= RUNS_SAMPLED - 2


def named(**values):
    return [pytest.param(value, id=name) for name, value in values.items()]


device_kinds = pytest.mark.parametrize(
    "kind",
    named(
        **{
            f"{backend}-{'crowded' if is_crowded else 'roomy'}": {
                "backend": backend,
                "is_crowded": is_crowded,
            }
            for backend, is_crowded in itertools.product(["file", "lmdb"], [False, True])
        }
    ),
)
backend_kinds = pytest.mark.parametrize(
    "kind",
    named(
        **{
            f"{backend}-{cascade}-{tier_count}": {
                "backend": backend,
                "cascade": cascade,
                "tier_count": tier_count,
                "by_backend": True,
            }
            for backend, cascade, tier_count in itertools.product(
                ["file", "lmdb"], ["write_through", "on_evict"], [1, 2]
            )
        }
    ),
)
durations = pytest.mark.parametrize("times", named(once=1, for_good=None))
codes = pytest.mark.parametrize("code", ["EIO", "ENOSPC"])


@device_kinds
@durations
def test_a_failing_call_to_a_device_loses_nothing_acknowledged(tmp_path, kind, times):
    sample(tmp_path, times, random.choice(["EIO", "ENOSPC"]), **kind)


@backend_kinds
@durations
def test_a_failing_call_of_a_backend_loses_nothing_acknowledged(tmp_path, kind, times):
    sample(tmp_path, times, random.choice(["EIO", "ENOSPC"]), **kind)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@device_kinds
@durations
@codes
def test_each_failing_call_to_a_device_loses_nothing_acknowledged(tmp_path, kind, times, code):
    numbers = range(1, count_calls(tmp_path, **kind) + 1)
    assert fail_each(tmp_path, numbers, times, code, **kind) > 0.9 * len(numbers)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@backend_kinds
@durations
@codes
def test_each_failing_call_of_a_backend_loses_nothing_acknowledged(tmp_path, kind, times, code):
    numbers = range(1, count_calls(tmp_path, **kind) + 1)
    assert fail_each(tmp_path, numbers, times, code, **kind) > 0.9 * len(numbers)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_faults_of_several_kinds_at_once_lose_nothing_acknowledged(tmp_path, backend):
    for seed in random.sample(range(1 << 32), 5):
        plan = FaultPlan(*random_rules(seed), seed=seed)
        outcome = live_under(tmp_path / str(seed), plan, backend=backend)
        assert outcome.problems == [], (seed, *map(str, plan.trace[:10]))


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_a_backend_that_drops_a_write_in_silence_is_found_out(tmp_path, backend):
    """Goal: the tests above can fail. A write in the middle holds records that nothing resets."""
    sound = FaultPlan()
    live_under(tmp_path / "sound", sound, backend=backend, by_backend=True)
    nth = sound.call_count("backend.write") // 2 + 1
    plan = FaultPlan(FaultRule(kind="lose", calls=("backend.write",), nth=nth, times=1))
    outcome = live_under(tmp_path / "lossy", plan, backend=backend, by_backend=True)
    assert outcome.counts["lost"] > 0
    assert any("not found" in problem for problem in outcome.problems)


def test_a_backend_that_keeps_what_it_was_told_to_release_is_found_out(tmp_path):
    plan = FaultPlan(FaultRule(kind="lose", calls=("backend.release",)))
    outcome = live_under(tmp_path, plan, backend="file", is_crowded=True, by_backend=True)
    assert any("over quota" in problem for problem in outcome.problems)
