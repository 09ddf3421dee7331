"""`flush` tells the truth: what could not be written is named, and tried again."""

import errno
import math
import time
from functools import partial

import pytest
from failing_device import FailingDevice
from store_kit import Chunks, config_of
from waiting import within_seconds

from tierstore import TierStore
from tierstore.backend.opening import open_backend
from tierstore.embedded.planes import Patience
from tierstore.errors import BackendError
from tierstore.testing.faults import (
    FaultPlan,
    FaultRule,
    FaultSchedule,
    faulty_backend_opener,
    faulty_system_opener,
)
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
SOUND_SECONDS = 5.0
"""Of patience with a tier that hangs, where a sound one of a busy machine must not lose it."""
CASCADES = ["write_through", "on_evict", "second_touch"]


class Writes:
    """The writes of one tier, which fail or hang until they are healed."""

    def __init__(self, tier="disk", *, kind="error", reason=None):
        code = "ENOSPC" if reason is FailureReason.FULL else "EIO"
        self.plan = FaultPlan(
            FaultRule(kind=kind, error=code, calls=("backend.write",)), tiers=tier
        )
        self.open = faulty_backend_opener(self.plan)

    @property
    def count(self):
        return self.plan.call_count("backend.write")


def put_twice(store, numbers):
    """Store chunks and use them, so that any cascade admits them."""
    assert CHUNKS.put(store, numbers) == len(numbers)
    assert CHUNKS.put(store, numbers) == len(numbers)


def recorded(store, numbers, tier_idx=0):
    places = store._stack.secondaries[tier_idx].locate(CHUNKS.keys(numbers))
    return [n for n, place in zip(numbers, places, strict=True) if place is not None]


@pytest.mark.parametrize("cascade", CASCADES)
def test_no_flush_ends_well_while_the_breaker_comes_and_goes(tmp_path, cascade):
    """Writes fail and what they would have taken is given back with success, over and over.

    That puts the tier out of use and in use again within one flush, at any of its steps.
    """
    for attempt in range(12):
        writes = Writes(reason=FailureReason.IO_ERROR)
        config = config_of(tmp_path / str(attempt), cascade=cascade)
        with TierStore.open(config, CHUNKS.manifest, open_backend=writes.open) as store:
            put_twice(store, range(24))
            for _ in range(3):
                with pytest.raises(BackendError, match=r"tier disk: .*chunks could not be written"):
                    store.flush()
            writes.plan.heal()
            store.flush()
            assert recorded(store, range(24)) == list(range(24))


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("reason", [FailureReason.IO_ERROR, FailureReason.FULL])
def test_a_flush_names_what_was_not_written_and_writes_it_when_the_device_is_back(
    tmp_path, cascade, reason
):
    writes = Writes(reason=reason)
    config = config_of(tmp_path, cascade=cascade)
    with TierStore.open(config, CHUNKS.manifest, open_backend=writes.open) as store:
        put_twice(store, range(24))
        for _ in range(2):
            with pytest.raises(BackendError, match=rf"tier disk: 24 .*{reason.value}"):
                store.flush()
        assert recorded(store, range(24)) == []
        writes.plan.heal()
        store.flush()
        assert recorded(store, range(24)) == list(range(24))
        write_count = writes.count
        store.flush()
        assert writes.count == write_count, "a flush wrote again what is recorded"
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(24)) == list(range(24))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EFBIG], ids=errno.errorcode.get)
def test_a_flush_to_a_kernel_that_refuses_every_write_fails_until_it_works(tmp_path, code):
    schedule = FaultSchedule(1 << 40, fail_count=math.inf)
    config = config_of(tmp_path)
    opener = faulty_system_opener(schedule, code)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        schedule.fail_from_now()
        CHUNKS.put(store, range(24))
        with pytest.raises(BackendError, match="tier disk: 24 chunks"):
            store.flush()
        schedule.heal()
        store.flush()
        assert recorded(store, range(24)) == list(range(24))
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(24)) == list(range(24))


@pytest.mark.parametrize("cascade", CASCADES)
def test_what_failed_is_written_when_a_later_write_shows_that_the_device_is_back(tmp_path, cascade):
    writes = Writes(reason=FailureReason.IO_ERROR)
    config = config_of(tmp_path, primary="2MiB", cascade=cascade)
    with TierStore.open(config, CHUNKS.manifest, open_backend=writes.open) as store:
        put_twice(store, range(8))
        with pytest.raises(BackendError):
            store.flush()
        writes.plan.heal()
        put_twice(store, range(100, 120))  # with `on_evict`, the others are the victims of these
        if cascade == "on_evict":
            put_twice(store, range(120, 132))
        assert within_seconds(lambda: recorded(store, range(8)) == list(range(8)))


