"""The native path against the interpreted one: the same bytes on disk, the same verdicts.

Method: each case is carried out twice, in two directories, and everything that a caller or a later
reader can see is compared. What the kernel does with vectored calls is scripted for both paths
alike; real faults stand at the end.
"""

import errno
import mmap
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keyed import codec_of
from native_library import ScriptedKernel, interpreted, native
from opened_backend import opened
from python_paths import environment
from small_mount import on_small_mount

from tierstore.backend.failure import take_cause
from tierstore.backend.protocol import RecordIo
from tierstore.backend.record_batch import RecordBatch
from tierstore.codec.record import PLACE_DTYPE
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.native.calls import IoTask
from tierstore.testing.extents import GARBAGE, SEGMENT_PAGES, Extent
from tierstore.testing.faults import ShortIoSystem
from tierstore.testing.spread import spread_hash
from tierstore.transfer import FailureReason, Place

PATHS = {"native": native, "interpreted": interpreted}
LIMITS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SIZES = st.sampled_from([1, 100, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 20_000])


@dataclass
class Stage:
    """Extents side by side in a few segments, for two backends."""

    extents: list

    @classmethod
    def of(cls, counts, payload_bytes):
        extents, segment, page = [], 0, 0
        for count in counts:
            stride = -(-payload_bytes // PAGE_BYTES)
            if page + 1 + count * stride > SEGMENT_PAGES:
                segment, page = segment + 1, 0
            extents.append(Extent(count, payload_bytes, segment=segment, page=page))
            page += 1 + count * stride
        return cls(extents)

    def to_write(self):
        return [record for extent in self.extents for record in extent.to_write()]

    def to_read(self):
        return [record for extent in self.extents for record in extent.to_read()]

    @property
    def payloads(self):
        return [payload for extent in self.extents for payload in extent.payloads]


STAGES = st.builds(Stage.of, st.lists(st.integers(1, 32), min_size=1, max_size=5), SIZES)


def on_both(run, **options):
    """Run something on a backend of each path, in its own directory; return both answers."""
    answers = []
    for name, library in PATHS.items():
        with tempfile.TemporaryDirectory() as folder:
            backend = opened(Path(folder), library=library, **options)
            assert backend.is_native == (name == "native")
            try:
                answers.append(run(backend, Path(folder)))
            finally:
                backend.close()
    return answers


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.seg"))}


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@LIMITS
@given(stage=STAGES, mistakes=st.lists(st.tuples(st.integers(0, 159), st.integers(0, 3))))
def test_the_same_writes_leave_the_same_bytes(mode, stage, mistakes):
    """Also where places are impossible, extents are cut, or slots have the wrong length."""

    def run(backend, folder):
        records = stage.to_write()
        for where, kind in mistakes:
            index = where % len(records)
            record = records[index]
            if kind == 0:
                records[index] = RecordIo(record.key, Place(b"\xff" * 24), record.slot)
            elif kind == 1:
                records[index] = RecordIo(record.key, Place(b"short"), record.slot)
            elif kind == 2:
                records[index] = RecordIo(record.key, record.place, record.slot[:PAGE_BYTES][:100])
            else:
                records[index] = RecordIo(OffloadKey(b"k" * 77), record.place, record.slot)
        return backend.write(records), files_of(folder)

    first, second = on_both(run, mode=mode)
    assert first == second


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@LIMITS
@given(stage=STAGES, data=st.data())
def test_the_same_damages_get_the_same_verdicts(mode, stage, data):
    """Flips, holes and ends of files; records in any order, some of them twice."""
    count = len(stage.payloads)
    known_count = data.draw(st.integers(0, count))
    order = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count + 5))
    page = st.integers(0, SEGMENT_PAGES - 1)
    damages = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("flip"), page, st.integers(0, PAGE_BYTES - 1)),
                st.tuples(st.just("hole"), page, st.integers(1, 9)),
                st.tuples(st.just("cut"), page, st.sampled_from([0, 1, 2048])),
                st.tuples(st.just("gone"), page, st.just(0)),
            ),
            max_size=3,
        )
    )

    def run(backend, folder):
        assert backend.write(stage.to_write()) == {}
        # What is cached of header pages is damaged behind the back of it, too.
        assert backend.read(stage.to_read()[:known_count]) == {}
        for kind, where, more in damages:
            for path in sorted(folder.glob("*.seg"))[:1]:
                damage(path, kind, where, more)
        records = stage.to_read()
        chosen = [
            RecordIo(records[i].key, records[i].place, slot)
            for i, slot in zip(order, fresh_slots(len(order), records[0].slot.nbytes), strict=True)
        ]
        failed = backend.read(chosen)
        for position, index in enumerate(order):
            if position not in failed:
                payload = stage.payloads[index]
                assert chosen[position].slot[: len(payload)] == payload, "wrong bytes"
        return failed

    first, second = on_both(run, mode=mode)
    assert first == second


