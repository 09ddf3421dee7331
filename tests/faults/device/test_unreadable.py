"""Records that cannot be read: they fail, hang or are late, in one tier of one or of two."""

from contextlib import contextmanager

import numpy as np
import pytest
from store_kit import MIB, Chunks, config_of, misses
from waiting import within_seconds

from tierstore import TierStore
from tierstore.testing.faults import FaultPlan, FaultRule, ReadFaults, unreadable_opener
from tierstore.transfer import FailureReason

CHUNKS = Chunks(65_536)
WHOLE_TASKS = Chunks(MIB)  # each chunk is read by an I/O task of its own
ONES = range(16)
FAILING = [
    FailureReason.IO_ERROR,
    FailureReason.FULL,
    FailureReason.CORRUPT,
    FailureReason.ABSENT,
]


class Disks:
    """A store over disks of which some records cannot be read."""

    def __init__(self, path, count=1, *, chunks=CHUNKS, primary="4MiB", backend="file", **tier):
        self.faults = [ReadFaults() for _ in range(count)]
        self.chunks = chunks
        tier = {"io": {"threads": 8, "deadline": "2s"}, "capacity": "64MiB"} | tier
        self.config = config_of(path / "0", backend=backend, primary=primary, **tier)
        (first,) = self.config["secondary"]
        self.config["secondary"] = [
            first | {"name": f"disk{number}", "path": str(path / str(number))}
            for number in range(count)
        ]

    @contextmanager
    def stored(self, numbers):
        """Open a store that has some chunks on its disks and none in memory."""
        with self.chunks.open(self.config) as store:
            for number in numbers:
                self.chunks.put(store, [number])
                store.flush()
        with self.opened() as store:
            yield store

    @contextmanager
    def opened(self):
        faults = {f"disk{number}": faults for number, faults in enumerate(self.faults)}
        opener = unreadable_opener(faults)
        with TierStore.open(self.config, self.chunks.manifest, open_backend=opener) as store:
            try:
                yield store
            finally:
                for fault in self.faults:
                    fault.heal()

    def found(self, store, numbers):
        return self.chunks.found(store, numbers)

    def push_out(self, store):
        """Fill memory with others, so that what comes next is read from the disks."""
        for first in range(10_000, 10_000 + 5 * 64, 16):
            self.chunks.put(store, range(first, first + 16))
            store.flush()


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("reason", FAILING)
def test_a_second_copy_is_found_by_the_call_whose_first_copy_fails(tmp_path, backend, reason):
    disks = Disks(tmp_path, 2, backend=backend)
    with disks.stored(ONES) as store:
        disks.faults[0].fail(CHUNKS.keys(ONES[::2]), reason)
        assert disks.found(store, ONES) == list(ONES)
        assert misses(store) == {reason.value: 8}
        store.flush()
        assert store.check() == []
        # Written anew, the chunk can be read from the first tier again.
        disks.push_out(store)
        disks.faults[1].fail(CHUNKS.keys(ONES), FailureReason.IO_ERROR)
        assert disks.found(store, ONES) == list(ONES)
        assert store.check() == []


def test_a_second_copy_is_found_by_the_call_whose_first_copy_hangs(tmp_path):
    disks = Disks(tmp_path, 2)
    with disks.stored(ONES) as store:
        disks.faults[0].hang(CHUNKS.keys(ONES[:4]))  # other threads of the tier go on
        assert disks.found(store, ONES) == list(ONES)
        read_count = disks.faults[0].read_count(CHUNKS.keys(ONES)[0])
        disks.push_out(store)
        assert disks.found(store, ONES) == list(ONES)
        assert disks.faults[0].read_count(CHUNKS.keys(ONES)[0]) == read_count
        disks.faults[0].go_on()
        assert store.check() == []
        disks.push_out(store)
        assert disks.found(store, ONES) == list(ONES)
        assert store.check() == []


def test_many_batches_are_found_though_the_first_tier_cannot_be_read_at_all(tmp_path):
    disks = Disks(tmp_path, 2, primary="2MiB")
    numbers = range(200)
    with disks.stored(()) as store:
        for first in range(0, 200, 10):
            assert CHUNKS.put(store, numbers[first : first + 10]) == 10
            store.flush()
        disks.faults[0].fail(CHUNKS.keys(numbers), FailureReason.IO_ERROR)
        assert disks.found(store, numbers) == list(numbers)
        store.flush()
        assert store.check() == []


@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
@pytest.mark.parametrize("reason", FAILING)
def test_a_chunk_whose_record_cannot_be_read_is_promised_no_more_and_stored_anew(
    tmp_path, reason, cascade
):
    disks = Disks(tmp_path, cascade=cascade)
    with disks.stored(ONES) as store:
        disks.faults[0].fail(CHUNKS.keys(ONES), reason)
        assert store.match_prefix(CHUNKS.keys(ONES)).chunk_count == 16
        assert disks.found(store, ONES) == []
        assert store.match_prefix(CHUNKS.keys(ONES)).chunk_count == 0
        assert disks.found(store, ONES) == []
        assert CHUNKS.put(store, ONES) == 16
        store.flush()
        disks.push_out(store)
        assert store.match_prefix(CHUNKS.keys(ONES)).chunk_count == 16
        assert disks.found(store, ONES) == list(ONES)
        assert store.check() == []


def test_a_device_that_fails_for_a_while_keeps_its_records(tmp_path):
    disks = Disks(tmp_path)
    with disks.stored(ONES) as store:
        disks.faults[0].fail(CHUNKS.keys(ONES), FailureReason.IO_ERROR)
        assert disks.found(store, ONES[:8]) == []
        disks.faults[0].heal()
        assert disks.found(store, ONES[8:]) == list(ONES[8:])
    with disks.opened() as store:
        assert disks.found(store, ONES) == list(ONES)