def test_chunks_that_left_memory_are_no_reason_for_a_flush_to_fail(tmp_path):
    writes = Writes(reason=FailureReason.IO_ERROR)
    config = config_of(tmp_path, primary="2MiB")
    with TierStore.open(config, CHUNKS.manifest, open_backend=writes.open) as store:
        CHUNKS.put(store, range(8))
        with pytest.raises(BackendError, match=r"tier disk: 8 chunks"):
            store.flush()
        for first in range(100, 200, 4):
            CHUNKS.put(store, range(first, first + 4))
        resident = store.stats().primary_chunk_count
        with pytest.raises(BackendError, match=rf"tier disk: {resident} chunks"):
            store.flush()
        store.reset()
        store.flush()


def test_a_flush_writes_what_found_no_room_in_the_write_queue(tmp_path):
    writes = Writes(kind="hang")
    config = config_of(tmp_path, io={"write_queue": "256KiB"})
    patience = Patience(put_seconds=0.1)
    with TierStore.open(
        config, CHUNKS.manifest, open_backend=writes.open, patience=patience
    ) as store:
        for number in range(24):
            assert CHUNKS.put(store, [number]) == 1
        assert store.stats().counters['dropped_demotes_total{reason="queue_full"}'] >= 20
        writes.plan.heal()
        store.flush()
        assert recorded(store, range(24)) == list(range(24))


def two_tiers(path, cascade):
    config = config_of(path / "0", primary="4MiB", cascade=cascade, io={"write_queue": "512KiB"})
    (first,) = config["secondary"]
    second = first | {"name": "second", "path": str(path / "1")}
    config["secondary"].append(second)
    return config


@pytest.mark.parametrize("failing", ["disk", "second"])
@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_a_tier_that_refuses_leaves_the_other_complete(tmp_path, cascade, failing):
    writes = Writes(failing, reason=FailureReason.IO_ERROR)
    config = two_tiers(tmp_path, cascade)
    sound_idx = ["disk", "second"].index(failing) ^ 1
    with TierStore.open(config, CHUNKS.manifest, open_backend=writes.open) as store:
        for first in range(0, 120, 4):
            assert CHUNKS.put(store, range(first, first + 4)) == 4
        with pytest.raises(BackendError, match=rf"^flush: tier {failing}: \d+ chunks[^;]*$"):
            store.flush()
        assert recorded(store, range(120), sound_idx) == list(range(120))


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("hung", ["disk", "second"])
def test_a_tier_that_hangs_takes_no_record_from_the_other(tmp_path, caplog, cascade, hung):
    writes = Writes(hung, kind="hang")
    sound_idx = ["disk", "second"].index(hung) ^ 1
    patience = Patience(put_seconds=SOUND_SECONDS, flush_seconds=SOUND_SECONDS, close_seconds=0.3)
    store = TierStore.open(
        two_tiers(tmp_path, cascade),
        CHUNKS.manifest,
        open_backend=writes.open,
        patience=patience,
    )
    try:
        for first in range(0, 120, 4):
            assert CHUNKS.put(store, range(first, first + 4)) == 4
        with pytest.raises(BackendError, match=rf"^flush: tier {hung}: [^;]*has not moved[^;]*$"):
            store.flush()
        assert recorded(store, range(120), sound_idx) == list(range(120))
        assert CHUNKS.found(store, range(110, 120)) == list(range(110, 120))
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 30  # with default patience of each step: a minute
        (message,) = [r.getMessage() for r in caplog.records if "close without" in r.getMessage()]
        assert f"tier {hung}" in message
        assert "chunks wait" in message
    finally:
        writes.plan.heal()
        store.close()


def test_a_device_that_hangs_in_its_flush_is_named_in_time(tmp_path):
    plan = FaultPlan(FaultRule(kind="hang", calls=("backend.sync",)))
    opener = faulty_backend_opener(plan)
    patience = Patience(flush_seconds=SOUND_SECONDS, close_seconds=0.3)
    store = TierStore.open(
        config_of(tmp_path), CHUNKS.manifest, open_backend=opener, patience=patience
    )
    try:
        CHUNKS.put(store, range(4))
        with pytest.raises(BackendError, match="tier disk: no flush within"):
            store.flush()
        assert CHUNKS.found(store, range(4)) == list(range(4))
        store.close()
    finally:
        plan.heal()


def test_a_flush_beside_a_tier_that_hangs_hides_no_later_failure_of_a_device(tmp_path):
    plan = FaultPlan(FaultRule(kind="hang", calls=("backend.sync",)), tiers="second")
    device = FailingDevice()
    opener = faulty_backend_opener(plan, partial(open_backend, system=device))
    patience = Patience(flush_seconds=SOUND_SECONDS, close_seconds=1)
    store = TierStore.open(
        two_tiers(tmp_path, "write_through"),
        CHUNKS.manifest,
        open_backend=opener,
        patience=patience,
    )
    try:
        CHUNKS.put(store, range(8))
        with pytest.raises(BackendError, match=r"^flush: tier second: no flush within"):
            store.flush()
        plan.heal()
        device.refuse("flush")
        CHUNKS.put(store, range(8, 12))
        with pytest.raises(BackendError, match="tier disk: 4 chunks may not be on its device"):
            store.flush()
    finally:
        plan.heal()
        device.heal()
        store.close()
