"""Random damage to any file of a store: never a wrong byte, never a dead process or tier."""

import errno
import random
import struct
from functools import partial

import pytest
from campaign import run_campaign
from damages import OLD, DamagedStores

from tierstore.catalog.rows import CATALOG_VERSION
from tierstore.device.block_units import BlockUnits
from tierstore.device.system import SystemCalls

GRAVE = ("wrong bytes", "crashes", "hangs", "exceptions", "over quota")


def seeds_of(count):
    first = random.randrange(1, 1 << 32)
    print(f"seeds from {first}")
    return range(first, first + count)


@pytest.fixture(params=["file", "lmdb"])
def backend(request):
    return request.param


def flip_in_catalog(row, path, *, at, bit):
    """Flip a bit of the row in use, and of older ones in pages that are free."""
    data = path / "catalog" / "data.mdb"
    content = bytearray(data.read_bytes())
    starts = [i for i in range(len(content)) if content.startswith(row, i)]
    for start in starts:
        content[start + at] ^= bit
    data.write_bytes(content)
    return [len(starts)]


def test_a_store_that_is_not_damaged_loses_nothing(tmp_path, backend):
    answer = DamagedStores(tmp_path, backend).run(0)
    assert answer["problems"] == []
    assert answer["counts"]["recomputed"] == 0


def test_random_damage_brings_no_wrong_byte_and_ends_no_process(tmp_path, backend):
    found = run_campaign(f"damage-{backend}", seeds_of(40), folder=tmp_path)
    assert {name: found.counts[name] for name in GRAVE} == dict.fromkeys(GRAVE, 0), found.failures
    assert found.counts["tries"] == 40
    assert found.counts["recomputed"] > len(OLD), "hardly anything was lost: nothing was damaged"


def test_a_tier_with_random_damage_is_in_use_again_without_a_hand(tmp_path, backend):
    found = run_campaign(f"damage-{backend}", range(1, 61), folder=tmp_path)
    assert found.failures == []


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_damaged_number_in_the_row_of_a_catalog_leaves_its_tier_in_use(tmp_path, backend, state):
    """Method: of each number in its first row, and of its checksum, a low bit and two high ones.

    What is given out next, what kind of tier it is, of which release: nothing else says so.
    """
    stores = DamagedStores(tmp_path, backend)
    row = b"state" + struct.pack("<QQQ", CATALOG_VERSION, backend == "lmdb", 1)
    number_count = 13 + 1
    for at in range(0, 8 * number_count, 8):
        for byte, bit in ((0, 0x01), (4, 0x80), (7, 0x80)):
            damage = partial(flip_in_catalog, row, at=len(b"state") + at + byte, bit=bit)
            answer = stores.run_damaged(state, damage)
            assert answer["damages"] > [0]
            assert answer["problems"] == [], (at // 8, byte, bit)


class NoHoles(SystemCalls):
    """A file system that takes back whole files only: the catalog has a row for that."""

    def punch_hole(self, fd, offset, size_bytes):
        raise OSError(errno.EOPNOTSUPP, "refused")


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_damaged_row_of_units_leaves_its_tier_in_use(tmp_path, backend, state):
    """Method: in each byte of the row and its key the highest bit is flipped, or the lowest."""
    stores = DamagedStores(tmp_path, backend, system=NoHoles())
    row = b"units" + BlockUnits(frees_parts=False).pack()
    for at in range(len(row)):
        damage = partial(flip_in_catalog, row, at=at, bit=(0x01, 0x80)[at % 2])
        answer = stores.run_damaged(state, damage)
        assert answer["damages"] > [0]
        assert answer["problems"] == [], at


@pytest.mark.exhaustive
@pytest.mark.timeout(14_400)
def test_ten_thousand_random_damages_leave_tiers_in_use(tmp_path, backend):
    found = run_campaign(f"damage-{backend}", seeds_of(5000), folder=tmp_path, jobs=2)
    print(found.counts, found.stall_seconds)
    assert found.failures == []


def test_a_campaign_notices_who_crashes_and_who_hangs(tmp_path):
    found = run_campaign("mishap", range(1, 8), folder=tmp_path, seconds_max=20)
    assert found.counts == {"tries": 7, "failed": 2, "crashes": 1, "hangs": 1}
    assert [answer["seed"] for answer in found.failures] == [3, 5]
    assert "Segmentation fault" in found.failures[0]["problems"][0]