@pytest.mark.parametrize("then", [None, FailureReason.CORRUPT])
def test_one_batch_with_every_outcome(tmp_path, then):
    disks = Disks(tmp_path, chunks=WHOLE_TASKS, primary="64MiB")
    numbers = range(4)
    with disks.stored(numbers) as store:
        keys = WHOLE_TASKS.keys(numbers)
        disks.faults[0].fail(keys[1:2], FailureReason.CORRUPT)
        disks.faults[0].fail(keys[2:3], FailureReason.IO_ERROR)
        disks.faults[0].hang(keys[3:])
        assert disks.found(store, numbers) == [0]
        assert misses(store) == {"corrupt": 1, "io_error": 1, "deadline": 1}
        assert disks.found(store, numbers) == [0]
        if then:
            disks.faults[0].fail(keys[3:], then)
        disks.faults[0].go_on()
        if then:
            assert within_seconds(
                lambda: misses(store) == {"corrupt": 2, "io_error": 1, "deadline": 1}
            )
        else:
            assert within_seconds(lambda: disks.found(store, numbers) == [0, 3])
        assert store.check() == []
        assert WHOLE_TASKS.put(store, numbers) == 4
        store.flush()
        assert disks.found(store, numbers) == list(numbers)
        assert store.check() == []


def test_a_chunk_whose_read_hangs_can_be_stored_and_loaded_meanwhile(tmp_path):
    disks = Disks(tmp_path)
    with disks.stored(ONES) as store:
        disks.faults[0].hang(CHUNKS.keys(ONES))
        assert disks.found(store, ONES) == []
        assert store.match_prefix(CHUNKS.keys(ONES)).chunk_count == 0
        assert CHUNKS.put(store, ONES) == 16
        assert disks.found(store, ONES) == list(ONES)
        disks.faults[0].go_on()
        store.flush()
        disks.push_out(store)
        assert disks.found(store, ONES) == list(ONES)
        assert store.check() == []


def test_a_flush_does_not_wait_for_a_hung_read(tmp_path):
    disks = Disks(tmp_path)
    with disks.stored(ONES) as store:
        disks.faults[0].hang(CHUNKS.keys(ONES))
        assert disks.found(store, ONES) == []
        CHUNKS.put(store, range(100, 104))
        store.flush()
        assert store.stats().counters['demoted_chunks_total{tier="disk0"}'] == 4


def test_what_a_hung_read_holds_comes_back(tmp_path):
    disks = Disks(tmp_path, primary="2MiB")
    with disks.stored(ONES) as store:
        disks.faults[0].hang(CHUNKS.keys(ONES))
        assert disks.found(store, ONES) == []
        disks.faults[0].go_on()
        assert store.check() == []
        everything = range(100, 132)
        for first in range(100, 132, 4):
            CHUNKS.put(store, range(first, first + 4))
            store.flush()
        out = np.zeros((32, CHUNKS.chunk_bytes), np.uint8)
        assert all(store.get(CHUNKS.keys(everything), out))
        assert store.stats().primary_chunk_count == 32


def stopped_reads(at_bytes, **which):
    """Reads of segments that stop behind so many bytes, without an error."""
    return [
        FaultRule(kind="short", calls=(call,), files=files, at_bytes=at_bytes, **which)
        for call, files in (("preadv", "*.seg"), ("copy_mapped", "*"))
    ]


@contextmanager
def opened_over(path, mode, plan):
    """Open a store over a disk that fails as a plan says, and holds some chunks."""
    config = config_of(path, primary="2MiB", io={"threads": 1, "mode": mode})
    if not path.exists():
        with CHUNKS.open(config) as store:
            CHUNKS.put(store, ONES)
    with TierStore.open(config, CHUNKS.manifest, open_system=plan.open_system) as store:
        yield store


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("at_bytes", [0, 1, 4095])
def test_records_whose_reads_stop_before_their_end_are_there_when_the_device_is_sound(
    tmp_path, mode, at_bytes
):
    """The file goes on behind the bytes that came: nothing is absent."""
    plan = FaultPlan()
    with opened_over(tmp_path / "tier", mode, plan) as store:
        plan.inject(*stopped_reads(at_bytes))
        assert CHUNKS.found(store, ONES) == []
        assert plan.strike_count
        assert "absent" not in misses(store)
    with opened_over(tmp_path / "tier", mode, FaultPlan()) as store:
        assert CHUNKS.found(store, ONES) == list(ONES)


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("at_bytes", [1, 4095, 4097, 65_537])
def test_a_read_that_stops_once_costs_nothing(tmp_path, mode, at_bytes):
    for nth in (1, 2):
        plan = FaultPlan()
        with opened_over(tmp_path / "tier", mode, plan) as store:
            plan.inject(*stopped_reads(at_bytes, nth=nth, times=1))
            assert CHUNKS.found(store, ONES) == list(ONES)
            assert plan.strike_count


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_records_behind_the_end_of_their_file_are_absent(tmp_path, mode):
    with opened_over(tmp_path / "tier", mode, FaultPlan()):
        pass
    for segment in (tmp_path / "tier" / "rank0").glob("*.seg"):
        with segment.open("r+b") as file:
            file.truncate(4096 + 65_536 + 100)
    with opened_over(tmp_path / "tier", mode, FaultPlan()) as store:
        found = CHUNKS.found(store, ONES)
        assert len(found) == 1
        assert misses(store) == {"absent": len(ONES) - 1}