def fresh_slots(count, slot_bytes):
    pool = memoryview(mmap.mmap(-1, count * slot_bytes))
    pool[:] = bytes([GARBAGE]) * len(pool)
    return [pool[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]


def damage(path, kind, page, more):
    if kind == "gone":
        path.unlink()
        return
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(page * PAGE_BYTES + more)
            return
        file.seek(page * PAGE_BYTES + (more if kind == "flip" else 0))
        old = file.read(1) if kind == "flip" else b""
        file.seek(page * PAGE_BYTES + (more if kind == "flip" else 0))
        file.write(bytes([old[0] ^ 0x10]) if old else bytes(more * PAGE_BYTES))


OUTCOMES = st.lists(
    st.one_of(
        st.sampled_from([-errno.EIO, -errno.ENOSPC, -errno.EDQUOT, -errno.EINTR, -errno.EBADF]),
        st.sampled_from([0, 1, 100, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 1 << 40]),
        st.integers(0, 40 * PAGE_BYTES),
    ),
    max_size=12,
)


@LIMITS
@given(stage=STAGES, writes=OUTCOMES, reads=OUTCOMES, data=st.data())
def test_the_same_answers_of_the_kernel_get_the_same_verdicts(stage, writes, reads, data):
    """Short transfers, interruptions and errors, call by call."""
    kernel = ScriptedKernel()
    chosen = data.draw(st.permutations(range(len(stage.payloads))))
    chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
    answers = []
    for library in (kernel.native, interpreted):
        with tempfile.TemporaryDirectory() as folder:
            backend = opened(Path(folder), library=library, mode="buffered")
            backend._files._system = kernel.system()
            assert backend.is_native == (library == kernel.native)
            kernel.begin(writes)
            answer = [backend.write(stage.to_write()), kernel.call_count, files_of(Path(folder))]
            kernel.begin(reads)
            records = stage.to_read()
            records = [records[i] for i in chosen]
            failed = backend.read(records)
            for i, record in enumerate(records):
                if i not in failed:
                    payload = stage.payloads[chosen[i]]
                    assert record.slot[: len(payload)] == payload, "wrong bytes"
            answers.append([*answer, failed, kernel.call_count])
            backend.close()
    assert answers[0] == answers[1]


@LIMITS
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([0, 1, 7, 2**31, 2**32 - 1]),
            st.sampled_from([0, 1, 2, 31, 32, 2**32 - 1]),
            st.sampled_from([0, 1, 2, 2**20, 2**32 - 1]),
            st.sampled_from([0, 1, PAGE_BYTES, PAGE_BYTES + 1, 2**32 - 1]),
            st.sampled_from([0, 1, 256, 2**20, 2**32 - 1]),
        ),
        min_size=1,
        max_size=70,
    )
)
def test_no_place_moves_a_byte_outside_of_its_slot(places):
    """Places of a damaged catalog, in any order: refused or absent, and the same on both paths."""
    encoded = [Place(np.array(place, "<u4").tobytes()) for place in places]
    keys = [OffloadKey(spread_hash(i)) for i in range(len(places))]

    def run(backend, folder):
        (folder / "00000000.seg").write_bytes(b"\5" * (40 * PAGE_BYTES))
        (folder / "00000000.seg").chmod(0o600)
        size = 2 * PAGE_BYTES
        pool = memoryview(mmap.mmap(-1, (2 * len(places) + 1) * size))
        pool[:] = bytes([GARBAGE]) * len(pool)
        offsets = (2 * np.arange(len(places)) + 1) * size
        batch = RecordBatch.in_pool(keys, encoded, pool, offsets, size)
        failed = backend.read(batch)
        assert set(failed) == set(range(len(places)))
        between = np.frombuffer(pool, np.uint8).reshape(-1, size)[::2]
        assert (between == GARBAGE).all(), "bytes beside a slot were written"
        # Only a small file may be made of them.
        small = [i for i, place in enumerate(places) if place[5] <= 256]
        written = backend.write([batch[i] for i in small])
        return failed, written

    first, second = on_both(run, mode="buffered")
    assert first == second


