"""What a catalog takes of the capacity: measured, bounded, and not for ever after a bad moment."""

import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from hashlib import sha512

import pytest
from catalog_harness import MIB, Harness
from python_paths import environment

from tierstore.catalog.messages import (
    CommitTicket,
    Evict,
    ForgetNamespace,
    ReleaseDone,
    RequestPlaces,
    TouchKeys,
)
from tierstore.key import make_offload_keys
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.tier_events import Placed, Refused

READER = """
import sys
from pathlib import Path
from tierstore.lmdb_env.env import LmdbEnv
env = LmdbEnv.open(Path(sys.argv[1]), map_bytes=1 << 38)
with env.read() as txn:
    txn.stat()
    print("reading", flush=True)
    sys.stdin.readline()
env.close()
"""


@contextmanager
def stopped_reader(path):
    """Let another process stop within a read transaction."""
    process = subprocess.Popen(
        [sys.executable, "-c", READER, path],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGSTOP)
        yield
        process.send_signal(signal.SIGCONT)
        process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.communicate()


def random_numbers(seed, count):
    return random.Random(seed).sample(range(10**9), count)


def fill(harness, first, batches):
    """Store random numbers in batches of 32; return the most records there were at any time."""
    most = 0
    for seed in range(first, first + batches):
        assert isinstance(harness.store(*random_numbers(seed, 32)), Placed)
        most = max(most, harness.catalog.stats().record_count)
    return most


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_payload_and_catalog_never_exceed_the_capacity(tmp_path, backend):
    """Goal: after each transaction the file itself, with all that is charged, is within it."""
    capacity = 24 * MIB
    harness = Harness(tmp_path, backend=backend, capacity=capacity, chunk=4096)
    env = harness.catalog._env
    for seed in range(400):
        assert isinstance(harness.store(*random_numbers(seed, 32)), Placed)
        if backend == "file":
            payload_bytes = harness.disk.pages() * PAGE_BYTES
        else:
            payload_bytes = harness.catalog.geometry.payload_map_bytes
        assert payload_bytes + env.used_bytes() <= capacity
    assert harness.catalog.stats().evicted_count > 5000
    assert env.used_bytes() <= capacity // 4
    share = 0.7 if backend == "file" else 0.4  # whose catalog has a share of its own
    assert harness.catalog.stats().payload_bytes >= share * capacity
    harness.catalog.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_written_by_many_tickets_at_once_leaves_room_for_its_rows(tmp_path, at_once):
    """Goal: a tier that was given out whole before any row of it existed stays within it."""
    capacity = 48 * MIB
    harness = Harness(tmp_path, capacity=capacity, chunk=4096)
    tickets = []
    while True:
        numbers = range(256 * len(tickets), 256 * (len(tickets) + 1))
        keys = tuple(harness.keys(*numbers))
        harness.writer.handle([RequestPlaces(len(tickets), keys, harness.chunk)])
        placed = harness.take()
        if not placed or not isinstance(placed[0], Placed):
            break
        harness.disk.write(placed[0].places)
        tickets.append(CommitTicket(len(tickets), frozenset()))
    assert harness.catalog.check() == []
    for commits in [tickets] if at_once else [[ticket] for ticket in tickets]:
        harness.writer.handle(commits)
        file_bytes = harness.catalog._env.used_bytes()
        assert harness.disk.pages() * PAGE_BYTES + file_bytes <= capacity
    assert harness.catalog.stats().record_count > 8000
    assert harness.catalog.check() == []


def test_a_reader_that_stopped_costs_no_record_for_good(tmp_path):
    """Goal: stores wait, then are refused; when it goes on, as many records fit as before."""
    harness = Harness(tmp_path, capacity=24 * MIB, chunk=4096)
    before = fill(harness, 0, 300)
    before = fill(harness, 1000, 100)
    env = harness.catalog._env
    with stopped_reader(tmp_path / "catalog"):
        answers, seed = [], 5000
        while Refused not in answers[-3:]:
            seed += 1
            harness.clock.now += 1.0
            request = RequestPlaces(seed, tuple(harness.keys(*random_numbers(seed, 32))), 4096)
            harness.tickets = seed
            harness.writer.handle([request])
            take_answers(harness, answers)
            assert seed < 7000, "nothing was held back"
        held_bytes, evicted_count = env.used_bytes(), harness.catalog.stats().evicted_count
        for _ in range(200):
            seed += 1
            harness.clock.now += 1.0
            harness.writer.handle(
                [
                    RequestPlaces(seed, tuple(harness.keys(*random_numbers(seed, 32))), 4096),
                    TouchKeys(tuple(harness.keys(*random_numbers(5001, 32)))),
                    Evict(),
                ]
            )
            take_answers(harness, answers)
        assert set(answers[-200:]) == {Refused}
        assert env.used_bytes() == held_bytes
        assert harness.catalog.stats().evicted_count == evicted_count
    harness.tickets = seed
    after = fill(harness, 10_000, 300)
    after = fill(harness, 20_000, 100)
    # Random keys leave pages a little emptier with time, whether or not somebody reads.
    assert after >= 0.98 * before, "a moment made the tier smaller for good"
    assert harness.catalog.check() == []
    harness.catalog.close()


