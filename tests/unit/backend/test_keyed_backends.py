"""Keyed records through backends: extents in several writes, failing devices, little memory."""

import errno
import subprocess
import sys

import pytest
from keyed import KINDS, codec_of
from opened_backend import MODES, opened
from python_paths import environment

from tierstore.backend.reopening import ReopeningBackend
from tierstore.errors import BackendError, ConfigError, MissingExtraError
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import Extent, descriptor_count, write_extent
from tierstore.testing.faults import FaultSchedule, FaultySystem, ShortIoSystem
from tierstore.transfer import FailureReason

MIB = 1 << 20


def large_extent():
    """Return an extent whose ciphertext takes three parts, the last of one record."""
    return Extent(9, MIB - 100, segment_pages=9 * MIB // PAGE_BYTES + 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("encrypt", KINDS)
def test_an_extent_may_take_several_writes(tmp_path, mode, encrypt):
    codec, extent = codec_of(1, encrypt=encrypt), large_extent()
    backend = opened(tmp_path, mode=mode, codec=codec)
    write_extent(backend, extent)
    assert extent.served(backend) == [None] * 9
    records = extent.to_read()
    assert backend.read([records[i] for i in (7, 2, 4)]) == {}
    assert records[4].slot[: MIB - 100] == extent.payloads[4]
    backend.close()


@pytest.mark.parametrize("encrypt", KINDS)
def test_short_reads_and_writes_are_continued(tmp_path, encrypt):
    extents = Extent(5, 9000), Extent(3, 9000, page=100)
    system = ShortIoSystem(3 * PAGE_BYTES)
    backend = opened(tmp_path, codec=codec_of(1, encrypt=encrypt), system=system)
    write_extent(backend, *extents)
    for extent in extents:
        assert extent.served(backend) == [None] * len(extent)
    backend.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_extent_fails_as_a_whole_whichever_of_its_writes_fails(tmp_path, code):
    before = descriptor_count()
    extent = large_extent()
    for fail_at in range(1, 40):
        directory = tmp_path / str(fail_at)
        schedule = FaultSchedule(1 << 60)
        codec = codec_of(1, encrypt=True)
        backend = opened(directory, codec=codec, system=FaultySystem(schedule, code))
        schedule._fail_at = schedule.call_count + fail_at
        failed = backend.write(extent.to_write())
        assert len(failed) in {0, 9}
        served = extent.served(backend)  # compares every byte of what is served
        backend.close()
        if not schedule.has_struck:
            assert served == [None] * 9
            break
    else:
        pytest.fail("the calls do not end")
    assert descriptor_count() == before


def test_a_record_that_there_is_no_memory_to_decrypt_is_no_forgery():
    """It fails as an I/O error does: it is hidden for a while, and not removed."""
    code = """
import mmap, resource
import numpy as np
from keyed import codec_of
from tierstore.codec.plain import ReadBatch
from tierstore.key import Namespace, make_offload_keys
keys = make_offload_keys(Namespace(b"memories"), 0, [bytes(range(32))])
slot = memoryview(mmap.mmap(-1, 64 << 20))
sizes = np.array([len(slot)], np.uint32)
made = codec_of(1, encrypt=True).encode(keys, [slot], sizes, rank=0)
header = made.headers[:1].copy()
slot[:] = made.slots[0]
codec = codec_of(1)  # one that has no room yet
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * 4096 + (32 << 20)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
check = codec.check(ReadBatch(keys, sizes, [slot], header), rank=0)
check.examine(0, 1)
print(check.verified().tolist(), codec.explain(header.tobytes(), slot, keys[0], rank=0).reason)
resource.setrlimit(resource.RLIMIT_AS, before)
check.examine(0, 1)
print(check.verified().tolist(), not any(slot[:4096]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"[False] {FailureReason.IO_ERROR}", "[True] True"], (
        done.stderr
    )


@pytest.mark.parametrize("error", [ConfigError("no key"), MissingExtraError("no library")])
def test_a_key_that_cannot_be_used_is_told_at_the_opening_and_ends_no_thread_later(error):
    errors = [BackendError("no device"), error]

    def fail():
        raise errors.pop(0)

    extent = Extent(2, 5000)
    backend = ReopeningBackend("disk", fail)
    backend.open()
    assert set(backend.read(extent.to_read()).values()) == {FailureReason.STALLED}
    assert errors == []
    errors.append(error)
    with pytest.raises(type(error)):
        ReopeningBackend("disk", fail).open()
