import mmap

import numpy as np
import pytest

from tierstore.errors import ClosedError, ConfigError
from tierstore.host_pool import HostPool
from tierstore.layout import PAGE_BYTES


def test_pool_is_page_aligned_writable_and_zeroed():
    with HostPool(3 * PAGE_BYTES) as pool:
        assert pool.address % mmap.PAGESIZE == 0
        assert pool.array.shape == (pool.size_bytes,)
        assert pool.array.dtype == np.uint8
        assert not pool.array.any()
        pool.view(PAGE_BYTES, 4)[:] = b"abcd"
        assert bytes(pool.array[PAGE_BYTES : PAGE_BYTES + 5]) == b"abcd\0"


def test_view_lies_at_its_offset_from_the_address():
    with HostPool(4 * PAGE_BYTES) as pool:
        view = np.frombuffer(pool.view(2 * PAGE_BYTES, PAGE_BYTES), np.uint8)
        assert view.ctypes.data == pool.address + 2 * PAGE_BYTES
        assert pool.view(0, 8).format == "B"


def test_size_is_rounded_up_to_whole_pages():
    with HostPool(PAGE_BYTES + 1) as pool:
        assert pool.size_bytes == 2 * PAGE_BYTES


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_pool_without_bytes_is_refused(size_bytes):
    with pytest.raises(ValueError, match="size_bytes"):
        HostPool(size_bytes)


@pytest.mark.parametrize(("first", "size"), [(-1, 2), (0, -1), (0, 4097), (4096, 1)])
def test_view_outside_of_the_pool_is_refused(first, size):
    with HostPool(PAGE_BYTES) as pool, pytest.raises(ValueError, match="outside of the pool"):
        pool.view(first, size)


def test_huge_pages_are_only_a_hint():
    with HostPool(4 << 20, huge_pages=True) as pool:
        pool.array[-1] = 7
        assert pool.view(pool.size_bytes - 1, 1)[0] == 7


def test_impossible_size_names_the_setting_to_lower():
    with pytest.raises(ConfigError, match=r"primary\.capacity.*lower it"):
        HostPool(1 << 60)


def test_closed_pool_is_refused_and_close_is_idempotent():
    pool = HostPool(PAGE_BYTES)
    pool.close()
    pool.close()
    for use in (lambda: pool.array, lambda: pool.address, lambda: pool.view(0, 1)):
        with pytest.raises(ClosedError):
            use()


def test_view_that_outlives_the_pool_keeps_its_bytes():
    pool = HostPool(PAGE_BYTES)
    view = pool.view(0, 4)
    view[:] = b"kept"
    pool.close()
    assert bytes(view) == b"kept"


def test_reserved_huge_pages_are_taken_or_their_lack_is_warned_of(caplog):
    with HostPool(4096, hugetlb=True) as pool:
        pool.array[:] = 1
        assert pool.size_bytes == len(pool.array)
        assert pool.size_bytes == 2 << 20 or caplog.records
    assert all("vm.nr_hugepages" in record.getMessage() for record in caplog.records)


def test_a_pool_of_reserved_huge_pages_ends_where_its_mapping_ends(monkeypatch):
    """The kernel refuses to place or to keep from children a part of a huge page."""
    plain = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda fd, size, flags: plain(fd, size, flags & 0xFFF))
    with HostPool((2 << 20) + 1, hugetlb=True) as pool:
        assert pool.size_bytes == len(pool.array) == 4 << 20
