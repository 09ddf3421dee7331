"""The data file of an LMDB environment at rest: which meta page counts, and pages as arrays.

Numbers read from the file are bounded before anything is read by them. See `page` for the format.
"""

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.device.system import read_up_to_end
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.lmdb_env.page import META_DTYPE, Numbers, Words, damage

__all__ = ["META_COUNT", "Image", "image_bytes"]

META_COUNT = 2
"""Meta pages, which are the first pages of a file."""

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_META = 8
_BLOCK_PAGES = 256
"""Pages that are checked at once: their arrays stay in the processor's cache."""
_TRANSACTION_BITS = 48
"""No file reaches such a transaction. What is written after it would be verified as damage."""


class Image:
    """One data file, by a descriptor that the caller keeps open."""

    def __init__(self, descriptor: int, page_count_max: int, pace: VerifyPace = UNHURRIED) -> None:
        """Read and verify the meta pages.

        Raises:
            ImageDamagedError: they are damaged, or name more pages than `page_count_max` and than
                the file has.
            OSError: the file cannot be read.
        """
        self.descriptor = descriptor
        self.pace = pace
        self.size_bytes = os.fstat(descriptor).st_size
        self.page_bytes = 0
        meta = self.meta = self._read_metas()
        """The meta page that counts: the one with the younger transaction."""
        self.transaction = int(meta["transaction"])
        self.page_count = int(meta["last_page"]) + 1
        count_max = max(page_count_max, self.size_bytes // self.page_bytes)
        if not META_COUNT <= self.page_count <= count_max:
            damage("meta page", "last page")

    def pages(self, numbers: Numbers) -> Iterator[tuple[Numbers, Words]]:
        """Read pages, some at a time, as rows of 16-bit words, valid until the next are asked for.

        Raises:
            ImageDamagedError: the file ends before.
            OSError: it cannot be read.
        """
        buffer = np.empty((min(_BLOCK_PAGES, len(numbers)), self.page_bytes), np.uint8)
        for start in range(0, len(numbers), _BLOCK_PAGES):
            block = numbers[start : start + _BLOCK_PAGES]
            content = buffer[: len(block)]
            begins = np.concatenate([[0], np.flatnonzero(np.diff(block) != 1) + 1, [len(block)]])
            firsts = block[begins[:-1]].tolist()
            for first, (begin, end) in zip(firsts, pairwise(begins.tolist()), strict=True):
                part = content[begin:end].reshape(-1).data
                offset = first * self.page_bytes
                if read_up_to_end(os.preadv, self.descriptor, part, offset) < len(part):
                    damage(f"page {first + end - begin - 1}", "beyond the end of the file")
            yield block, content.view(np.uint16)
            self.pace.step()

    def read(self, offset: int, size: int) -> bytes:
        """Read so many bytes.

        Raises:
            ImageDamagedError: the file ends before.
            OSError: it cannot be read.
        """
        content = _read(self.descriptor, size, offset)
        if len(content) < size:
            damage(f"page {offset // (self.page_bytes or 1)}", "beyond the end of the file")
        return content

    def _read_metas(self) -> npt.NDArray[np.void]:
        metas = [_meta_of(self.read(0, META_DTYPE.itemsize))]
        page_bytes = self.page_bytes = int(metas[0]["free"]["pad"])
        if page_bytes not in {1 << shift for shift in range(9, 17)}:
            damage("page 0", "page size")
        metas.append(_meta_of(self.read(page_bytes, META_DTYPE.itemsize)))
        for number, meta in enumerate(metas):
            transaction = int(meta["transaction"])
            if (
                meta["magic"] != _MAGIC
                or meta["version"] != _VERSION
                or meta["page_flags"] != _META
                or meta["number"] != number
                or meta["free"]["pad"] != page_bytes
                or (transaction and transaction % 2 != number)
                or transaction >> _TRANSACTION_BITS
            ):
                damage(f"page {number}", "meta page")
        return _younger(*metas)


def image_bytes(descriptor: int) -> int:
    """Return the size of a sound data file up to its last page; the rest is unused.

    Raises:
        OSError: it cannot be read.
    """
    first = _meta_of(_read(descriptor, META_DTYPE.itemsize, 0))
    page_bytes = int(first["free"]["pad"])
    second = _meta_of(_read(descriptor, META_DTYPE.itemsize, page_bytes))
    # The older one does not count, and was not verified.
    return (int(_younger(first, second)["last_page"]) + 1) * page_bytes


def _younger(first: npt.NDArray[np.void], second: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    return second if second["transaction"] > first["transaction"] else first


def _read(descriptor: int, size: int, offset: int) -> bytes:
    """Return so many bytes, or all up to the end of the file."""
    content = os.pread(descriptor, size, offset)
    if len(content) == size:
        return content
    buffer = memoryview(bytearray(size))
    return bytes(buffer[: read_up_to_end(os.preadv, descriptor, buffer, offset)])


def _meta_of(content: bytes) -> npt.NDArray[np.void]:
    padded = content.ljust(META_DTYPE.itemsize, b"\0")
    meta: npt.NDArray[np.void] = np.frombuffer(padded, META_DTYPE)[0]
    return meta
