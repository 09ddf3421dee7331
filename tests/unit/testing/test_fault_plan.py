"""The fault kit does what its rules say, and says what it did."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from python_paths import environment
from waiting import within_seconds

from tierstore import TierStore, load_config
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.errors import BackendError
from tierstore.faults import DATABASE_CALLS, EXIT_STATUS, SYSTEM_CALLS, StruckSystem
from tierstore.testing.faults import BACKEND_CALLS, FaultPlan, FaultRule, faulty_backend_opener

from store_kit import Chunks, config_of  # isort: skip

CHUNKS = Chunks(65_536)
CONTENT = bytes(range(256)) * 16


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rank0" / "00000001.seg"
    path.parent.mkdir()
    path.write_bytes(bytes(len(CONTENT)))
    return path


def system_of(plan, root):
    config = load_config(config_of(root)).secondary[0]
    return plan.open_system(config)


def write(system, path, offset=0, content=CONTENT):
    fd = system.open(path, os.O_RDWR)
    try:
        return system.pwritev(fd, [memoryview(content)], offset)
    finally:
        os.close(fd)


def read(system, path):
    fd = system.open(path, os.O_RDONLY)
    buffer = bytearray(len(CONTENT))
    try:
        return system.preadv(fd, [memoryview(buffer)[:100], memoryview(buffer)[100:]], 0), buffer
    finally:
        os.close(fd)


def errors_of(system, path, count):
    errors = []
    for _ in range(count):
        try:
            write(system, path)
        except OSError as error:
            errors.append(error.errno)
        else:
            errors.append(0)
    return errors


def rule(kind, *calls, **more):
    return FaultRule(kind=kind, calls=calls or ("*",), **more)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"nth": 3, "times": 1}, [0, 0, 5, 0, 0, 0, 0]),
        ({"nth": 3}, [0, 0, 5, 5, 5, 5, 5]),
        ({"nth": 2, "every": 3}, [0, 5, 0, 0, 5, 0, 0]),
        ({"nth": 2, "every": 3, "times": 1}, [0, 5, 0, 0, 0, 0, 0]),
    ],
)
def test_a_rule_strikes_the_calls_that_it_names(tmp_path, file, when, expected):
    system = system_of(FaultPlan(rule("error", "pwrite*", **when)), tmp_path)
    assert errors_of(system, file, 7) == expected


def test_a_probability_is_the_same_at_every_run_of_a_seed(tmp_path, file):
    def run(seed):
        plan = FaultPlan(rule("error", "pwritev", probability=0.3), seed=seed)
        return errors_of(system_of(plan, tmp_path), file, 60)

    assert run(1) == run(1) != run(2)
    assert 5 < sum(map(bool, run(1))) < 40


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EROFS", "EMFILE", "EFBIG", "ENOMEM"])
def test_an_error_is_the_errno_that_it_names(tmp_path, file, name):
    system = system_of(FaultPlan(rule("error", error=name, nth=2)), tmp_path)
    with pytest.raises(OSError, match="injected fault") as caught:
        write(system, file)
    assert caught.value.errno == getattr(errno, name)


def test_every_call_of_a_system_can_be_struck(tmp_path):
    methods = {name for name in vars(SystemCalls) if not name.startswith("_")}
    assert set(SYSTEM_CALLS) == methods - {"reach", "at_database"}
    assert methods <= vars(StruckSystem).keys()


def test_a_point_of_a_database_is_named_with_its_directory(tmp_path):
    plan = FaultPlan(rule("error", "database.*", files="catalog"))
    system = system_of(plan, tmp_path)
    system.at_database(tmp_path / "rank0" / "payload").reach(DatabasePoint.COMMIT)
    for point in DatabasePoint:
        catalog = system.at_database(tmp_path / "catalog")
        if point is DatabasePoint.COMMITTED:  # others see it: it cannot fail any more
            catalog.reach(point)
        else:
            with pytest.raises(OSError, match="injected"):
                catalog.reach(point)
    assert plan.strike_count == len(DATABASE_CALLS) - 1


@pytest.mark.parametrize("at", [0, 1, 511, 4095])
@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_a_write_is_in_doubt_at_any_byte(tmp_path, file, at, flags):
    system = system_of(FaultPlan(rule("torn", "pwritev", error="ENOSPC", at_bytes=at)), tmp_path)
    fd = system.open(file, os.O_RDWR | flags)
    with pytest.raises(OSError, match="injected") as caught:
        system.pwritev(fd, [memoryview(CONTENT)[:1000], memoryview(CONTENT)[1000:]], 0)
    os.close(fd)
    assert caught.value.errno == errno.ENOSPC
    assert file.read_bytes() == CONTENT[:at] + bytes(len(CONTENT) - at)


def test_short_calls_move_what_they_say(tmp_path, file):
    system = system_of(FaultPlan(rule("short", at_bytes=130)), tmp_path)
    assert write(system, file) == 130
    file.write_bytes(CONTENT)
    count, buffer = read(system, file)
    assert count == 130
    assert buffer[:130] == CONTENT[:130]
    assert buffer[130:] == b"\xee" * (len(CONTENT) - 130)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_one_bit_is_flipped_or_one_sector_zeroed(tmp_path, file, call):
    def outcome(kind):
        system = system_of(FaultPlan(rule(kind, call), seed=4), tmp_path)
        file.write_bytes(b"\xff" * len(CONTENT))
        if call == "pwritev":
            assert write(system, file, content=b"\xff" * len(CONTENT)) == len(CONTENT)
            return file.read_bytes()
        return bytes(read(system, file)[1])

    assert outcome("flip").count(255) == len(CONTENT) - 1
    assert outcome("zero").count(0) == 512


def test_what_is_lost_says_that_it_was_done(tmp_path, file):
    system = system_of(FaultPlan(rule("lose")), tmp_path)
    assert write(system, file) == len(CONTENT)
    fd = system.open(file, os.O_RDWR)
    system.truncate(fd, 0)
    system.flush(fd)
    system.unlink(file)
    os.close(fd)
    assert file.read_bytes() == bytes(len(CONTENT))


def test_memory_that_is_not_there_is_a_memory_error(tmp_path, file):
    system = system_of(FaultPlan(rule("memory", "open")), tmp_path)
    with pytest.raises(MemoryError):
        write(system, file)


def test_a_call_that_hangs_goes_on_when_it_is_healed(tmp_path, file):
    plan = FaultPlan(rule("hang", "pwritev"))
    thread = threading.Thread(target=write, args=(system_of(plan, tmp_path), file))
    thread.start()
    assert within_seconds(lambda: plan.strike_count == 1)
    assert file.read_bytes() == bytes(len(CONTENT))
    plan.heal()
    thread.join(60)
    assert file.read_bytes() == CONTENT


def test_a_switch_turns_a_rule_on_and_off(tmp_path, file):
    switch = tmp_path / "on"
    system = system_of(FaultPlan(rule("error", "pwritev", switch=switch)), tmp_path)
    write(system, file)
    switch.touch()
    with pytest.raises(OSError, match="injected"):
        write(system, file)
    switch.unlink()
    write(system, file)


def test_a_switch_ends_what_hangs(tmp_path, file):
    switch = tmp_path / "on"
    switch.touch()
    plan = FaultPlan(rule("hang", "pwritev", switch=switch))
    thread = threading.Thread(target=write, args=(system_of(plan, tmp_path), file))
    thread.start()
    assert within_seconds(lambda: plan.strike_count == 1)
    switch.unlink()
    thread.join(60)
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize(("kind", "status"), [("kill", -signal.SIGKILL), ("exit", EXIT_STATUS)])
def test_a_process_dies_in_the_middle_of_a_write(tmp_path, file, kind, status):
    code = """if True:
        import os, sys
        from pathlib import Path
        from tierstore.faults import FaultPlan, FaultRule
        from tierstore.config import SecondaryConfig
        rule = FaultRule(kind=sys.argv[2], calls=("pwritev",), at_bytes=700)
        config = SecondaryConfig(
            name="disk", backend="file", path=Path("/nowhere"), capacity_bytes=1 << 30
        )
        fd = os.open(sys.argv[1], os.O_RDWR)
        FaultPlan(rule).open_system(config).pwritev(fd, [memoryview(b"x" * 4096)], 0)
    """
    command = [sys.executable, "-c", code, file, kind]
    done = subprocess.run(command, env=environment(), check=False, timeout=300)
    assert done.returncode == status
    assert file.read_bytes() == b"x" * 700 + bytes(len(CONTENT) - 700)


def test_the_worst_of_several_rules_happens_after_all_waits(tmp_path, file):
    plan = FaultPlan(
        rule("error", "pwritev", error="EROFS"),
        rule("lose", "pwritev"),
        rule("latency", "pwritev", latency_seconds=0.001),
    )
    with pytest.raises(OSError, match="injected") as caught:
        write(system_of(plan, tmp_path), file)
    assert caught.value.errno == errno.EROFS
    assert [one.strike.kind for one in plan.trace] == ["error", "lose", "latency"]


def test_rules_may_be_added_and_healed_while_a_store_is_open(tmp_path):
    plan = FaultPlan()
    with TierStore.open(
        config_of(tmp_path), CHUNKS.manifest, open_system=plan.open_system
    ) as store:
        CHUNKS.put(store, range(4))
        store.flush()
        plan.inject(rule("error", "pwritev", error="ENOSPC"))
        CHUNKS.put(store, range(4, 8))
        with pytest.raises(BackendError, match="tier disk: 4 chunks"):
            store.flush()
        plan.heal()
        store.flush()
    with CHUNKS.open(config_of(tmp_path)) as store:
        assert CHUNKS.found(store, range(8)) == list(range(8))


def scenario(path, plan, backend):
    config = config_of(path, backend=backend, primary="2MiB", capacity="8MiB", io={"threads": 1})
    try:
        with TierStore.open(config, CHUNKS.manifest, open_system=plan.open_system) as store:
            for first in range(0, 40, 8):
                CHUNKS.put(store, range(first, first + 8))
                store.check()
    except BackendError:
        pass


def test_any_injection_can_be_made_again(tmp_path):
    kinds = [rule(kind, "pwritev", probability=0.2) for kind in ("flip", "zero", "torn")]
    plan = FaultPlan(*kinds, seed=3)
    scenario(tmp_path / "first", plan, "file")
    assert len(plan.trace) >= 2
    wanted = plan.trace[0]
    again = FaultPlan(wanted.rule)
    scenario(tmp_path / "again", again, "file")
    assert [str(one) for one in again.trace] == [str(wanted)]


def test_the_names_of_a_trace_are_the_same_in_every_run(tmp_path):
    def files(name, backend):
        plan = FaultPlan(rule("latency", latency_seconds=0))
        scenario(tmp_path / name, plan, backend)
        return {one.call.file for one in plan.trace}

    assert files("1", "file") == files("2", "file") >= {"rank0/00000001.seg", "catalog"}
    assert files("1l", "lmdb") >= {"catalog", "rank0/payload"}


def test_a_plan_for_one_tier_leaves_the_others_alone(tmp_path):
    config = load_config(config_of(tmp_path)).secondary[0]
    plan = FaultPlan(rule("error"), tiers="other*")
    plan.open_system(config).reach(DatabasePoint.READ)
    assert plan.call_count() == 0


@pytest.mark.parametrize("name", BACKEND_CALLS)
def test_each_call_of_a_backend_can_be_struck(tmp_path, name):
    plan = FaultPlan(rule("error", name))
    config = config_of(tmp_path, primary="2MiB", capacity="8MiB")
    opener = faulty_backend_opener(plan)
    with TierStore.open(config, CHUNKS.manifest, open_backend=opener) as store:
        for first in range(0, 160, 16):  # more than the tier holds
            CHUNKS.put(store, range(first, first + 16))
        CHUNKS.found(store, range(140))
        try:
            store.flush()
        except BackendError:
            assert name != "backend.read"
    assert plan.strike_count, "the scenario did not come to this call"


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sorrow"},
        {"kind": "error", "error": "EPLEASE"},
        {"kind": "error", "nth": 0},
        {"kind": "error", "times": 0},
        {"kind": "error", "probability": 1.5},
        {"kind": "latency", "latency_seconds": -1},
    ],
)
def test_a_rule_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|counted|negative"):
        FaultRule(**wrong)


def test_the_files_of_a_plan_are_below_the_path_of_its_tier(tmp_path, file):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(bytes(len(CONTENT)))
    plan = FaultPlan(rule("error", "pwritev", files="rank0/*.seg"))
    system = system_of(plan, tmp_path)
    write(system, Path(outside))
    with pytest.raises(OSError, match="injected"):
        write(system, file)
