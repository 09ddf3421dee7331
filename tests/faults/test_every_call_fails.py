"""Every single call to the backends, and to the kernel, fails once: the store stays right.

Method: a life of a store (store more than it holds, promote, flush, restart) is run with its n-th
call failing, for n = 1, 2, ... until one run ends without a failure. The sampled tests take every
so-manieth n, from a random first one; the tests marked
`exhaustive` take all.
"""

import contextlib
import errno
import itertools
import random
import shutil

import pytest
from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.errors import BackendError
from tierstore.testing.faults import FaultSchedule, faulty_opener, faulty_system_opener
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
CAPACITY_BYTES = 8 * MIB
NUMBERS = range(128)
AFTERWARDS = range(1000, 1008)
RUNS_SAMPLED = 5
RUNS_MAX = 2000


def config_below(path, *, backend, cascade, tier_count):
    config = config_of(
        path / "0",
        backend=backend,
        primary="2MiB",
        capacity="8MiB",
        cascade=cascade,
        io={"threads": 1, "durable": True},
    )
    (first,) = config["secondary"]
    config["secondary"] = [
        first | {"name": f"disk{number}", "path": str(path / str(number))}
        for number in range(tier_count)
    ]
    return config


def live(store):
    """Store more than all tiers hold, load some of it, flush; return how many came back."""
    found_count = 0
    for first in NUMBERS[::16]:
        assert CHUNKS.put(store, range(first, first + 16)) == 16
        store.match_prefix(CHUNKS.keys(NUMBERS))
        found_count += len(CHUNKS.found(store, range(first // 2, first // 2 + 8)))
    with contextlib.suppress(BackendError):  # its documented answer to a device that refuses
        store.flush()
    assert store.check() == []
    return found_count


def losses(store):
    """Count what a chunk that is not found may have fallen to."""
    stats = store.stats()
    counted = sum(
        count
        for name, count in stats.counters.items()
        if name.startswith(("dropped_demotes", "misses"))
    )
    return counted + sum(tier.evicted_count for tier in stats.secondary.values())


def live_with_a_failure(path, opener, **kind):
    config = config_below(path, **kind)
    folders = [path / str(number) for number in range(kind["tier_count"])]
    counted = 0
    for _ in range(2):
        with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
            live(store)
            counted += losses(store)
        for folder in folders:
            assert du(folder) <= CAPACITY_BYTES
    with CHUNKS.open(config) as store:
        assert store.check() == []
        found = CHUNKS.found(store, NUMBERS)
        counted += losses(store)
        assert len(NUMBERS) - len(found) <= counted, "chunks were lost that nobody counted"
        assert CHUNKS.put(store, AFTERWARDS) == len(AFTERWARDS)
        store.flush()
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, AFTERWARDS) == list(AFTERWARDS), "a tier is not in use again"
    for folder in folders:
        assert du(folder) <= CAPACITY_BYTES


def fail_each(tmp_path, open_failing, numbers, **kind):
    """Run one life per number; stop behind the last call."""
    run_count = 0
    for n in numbers:
        schedule = FaultSchedule(n)
        live_with_a_failure(tmp_path / str(n), open_failing(schedule), **kind)
        shutil.rmtree(tmp_path / str(n))
        if not schedule.has_struck:
            return run_count
        run_count += 1
    return run_count


def sample(tmp_path, open_failing, **kind):
    """Fail about `RUNS_SAMPLED` calls, spread evenly over one life."""
    schedule = FaultSchedule(RUNS_MAX * 1000)
    live_with_a_failure(tmp_path / "sound", open_failing(schedule), **kind)
    step = max(1, schedule.call_count // RUNS_SAMPLED)
    first = random.randrange(1, step + 1)
    print(f"{schedule.call_count} calls, every {step}th from {first}")
    run_count = fail_each(
        tmp_path, open_failing, range(first, schedule.call_count + 1, step), **kind
    )
    assert run_count >= RUNS_SAMPLED - 2, "hardly any call failed: the test tests nothing"


kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            {"backend": backend, "cascade": cascade, "tier_count": tier_count},
            id=f"{backend}-{cascade}-{tier_count}",
        )
        for backend, cascade, tier_count in itertools.product(
            ["file", "lmdb"], ["write_through", "on_evict"], [1, 2]
        )
    ],
)
file_kinds = pytest.mark.parametrize(
    "kind",
    [
        {"backend": "file", "cascade": cascade, "tier_count": tier_count}
        for cascade, tier_count in [("write_through", 1), ("on_evict", 2)]
    ],
    ids=["write_through-1", "on_evict-2"],
)
reasons = pytest.mark.parametrize("reason", [FailureReason.IO_ERROR, FailureReason.FULL])
codes = pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])


@kinds
def test_a_failing_call_of_a_backend_leaves_a_sound_store(tmp_path, kind):
    sample(tmp_path, faulty_opener, **kind)


@file_kinds
@codes
def test_a_failing_system_call_leaves_a_sound_store(tmp_path, kind, code):
    sample(tmp_path, lambda schedule: faulty_system_opener(schedule, code), **kind)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@kinds
@reasons
def test_each_failing_call_of_a_backend_leaves_a_sound_store(tmp_path, kind, reason):
    def open_failing(schedule):
        return faulty_opener(schedule, reason=reason)

    assert fail_each(tmp_path, open_failing, range(1, RUNS_MAX), **kind) > 100


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@file_kinds
@codes
def test_each_failing_system_call_leaves_a_sound_store(tmp_path, kind, code):
    def open_failing(schedule):
        return faulty_system_opener(schedule, code)

    assert fail_each(tmp_path, open_failing, range(1, RUNS_MAX), **kind) > 100
