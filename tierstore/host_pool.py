"""The bytes of the primary pool: anonymous, page-aligned host memory."""

import logging
import mmap
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tierstore.bounded_log import bounded
from tierstore.errors import ClosedError, ConfigError
from tierstore.layout import PAGE_BYTES, round_up

__all__ = ["HostPool"]

_logger = bounded(logging.getLogger(__name__))

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_HUGETLB = 0x40000  # not in Python's mmap
_HUGE_PAGE_BYTES = 2 << 20


class HostPool:
    """One private mapping of zeroed bytes. It knows no device: whoever pins it registers `address`.

    Memory is taken from the kernel page by page at first touch. Who registers the memory with a
    device unregisters it before `close`.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool = False, hugetlb: bool = False) -> None:
        """Map `size_bytes`, rounded up to whole pages: huge ones with `hugetlb`.

        `huge_pages` is a hint to the kernel; without support for it, nothing changes. `hugetlb`
        takes reserved huge pages; if too few are free, it logs a warning and takes ordinary ones.

        Raises:
            ValueError: `size_bytes` is not positive.
            ConfigError: the system cannot give that much address space or memory.
        """
        if size_bytes <= 0:
            raise ValueError(f"size_bytes: expected a positive size, got {size_bytes}")
        self._size_bytes = round_up(size_bytes, PAGE_BYTES)
        try:
            mapping = _map_reserved(self._size_bytes) if hugetlb else None
            if mapping is None:
                mapping = mmap.mmap(-1, self._size_bytes, _ANONYMOUS)
        except (OSError, OverflowError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"primary.capacity: the system cannot give {self._size_bytes} bytes of memory "
                f"({error}); lower it, or raise what limits the process (ulimit -v, the container)"
            ) from error
        if huge_pages:
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except (OSError, AttributeError) as error:
                _logger.info("huge pages not available: cause=%s", error)
        self._size_bytes = len(mapping)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self._size_bytes

    @property
    def address(self) -> int:
        """Virtual address of the first byte, a multiple of the page size.

        Raises:
            ClosedError: after `close`.
        """
        self._open_bytes()
        return self._address

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The pool as a writable uint8 array of shape (size_bytes,); no copy.

        The mapping lives as long as this array or a slice of it, even after `close`.

        Raises:
            ClosedError: after `close`.
        """
        return self._open_bytes()

    def view(self, first_byte: int, size_bytes: int) -> memoryview:
        """Return the writable bytes [first_byte, first_byte + size_bytes); no copy.

        Raises:
            ValueError: the range does not lie within the pool.
            ClosedError: after `close`.
        """
        if first_byte < 0 or size_bytes < 0 or first_byte + size_bytes > self._size_bytes:
            raise ValueError(
                f"view: bytes [{first_byte}, {first_byte + size_bytes}) lie outside of the pool "
                f"of {self._size_bytes} bytes"
            )
        return self._open_bytes()[first_byte : first_byte + size_bytes].data

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left; idempotent."""
        # The array owns the mapping, and its views keep the array. Unmapping by force would turn
        # the next access through a forgotten view into a crash.
        self._bytes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open_bytes(self) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            raise ClosedError("the primary pool was used after close")
        return self._bytes


def _map_reserved(size_bytes: int) -> mmap.mmap | None:
    """Map huge pages that the administrator reserved; None: there are too few."""
    try:
        return mmap.mmap(-1, round_up(size_bytes, _HUGE_PAGE_BYTES), _ANONYMOUS | _MAP_HUGETLB)
    except OSError as error:
        _logger.warning(
            "reserved huge pages not available: bytes=%d cause=%s; raise vm.nr_hugepages or unset "
            "primary.hugetlb",
            size_bytes,
            error,
        )
        return None
