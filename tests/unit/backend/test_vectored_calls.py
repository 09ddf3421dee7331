"""Vectored calls are repeated until all is moved, whatever a device moves at once."""

import random

import pytest

from tierstore.backend.segments.vectored import move_all
from tierstore.layout import PAGE_BYTES


class Device:
    """A file of `size_bytes` that moves as many bytes per call as `choose` says."""

    def __init__(self, size_bytes, choose):
        self.content = random.Random(1).randbytes(size_bytes)
        self.choose = choose
        self.offsets = []

    def preadv(self, fd, buffers, offset):
        assert fd == 3
        self.offsets.append(offset)
        wanted = sum(map(len, buffers))
        moved = min(self.choose(wanted), wanted, max(0, len(self.content) - offset))
        left = moved
        for buffer in buffers:
            count = min(left, len(buffer))
            buffer[:count] = self.content[offset : offset + count]
            offset, left = offset + count, left - count
        return moved


def buffers_of(page_counts):
    return [memoryview(bytearray(count * PAGE_BYTES)) for count in page_counts]


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_arrives_from_a_device_that_stops_anywhere_behind_a_page(seed) -> None:
    dice = random.Random(seed)
    buffers = buffers_of(dice.choices(range(1, 5), k=dice.randrange(1, 8)))
    size_bytes = sum(map(len, buffers))
    device = Device(4 * PAGE_BYTES + size_bytes, lambda _: dice.randrange(PAGE_BYTES, 1 << 15))
    assert move_all(device.preadv, 3, buffers, 4 * PAGE_BYTES) == size_bytes
    assert b"".join(buffers) == device.content[4 * PAGE_BYTES :]
    assert all(offset % PAGE_BYTES == 0 for offset in device.offsets)


def test_at_the_end_of_a_file_only_whole_pages_count() -> None:
    device = Device(2 * PAGE_BYTES + 100, lambda wanted: wanted)
    assert move_all(device.preadv, 3, buffers_of([4]), 0) == 2 * PAGE_BYTES


def test_what_moves_less_than_a_page_is_asked_once_more_and_then_given_up() -> None:
    stuck = Device(8 * PAGE_BYTES, lambda _: 100)
    assert move_all(stuck.preadv, 3, buffers_of([8]), 0) == 0
    assert stuck.offsets == [0, 0]
    answers = iter([100, PAGE_BYTES, 100, 7 * PAGE_BYTES])
    passing = Device(8 * PAGE_BYTES, lambda _: next(answers))
    assert move_all(passing.preadv, 3, buffers_of([8]), 0) == 8 * PAGE_BYTES


def test_a_device_that_moves_nothing_is_asked_once() -> None:
    device = Device(0, lambda wanted: wanted)
    assert move_all(device.preadv, 3, buffers_of([1, 1]), 0) == 0
    assert device.offsets == [0]


def test_no_buffers_are_no_call() -> None:
    assert move_all(Device(0, lambda _: 0).preadv, 3, [], 0) == 0
