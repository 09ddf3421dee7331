"""Pages of an LMDB data file: their layout, and the nodes in them, verified.

Facts of data format 1 (LMDB 0.9), from the structures and comments of its `mdb.c` (MDB_page,
MDB_node, MDB_db, MDB_meta; little-endian, 64 bits):

    page    number (u64), pad (u16), flags (u16), then lower and upper (u16 each), or in the first
            page of an overflow run its length (u32); flags are 1 branch, 2 leaf, 4 overflow, 8 meta
    tree    | header, 16 | offsets of nodes (u16), in the order of keys | free | nodes |
                                                                      lower  upper    page end
            nodes lie without gaps, in any order, at even offsets
    node    low and high half of a size (u16 each), flags (u16), key bytes (u16), key, value.
            In a branch, size and flags are the child's page number (48 bits). In a leaf, flags are
            1: the value is in an overflow run, whose first page number stands here; 2: the value
            is the MDB_db of a named database
    MDB_db  pad (u32), flags (u16), depth (u16), pages of branches, leaves and overflow, entries,
            root (u64 each; all ones: empty). All leaves are `depth` pages below the root
    meta    pages 0 and 1; of two, the one with the younger transaction counts. Behind the page
            header: magic, version (u32), address, map bytes (u64), the MDB_db of free pages (its
            pad is the page size) and that of the main database, last page, transaction (u64)
    free    transaction (u64) -> count and page numbers (u64), descending: pages that it freed

Not known here: databases with duplicates, other key orders, data format 3 (LMDB 1.0).
"""

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

__all__ = [
    "BIG",
    "BRANCH",
    "DB_DTYPE",
    "HEADER_BYTES",
    "LEAF",
    "META_DTYPE",
    "NAMED",
    "Bytes",
    "ImageDamagedError",
    "Nodes",
    "Numbers",
    "Words",
    "damage",
    "nodes_of",
    "require",
    "u64_at",
]

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]
"""Rows of pages."""
Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 16
BRANCH = 1
LEAF = 2
BIG = 1
NAMED = 2
_NODE_BYTES = 8
_KEY_BYTES_MAX = 511
_CHILDREN_MIN = 2

DB_DTYPE = np.dtype(
    [
        ("pad", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branch_pages", "<u8"),
        ("leaf_pages", "<u8"),
        ("overflow_pages", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)
META_DTYPE = np.dtype(
    [
        ("number", "<u8"),
        ("page_pad", "<u2"),
        ("page_flags", "<u2"),
        ("bounds", "<u4"),
        ("magic", "<u4"),
        ("version", "<u4"),
        ("address", "<u8"),
        ("map_bytes", "<u8"),
        ("free", DB_DTYPE),
        ("main", DB_DTYPE),
        ("last_page", "<u8"),
        ("transaction", "<u8"),
    ]
)


class ImageDamagedError(Exception):
    """The file is damaged; the message says where."""


@dataclass(slots=True)
class Nodes:
    """The nodes of some pages of one kind, page after page in the order of keys."""

    counts: Numbers
    """How many each page has."""
    size: npt.NDArray[np.uint32]
    """Of a leaf's value, or of a branch the low half of the child's number."""
    flags: Words
    key_bytes: Numbers
    key_at: Numbers
    """Offset of the key in the bytes of all pages."""

    def page(self) -> Numbers:
        """Return the index of each node's page among the pages."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def nodes_of(numbers: Numbers, words: Words, kind: int) -> Nodes:
    """Verify pages that should be branches, or leaves, and take their nodes apart.

    Raises:
        ImageDamagedError: a page is not as the library leaves it.
    """
    width = words.shape[1]
    page_bytes = 2 * width
    lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
    least = HEADER_BYTES + 2 * (1 if kind == LEAF else _CHILDREN_MIN)
    sound = (words.view("<i8")[:, 0] == numbers) & (words[:, 5] == kind)
    sound &= (lower >= least) & (lower <= upper) & (upper <= page_bytes)
    sound &= lower & 1 == 0
    require(sound, numbers, "page header")
    counts = (lower - HEADER_BYTES) >> 1
    firsts = np.cumsum(counts) - counts
    page_at = np.arange(len(numbers)) * width
    flat = words.reshape(-1)
    # Word of a node's offset: the first behind its page's header, and on by its rank in the page.
    slots = np.repeat(page_at + HEADER_BYTES // 2 - firsts, counts)
    slots += np.arange(len(slots))
    offset = flat[slots]
    require(
        (offset <= page_bytes - _NODE_BYTES) & (offset & 1 == 0), numbers, "node offset", counts
    )
    at = np.repeat(page_at, counts)
    at += offset >> 1
    # The four words of a node's head as one number, wherever it begins.
    head = np.ndarray((flat.size - 3,), "<u8", flat.data, strides=(2,))[at]
    size, flags = head.view("<u4")[::2], head.view("<u2")[2::4]
    key_bytes = (head >> 48).view(np.int64)
    sound = key_bytes <= _KEY_BYTES_MAX
    taken = key_bytes + _NODE_BYTES
    if kind == LEAF:
        sound &= (flags <= NAMED) & (key_bytes > 0)
        # A value in an overflow run leaves its page number here.
        big = flags == BIG
        taken += np.where(big, 8, size) if big.any() else size
    taken += taken & 1
    sound &= offset + taken <= page_bytes
    require(sound, numbers, "node", counts)
    # Without gaps: the sizes add up, and where a node ends, another begins or the page ends, which
    # is the first word of the next page. No node begins in a page's header.
    begins = np.zeros(flat.size + 1, bool)
    begins[::width] = True
    begins[at] = True
    sound = np.add.reduceat(taken, firsts) == page_bytes - upper
    sound &= begins[page_at + (upper >> 1)]
    require(sound, numbers, "space of its nodes")
    require(begins[at + (taken >> 1)], numbers, "node", counts)
    return Nodes(counts, size, flags, key_bytes, 2 * at + _NODE_BYTES)


def u64_at(content: Bytes, offsets: Numbers) -> Numbers:
    """Return numbers that lie anywhere; those beyond 63 bits are negative."""
    rows = content[offsets[:, None] + np.arange(8)]
    numbers: Numbers = rows.view("<i8")[:, 0]
    return numbers


def require(
    sound: npt.NDArray[np.bool_], numbers: Numbers, what: str, counts: Numbers | None = None
) -> None:
    """Check one verdict per page; or, if the pages have so many, one per node.

    Raises:
        ImageDamagedError: not all are true.
    """
    if not sound.all():
        pages = numbers if counts is None else np.repeat(numbers, counts)
        damage(f"page {pages[int(np.argmin(sound))]}", what)


def damage(where: str, what: str) -> NoReturn:
    """Report damage.

    Raises:
        ImageDamagedError: always.
    """
    raise ImageDamagedError(f"{where}: {what}")
