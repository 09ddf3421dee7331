"""Small files of a directory that is held by a descriptor: reads may stop anywhere."""

import pytest

from tierstore.device.directory import Directory
from tierstore.device.system import SystemCalls
from tierstore.testing.faults import ShortIoSystem

CONTENT = bytes(range(100))


class Stopping(SystemCalls):
    """Reads return nothing at all, so often."""

    def __init__(self, count):
        self.left = count

    def preadv(self, fd, buffers, offset):
        self.left -= 1
        return 0 if self.left >= 0 else super().preadv(fd, buffers, offset)


@pytest.fixture
def path(tmp_path):
    with Directory.open(tmp_path) as directory:
        directory.write("small", CONTENT)
    return tmp_path


@pytest.mark.parametrize("bytes_max", [1, 7, 99])
@pytest.mark.parametrize("size_max", [50, 100, 200])
def test_a_small_file_is_read_up_to_its_end(path, bytes_max, size_max):
    with Directory.open(path, system=ShortIoSystem(bytes_max)) as directory:
        assert directory.read("small", size_max) == CONTENT[:size_max]


def test_a_read_that_returns_nothing_is_not_the_end(path):
    with Directory.open(path, system=Stopping(1)) as directory:
        assert directory.read("small", 200) == CONTENT
    with (
        Directory.open(path, system=Stopping(9)) as directory,
        pytest.raises(OSError, match="before the end"),
    ):
        directory.read("small", 200)