def take_answers(harness, answers):
    """Carry out what was placed and freed, until nothing more comes of it."""
    events = harness.take()
    while events or harness.unreleased:
        answers += [type(event) for event in events]
        for event in events:
            if isinstance(event, Placed):
                harness.disk.write(event.places)
                harness.commit(event.ticket)
        while harness.unreleased:
            freed = harness.unreleased.pop(0)
            harness.disk.release(freed)
            harness.writer.handle([ReleaseDone(freed.release_id)])
        events = harness.take()


def test_a_catalog_over_its_share_evicts_and_does_not_refuse(tmp_path):
    LmdbEnv.open(tmp_path / "catalog", map_bytes=2 * MIB)  # the first opener decides
    harness = Harness(tmp_path, capacity=64 * MIB, chunk=4096)
    for seed in range(500):
        numbers = random_numbers(seed, 32)
        assert isinstance(harness.store(*numbers), Placed), f"batch {seed}"
        assert all(harness.located(*numbers))
    stats = harness.catalog.stats()
    assert 500 < stats.record_count < 4000
    assert harness.catalog.check() == []
    harness.catalog.close()
    LmdbEnv.open(tmp_path / "catalog", map_bytes=1).close()


def test_a_catalog_over_its_share_removes_garbage_before_records(tmp_path):
    LmdbEnv.open(tmp_path / "catalog", map_bytes=2 * MIB)
    harness = Harness(tmp_path, capacity=64 * MIB, chunk=4096)
    fill(harness, 0, 100)
    harness.writer.handle([ForgetNamespace(harness.manifest.namespace)])
    harness.take()
    harness.release()
    evicted_count = harness.catalog.stats().evicted_count
    seed = 1000
    while harness.writer.has_garbage:
        assert harness.catalog.stats().evicted_count == evicted_count
        assert isinstance(harness.store(*random_numbers(seed, 8)), Placed)
        seed += 1
        assert seed < 2000, "garbage is not removed"
    assert seed > 1003
    assert harness.catalog.check() == []
    harness.catalog.close()
    LmdbEnv.open(tmp_path / "catalog", map_bytes=1).close()


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from catalog_harness import Harness
harness = Harness(Path(sys.argv[1]))
harness.store(1, 2)
print(harness.located(1, 2), harness.catalog._env.map_bytes() < 4 << 30)
"""


def test_a_process_of_few_addresses_opens_the_catalog_all_the_same(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "[True, True] True\n", run.stderr


def test_an_idle_transaction_writes_nothing(harness):
    harness.store(*range(8))
    harness.writer.handle([Evict()])
    before = harness.catalog._env._env.info()["last_txnid"]
    for _ in range(5):
        harness.writer.handle([Evict()])
    assert harness.catalog._env._env.info()["last_txnid"] == before


def test_the_rows_of_what_is_being_written_take_no_more_than_is_charged_for_them(tmp_path):
    """Goal: also the largest: of the longest keys, each in an extent of its own."""
    harness = Harness(tmp_path, capacity=64 * MIB, chunk=4096)
    namespace = harness.manifest.namespace
    hashes = [sha512(b"%d" % number).digest() for number in range(1500)]
    keys = make_offload_keys(namespace, 0, hashes)
    harness.writer.handle([RequestPlaces(i, (key,), 4096) for i, key in enumerate(keys)])
    before = harness.catalog.budget()
    harness.writer.handle([CommitTicket(number, frozenset()) for number in range(len(keys))])
    after = harness.catalog.budget()
    assert after.coming_pages == 0
    assert after.needed_pages - before.needed_pages <= before.coming_pages
    assert harness.catalog.check() == []
    harness.catalog.close()
