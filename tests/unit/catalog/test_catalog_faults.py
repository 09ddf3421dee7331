"""A catalog that fails, is damaged, is full, or lost its owner."""

import pytest
from catalog_harness import MIB, Harness

from tierstore.catalog.messages import (
    BeginEpoch,
    CommitTicket,
    ForgetNamespace,
    RemoveKeys,
    RequestPlaces,
    TouchKeys,
)
from tierstore.errors import BackendFullError
from tierstore.testing.faults import FaultPlan, FaultRule
from tierstore.tier_events import Committed, Placed, Refused


def share(first, **options):
    """Open the path of a harness once more, on the same disk."""
    return Harness(first.config.path, backend=first.config.backend, disk=first.disk, **options)


def test_an_operation_that_meets_damage_is_lost_and_no_other(harness):
    for number in range(8):
        harness.store(number)
    databases = harness.catalog._databases
    with harness.catalog._env.write() as txn, txn.cursor(db=databases.order) as cursor:
        assert cursor.last()
        cursor.delete()
    (youngest,) = [number for number in range(8) if number not in harness.order()]
    for number in (100, 200):
        harness.writer.handle([RemoveKeys(tuple(harness.keys(youngest)))])
        assert isinstance(harness.store(number, number + 1), Placed)
        assert harness.located(number, number + 1) == [True, True]
    harness.reopen()
    assert harness.catalog.damage != ""
    assert harness.located(*range(8)) == [False] * 8
    assert harness.catalog.check() == []


def test_a_write_that_meets_damage_is_answered_and_its_keys_can_be_written_again(harness):
    harness.store(*range(4))
    harness.writer.handle([RequestPlaces(70, tuple(harness.keys(50)), harness.chunk)])
    with harness.catalog._env.write() as txn:
        row = txn.pop(b"state", db=harness.catalog._databases.state)
    harness.writer.handle([CommitTicket(70, frozenset())])
    assert Committed(70) in harness.writer.events
    harness.take()
    assert harness.located(50) == [False]
    with harness.catalog._env.write() as txn:
        txn.put(b"state", row, db=harness.catalog._databases.state)
    assert isinstance(harness.store(50), Placed)
    assert harness.located(50) == [True]


def test_writes_and_releases_of_a_dead_owner_are_adopted(tmp_path):
    harness = Harness(tmp_path)
    harness.store(*range(8))
    harness.writer.handle([RemoveKeys(tuple(harness.keys(1)))])
    harness.writer.handle([RequestPlaces(90, tuple(harness.keys(50, 51)), harness.chunk)])
    harness.catalog._owner_lock.close()  # as the kernel does it for a killed process
    harness.unreleased, harness.disk.written = [], set()
    harness.writer.events.clear()
    harness.open()
    harness.take()
    assert len(harness.unreleased) == 2
    assert harness.catalog.check() == []
    harness.release()
    assert harness.catalog.check() == []
    with harness.catalog._env.read(harness.catalog._databases.pending) as txn:
        assert txn.stat(db=harness.catalog._databases.pending)["entries"] == 0
    assert harness.located(0, 1, 50) == [True, False, False]
    harness.catalog.close()


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_what_a_dead_owner_was_writing_is_given_back_with_unreferenced_segments(tmp_path, backend):
    """Goal: pages that come free beside such a segment are released as well, not charged for ever.

    Method: an owner dies while it writes to a segment with records, and one that was forgotten.
    """
    harness = Harness(tmp_path, backend=backend, chunk=4096)
    dead = share(harness, chunk=4096)
    dead.store(*range(4))
    dead.writer.handle([RequestPlaces(90, tuple(dead.keys(50, 51)), dead.chunk)])
    doomed = share(harness, chunk=4096, model="doomed")
    doomed.writer.handle([RequestPlaces(91, tuple(doomed.keys(60)), doomed.chunk)])
    doomed.writer.handle([ForgetNamespace(doomed.manifest.namespace)])
    for gone in (dead, doomed):
        gone.catalog._owner_lock.close()  # as the kernel does it for a killed process
    unreferenced = 1 << 30
    harness.writer.release_unreferenced({unreferenced: 0 if backend == "lmdb" else 16})
    assert harness.catalog.check() == []
    harness.take()
    assert (unreferenced,) in [freed.empty_segments for freed in harness.unreleased]
    harness.release()
    assert harness.catalog.check() == []
    assert harness.row_count("pending") == 0
    assert harness.row_count("segments") == 1
    assert harness.located(0, 1, 2, 3, 50) == [True, True, True, True, False]
    for closed in (harness, dead, doomed):
        closed.catalog.close()