@pytest.mark.parametrize("payload_bytes", [0, PAGE_BYTES + 1])
def test_a_payload_that_is_not_within_its_slot_is_refused(payload_bytes):
    """The next slot has bytes, too, which would be summed up and stored."""
    place = Place(np.array((1, 0, 0, 1, payload_bytes, 8), "<u4").tobytes())

    def run(backend, folder):
        pool = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        record = RecordIo(OffloadKey(spread_hash(1)), place, pool[:PAGE_BYTES])
        return backend.write([record]), backend.read([record]), files_of(folder)

    refused = ({0: FailureReason.LAYOUT}, {0: FailureReason.CORRUPT}, {})
    assert on_both(run) == [refused, refused]


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_bytes_of_an_earlier_read_do_not_pass_for_those_that_did_not_arrive(mode):
    """The slots hold what was asked for; the file has lost the last payload since."""
    extent = Extent(4, PAGE_BYTES)

    def run(backend, folder):
        assert backend.write(extent.to_write()) == {}
        records = extent.to_read()
        assert backend.read(records) == {}
        (path,) = folder.glob("*.seg")
        os.truncate(path, 4 * PAGE_BYTES)
        return backend.read(records)

    lost = {3: FailureReason.ABSENT}
    assert on_both(run, mode=mode) == [lost, lost]


def test_another_key_or_length_is_refused_on_both_paths():
    extent, others = Extent(3, 5000), Extent(3, 5000)

    def run(backend, folder):
        assert backend.write(extent.to_write()) == {}
        others.places = extent.places
        shorter = np.frombuffer(b"".join(extent.places), PLACE_DTYPE).copy()
        shorter["payload_bytes"] -= 1
        lying = [
            RecordIo(r.key, Place(p.tobytes()), r.slot)
            for r, p in zip(extent.to_read(), shorter, strict=True)
        ]
        return others.served(backend), backend.read(lying), extent.served(backend)

    first, second = on_both(run)
    assert first == second
    assert first[0] == [FailureReason.CORRUPT] * 3
    assert set(first[1].values()) == {FailureReason.CORRUPT}
    assert first[2] == [None] * 3


def test_a_batch_of_extents_is_one_call_each_way(tmp_path):
    """Each return from a call waits for the interpreter."""
    loaded = native()
    called = []
    for name in ("write", "read"):
        function = getattr(loaded.calls, name)
        count = partial(called.append, name)
        setattr(loaded.calls, name, lambda *a, f=function, c=count: (c(), f(*a))[1])
    backend = opened(tmp_path, library=lambda: loaded)
    stage = Stage.of([32, 5, 32, 30], 3 * PAGE_BYTES)
    assert len({extent.segment for extent in stage.extents}) == 2
    assert backend.write(stage.to_write()) == {}
    assert backend.read(stage.to_read()) == {}
    assert backend.read(stage.to_read()[::-3]) == {}
    assert called == ["write", "read", "read"]
    backend.close()


