"""The secondary tier with its thread, several processes, and kills."""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb
from python_paths import environment

from tierstore.config import SecondaryConfig
from tierstore.errors import BackendFullError
from tierstore.key import make_offload_keys
from tierstore.lmdb_env import errors as lmdb_errors
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.opening import open_tiers
from tierstore.tier.reservation import ChunkState
from tierstore.tier_events import Committed, Evicted, Freed, Placed

MIB = 1 << 20
CHUNK = 64 << 10

WRITER = """
import os, sys
from pathlib import Path
from tests_secondary import open_tier, keys_of, store
tier = open_tier(Path(sys.argv[1]))
first, count = int(sys.argv[2]), int(sys.argv[3])
print("open", flush=True)
for number in range(first, first + count, 4):
    store(tier, number, number + 1, number + 2, number + 3, ticket=number)
    print(number, flush=True)
problems = tier.check()
tier.close()
print(problems, flush=True)
"""


MANIFEST = Manifest.simple("m", CHUNK)
EPOCH = MANIFEST.in_epoch("first")


def open_tier(path, capacity=8 * MIB):
    config = SecondaryConfig(name="t", backend="file", path=path, capacity_bytes=capacity)
    return open_tiers([DiskTier(config, MANIFEST, tier_idx=0, rank_count=1)])[0]


def keys_of(*numbers, manifest=MANIFEST):
    return make_offload_keys(manifest.namespace, 0, spread_hashes(numbers))


def store(tier, *numbers, ticket=1, manifest=MANIFEST):
    """Store keys as the planner and an executor would; confirms every release."""
    tier.request_places(ticket, keys_of(*numbers, manifest=manifest), CHUNK)
    answer = None
    while answer is None:
        assert tier.wait(60)
        for event in tier.poll():
            if isinstance(event, Freed):
                tier.released(event.release_id)
            elif not isinstance(event, Committed | Evicted):
                answer = event
    assert isinstance(answer, Placed)
    tier.commit(ticket)
    assert tier.wait(60)


def start_writer(path, first, count):
    alias = path.parent / "modules"
    alias.mkdir(exist_ok=True)
    (alias / "tests_secondary.py").write_text(Path(__file__).read_text())
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, env=environment(alias), stdout=subprocess.PIPE, text=True)


def test_places_commits_and_releases_flow_through_the_writer_thread(tmp_path):
    tier = open_tier(tmp_path)
    for number in range(0, 300, 4):
        store(tier, *range(number, number + 4), ticket=number)
    found = [place is not None for place in tier.locate(keys_of(*range(300)))]
    assert found[-1]
    assert not found[0]
    stats = tier.stats()
    assert stats.payload_bytes >= 0.65 * stats.capacity_bytes  # one segment of 8 stays free
    assert stats.charged_bytes <= stats.capacity_bytes
    assert tier.check() == []
    tier.close()
    tier.close()


def test_a_forgotten_namespace_is_unreachable_at_once_and_usable_again(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, 1, 2)
    tier.reset(MANIFEST)
    assert tier.locate(keys_of(1, 2)) == [None, None]
    store(tier, 1)
    assert [bool(place) for place in tier.locate(keys_of(1, 2))] == [True, False]
    tier.close()


def test_a_question_about_many_keys_finds_its_answer_in_a_later_step(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, *range(20))
    keys = keys_of(*range(40))
    assert tier.states(keys) == [ChunkState.ARRIVING] * 40
    until = time.monotonic() + 30
    while ChunkState.ARRIVING in tier.states(keys):
        assert time.monotonic() < until
    assert tier.states(keys) == [ChunkState.RECORDED] * 20 + [ChunkState.ABSENT] * 20
    tier.remove(keys[:1])
    assert tier.wait(60)
    tier.reset(MANIFEST)
    assert tier.states(keys) == [ChunkState.ABSENT] * 40
    assert tier.wait(60)
    assert tier.locate(keys) == [None] * 40
    tier.close()


def test_what_was_evicted_is_not_said_to_be_recorded_because_it_was(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, *range(20))
    keys = keys_of(*range(20))
    until = time.monotonic() + 30
    while tier.states(keys) != [ChunkState.RECORDED] * 20:
        assert time.monotonic() < until
    for first in range(100, 220, 20):
        store(tier, *range(first, first + 20), ticket=first)
    tier.poll()
    assert tier.locate(keys) == [None] * 20
    tier.close()


def stored_names(tier):
    """Return the `epoch` of every manifest on the path, "" for none."""
    databases = tier._threads.catalog._databases
    with tier._threads.catalog._env.read(databases.namespaces) as txn, txn.cursor() as cursor:
        return sorted(dict(json.loads(value)["extra"]).get("epoch", "") for _, value in cursor)


def test_the_records_of_an_epoch_are_forgotten_when_its_process_is_gone(tmp_path, caplog):
    tier = open_tier(tmp_path)
    store(tier, 1, 2)
    tier.reset(EPOCH)
    store(tier, 2, 3, manifest=EPOCH)
    assert all(tier.locate(keys_of(2, 3, manifest=EPOCH)))
    assert tier.locate(keys_of(1, 2, 3)) == [None] * 3
    assert stored_names(tier) == ["", "first"]
    meanwhile = open_tier(tmp_path)  # an epoch whose process lives is left alone
    store(meanwhile, 9, ticket=2)
    assert all(tier.locate(keys_of(2, 3, manifest=EPOCH)))
    meanwhile.close()
    tier.close()
    later = open_tier(tmp_path)
    assert all(later.locate(keys_of(9))), "what others stored is found while an epoch is forgotten"
    assert later.wait(60)
    assert later.stats().record_count == 1
    assert stored_names(later) == [""]
    assert later.check() == []
    assert not caplog.messages, "an epoch is no other identity of the model"
    later.close()