def test_an_unreferenced_segment_that_a_reset_has_left_holds_no_records(tmp_path):
    """Goal: a segment that was given back just after it was listed is not taken for a living one.

    Method: its records are garbage, and are swept before the segment is given back.
    """
    harness = Harness(tmp_path)
    harness.store(*range(8))
    listed = harness.listed()
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    harness.take()
    harness.release()
    assert harness.row_count("segments") == 0
    assert harness.row_count("clusters") > 0
    harness.writer.release_unreferenced(listed)
    assert harness.row_count("segments") == len(listed) > 0
    assert harness.catalog.check() == []
    harness.sweep()
    assert harness.row_count("clusters") == 0
    harness.take()
    harness.release()
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_a_shrunk_capacity_evicts_until_it_fits(tmp_path):
    harness = Harness(tmp_path, capacity=32 * MIB)
    for first in range(0, 480, 16):
        harness.store(*range(first, first + 16))
    harness.catalog.close()
    small = Harness(tmp_path, capacity=8 * MIB)
    small.disk = harness.disk
    small.take()
    small.release()
    small.check_capacity()
    stats = small.catalog.stats()
    assert 0 < stats.charged_bytes <= 8 * MIB
    assert 479 - 15 in small.order()
    assert small.catalog.check() == []
    small.catalog.close()


def test_a_namespace_that_a_failing_catalog_could_not_forget_is_forgotten_later(harness):
    harness.store(1, 2)
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    assert harness.writer.forgotten_count == 0
    harness.catalog._env.write = real
    assert isinstance(harness.store(3), Placed)
    assert harness.writer.forgotten_count == 1
    assert harness.located(1, 2, 3) == [False, False, True]


def test_an_epoch_that_a_failing_catalog_could_not_enter_is_entered_before_its_records(harness):
    epoch = harness.manifest.in_epoch("e")
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([BeginEpoch(epoch.namespace, epoch.canonical_json)])
    harness.catalog._env.write = real
    harness.manifest = epoch
    assert isinstance(harness.store(1), Placed)
    databases = harness.catalog._databases
    for database in (databases.namespaces, databases.epochs):
        with harness.catalog._env.read(database) as txn:
            assert txn.get(epoch.namespace) is not None


def test_a_failing_catalog_refuses_and_recovers(harness):
    harness.store(1)
    harness.writer.handle([RequestPlaces(70, tuple(harness.keys(5)), harness.chunk)])
    real = harness.catalog._env.write

    def broken(*_):
        raise BackendFullError("no space")

    harness.catalog._env.write = broken
    harness.writer.handle([CommitTicket(70, frozenset())])
    harness.writer.handle([RequestPlaces(71, tuple(harness.keys(6)), harness.chunk)])
    harness.catalog._env.write = real
    assert [type(event).__name__ for event in harness.take()] == ["Placed", "Refused"]
    assert isinstance(harness.store(7), Placed)
    assert harness.located(1, 5, 6, 7) == [True, False, False, True]
    assert harness.catalog.check() == []


def test_a_backlog_of_touches_of_all_records_evicts_none(tmp_path):
    harness = Harness(tmp_path, chunk=4096)
    harness.store(*range(4))
    touches = [TouchKeys(tuple(harness.keys(3, 2, 1, 0)))] * 1000
    harness.writer.handle([*touches, TouchKeys(tuple(harness.keys(3)))])
    assert harness.order() == [2, 1, 0, 3]
    assert harness.catalog.check() == []
    harness.catalog.close()


def test_a_full_device_evicts_nothing_and_leaves_the_catalog_as_large_as_it_was(harness):
    for first in range(0, 40, 8):
        harness.store(*range(first, first + 8))
    real, failures = harness.catalog._env.write, iter(range(1))

    def full_once(*arguments):
        if next(failures, None) is not None:
            raise BackendFullError("no space left on device")
        return real(*arguments)

    harness.catalog._env.write = full_once
    assert isinstance(harness.store(100), Refused)
    assert harness.located(*range(40)) == [True] * 40
    for first in range(200, 240, 8):
        assert isinstance(harness.store(*range(first, first + 8)), Placed)
    assert harness.located(*range(40)) == [True] * 40
    assert harness.catalog.check() == []


@pytest.mark.parametrize("gathered", [True, False])
def test_a_reset_that_is_done_late_forgets_nothing_that_came_after_it(tmp_path, gathered):
    plan = FaultPlan()
    harness = Harness(tmp_path, open_system=plan.open_system)
    harness.store(1)
    plan.inject(FaultRule(kind="error", calls=("database.write",), times=1))
    reset = ForgetNamespace(harness.manifest.namespace)
    request = RequestPlaces(70, tuple(harness.keys(2)), harness.chunk)
    for operations in [[reset, request]] if gathered else [[reset], [request]]:
        harness.writer.handle(operations)
    (answer,) = harness.take()
    if isinstance(answer, Refused):  # whoever asks again comes after the reset
        answer = harness.store(2)
    else:
        harness.commit(70)
    assert isinstance(answer, Placed)
    harness.writer.handle([])
    assert harness.located(1, 2) == [False, True]
    assert harness.writer.forgotten_count == 1
    harness.catalog.close()