def test_a_known_header_page_is_not_read_again():
    kernel = ScriptedKernel()
    with tempfile.TemporaryDirectory() as folder:
        backend = opened(Path(folder), library=kernel.native, mode="buffered")
        stage = Stage.of([8], PAGE_BYTES)
        assert backend.write(stage.to_write()) == {}
        counts = []
        for chosen in (slice(3, 4), slice(5, 6), slice(2, 8, 2)):
            kernel.begin([])
            assert backend.read(stage.to_read()[chosen]) == {}
            counts.append(kernel.call_count)
        assert counts == [2, 1, 3], "a header page and a payload; then payloads alone"
        backend.close()


def test_the_interpreter_moves_what_the_library_cannot(tmp_path):
    """Keyed records, mapped files, injected system calls; and it says why, once, in the log."""
    cases = {
        "keyed": {"codec": codec_of(1)},
        "mmap": {"mode": "mmap"},
        "injected": {"system": ShortIoSystem()},
        "asks for": {"library": interpreted},
    }
    for word, options in cases.items():
        backend = opened(tmp_path, **{"library": native, **options})
        assert not backend.is_native
        assert word in backend.why_interpreted
        backend.close()
    backend = opened(tmp_path, library=native)
    assert backend.is_native
    assert backend.why_interpreted == ""
    backend.close()


def test_a_limit_of_the_file_size_stops_an_extent_on_both_paths():
    """A short write by the kernel, then EFBIG, in a file that was as long before."""
    stage, before = Stage.of([8, 8], 3 * PAGE_BYTES), Extent(1, 10, page=SEGMENT_PAGES - 2)

    def run(backend, folder):
        assert backend.write(before.to_write()) == {}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30 * PAGE_BYTES, limits[1]))
        try:
            failed = backend.write(stage.to_write())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return failed, files_of(folder), take_cause()

    first, second = on_both(run)
    assert first == second
    assert first[0] == dict.fromkeys(range(8, 16), FailureReason.IO_ERROR)
    assert first[2] == "EFBIG"


@pytest.mark.parametrize(
    ("name", "flags", "status"),
    [
        ("/dev/full", os.O_RDWR, errno.ENOSPC),
        ("/dev/null", os.O_RDONLY, errno.EBADF),
        ("/proc/self/mem", os.O_RDONLY, errno.EBADF),
        ("", 0, errno.EBADF),
    ],
)
def test_the_error_of_a_real_descriptor_comes_back(name, flags, status):
    """A full device, descriptors that cannot be written, and one that is closed."""
    extent = Extent(2, 5000)
    batch = RecordBatch.of(extent.to_write())
    room = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)
    task = IoTask(
        native().calls,
        batch.keys,
        batch.places,
        batch.addresses,
        batch.slot_bytes,
        rank=0,
        room=room,
        room_pages=1,
    )
    (run,) = task.plan_writes()
    fd = os.open(name, flags) if name else 1 << 20
    run.fd = fd
    task.write(1)
    if name:
        os.close(fd)
    assert run.status == status


def test_a_full_file_system_fails_its_extents_alone(tmp_path):
    """Pages that were given back are gone when the device is full: the write itself says so."""
    (tmp_path / "mount").mkdir()
    program = Path(__file__).parents[2] / "faults" / "programs" / "native_full_process.py"
    command = on_small_mount(tmp_path / "mount", [sys.executable, program, tmp_path / "mount"])
    env = environment(Path(__file__).parents[2] / "support")
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["native", "full", "interpreted", "full"]


def test_without_descriptors_the_extents_of_a_batch_are_written_in_turn(tmp_path):
    """The segments of one batch stand in each other's way: the first ones make room."""
    backend = opened(tmp_path, library=native, mode="buffered")
    stage = [Extent(2, 9000, segment=segment) for segment in range(12)]
    records = [record for extent in stage for record in extent.to_write()]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, limits[1]))
    try:
        while True:
            try:
                taken.append(os.open("/", os.O_RDONLY))
            except OSError:
                break
        for _ in range(5):
            os.close(taken.pop())
        failed = backend.write(records)
        served = [extent.served(backend) for extent in stage]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert failed == {}
    assert served == [[None, None]] * 12
    backend.close()