def test_a_second_reset_ends_the_first_epoch(tmp_path):
    tier = open_tier(tmp_path)
    tier.reset(EPOCH)
    store(tier, 1, manifest=EPOCH)
    second = MANIFEST.in_epoch("second")
    assert second == EPOCH.in_epoch("second")
    tier.reset(second)
    store(tier, 1, ticket=2, manifest=second)
    assert tier.locate(keys_of(1, manifest=EPOCH)) == [None]
    assert all(tier.locate(keys_of(1, manifest=second)))
    assert stored_names(tier) == ["", "second"]
    tier.close()


def test_two_tiers_of_one_process_share_a_path(tmp_path):
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    store(first, 1)
    store(second, 2)
    assert all(second.locate(keys_of(1, 2)))
    first.close()
    assert all(second.locate(keys_of(1, 2)))
    second.close()


def test_two_processes_share_one_path_and_its_capacity(tmp_path):
    path = tmp_path / "tier"
    tier = open_tier(path)
    process = start_writer(path, 10_000, 200)
    for number in range(0, 200, 4):
        store(tier, *range(number, number + 4), ticket=number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "[]"
    stats = tier.stats()
    assert stats.charged_bytes <= stats.capacity_bytes
    assert tier.check() == []
    assert all(tier.locate(keys_of(199))) or all(tier.locate(keys_of(10_199)))
    tier.close()


def test_a_killed_process_leaves_a_sound_catalog(tmp_path):
    path = tmp_path / "tier"
    for round_number in range(10):
        process = start_writer(path, round_number * 10_000, 4000)
        lines = [process.stdout.readline() for _ in range(2 + 5 * round_number)]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        # It went on until the signal came: by now the lines read above may be evicted records.
        last = int([*lines, *rest.splitlines()][-1])
        tier = open_tier(path)
        assert tier.check() == []
        assert all(tier.locate(keys_of(last, last + 3)))
        for event in tier.poll():
            if isinstance(event, Freed):
                tier.released(event.release_id)
        assert tier.wait(60)
        stats = tier.stats()
        assert stats.charged_bytes <= stats.capacity_bytes
        assert tier.check() == []
        tier.close()
    assert list((path / "owners").iterdir()) == []


def test_after_a_restart_the_least_recently_used_records_go_first(tmp_path):
    tier = open_tier(tmp_path)
    for number in range(0, 40, 4):
        store(tier, *range(number, number + 4), ticket=number)
    tier.touch(keys_of(*range(8)))
    assert tier.wait(60)
    tier.close()
    tier = open_tier(tmp_path)
    number = 1000
    while all(tier.locate(keys_of(*range(8, 40)))):
        store(tier, *range(number, number + 4), ticket=number)
        number += 4
    while any(tier.locate(keys_of(*range(8, 40)))):
        assert all(tier.locate(keys_of(*range(8))))
        kept = [bool(place) for place in tier.locate(keys_of(*range(8, 40)))]
        groups = [any(kept[first : first + 4]) for first in range(0, 32, 4)]
        assert groups == sorted(groups)
        store(tier, *range(number, number + 4), ticket=number)
        number += 4
    tier.close()


def test_lock_files_of_killed_processes_do_not_pile_up(tmp_path):
    path = tmp_path / "tier"
    for round_number in range(5):
        process = start_writer(path, round_number * 10_000, 4000)
        assert process.stdout.readline() == "open\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        files = list((path / "owners").iterdir())
        assert len(files) == 1
        assert sum(file.stat().st_blocks for file in files) == 0
    open_tier(path).close()
    assert list((path / "owners").iterdir()) == []


def test_every_exception_class_of_lmdb_is_translated():
    classes = {
        name
        for name, value in vars(lmdb).items()
        if isinstance(value, type) and issubclass(value, lmdb.Error)
    }
    assert classes <= lmdb_errors.ERRORS.keys()
    for name in classes:
        ours = lmdb_errors.translate(getattr(lmdb, name)("what"), Path("/tier"))
        assert type(ours) is lmdb_errors.ERRORS[name]
        assert "/tier" in str(ours)


def test_an_environment_is_opened_once_per_process(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "env")
    first = LmdbEnv.open(tmp_path / "env", map_bytes=MIB)
    second = LmdbEnv.open(tmp_path / "link", map_bytes=MIB)
    assert first is second
    second.close()
    with first.read() as txn:
        assert txn.stat()["entries"] == 0
    first.close()
    assert logging.getLogger("tierstore").handlers == []


def test_a_reset_that_a_failing_catalog_could_not_do_is_done_without_further_writes(tmp_path):
    """Goal: a tier that is only read from is not hidden for good by one failure."""
    tier, other = open_tier(tmp_path), open_tier(tmp_path)
    store(other, 1, 2, 3, 4)
    tier._threads.catalog._env.write, real = refuse_writing, tier._threads.catalog._env.write
    tier.reset(MANIFEST)
    assert tier.wait(60)
    tier._threads.catalog._env.write = real
    deadline = time.monotonic() + 60
    while other.stats().record_count and time.monotonic() < deadline:
        tier.poll()
    assert other.stats().record_count == 0
    store(other, 5, 6, ticket=2)
    assert None not in tier.locate(keys_of(5, 6))
    assert tier.check() == []
    other.close()
    tier.close()


def refuse_writing(*_):
    raise BackendFullError("no space")
