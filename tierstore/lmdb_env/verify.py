"""Verification of an LMDB data file at rest, before the library maps it.

LMDB trusts its pages: a flipped bit in one may end the process or destroy other records. What is
verified here is all that the library relies on when it follows, changes and frees pages; not what
keys and values say, nor that keys are in order: those cost a miss, or a catalog finds them itself
(`catalog.check`). See `page` for the format.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.device.system import read_up_to_end
from tierstore.lmdb_env.page import (
    BIG,
    BRANCH,
    DB_DTYPE,
    HEADER_BYTES,
    LEAF,
    META_DTYPE,
    NAMED,
    Bytes,
    ImageDamagedError,
    Nodes,
    Numbers,
    Words,
    damage,
    nodes_of,
    require,
    u64_at,
)

__all__ = ["find_damage", "image_bytes"]

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_DEPTH_MAX = 32
_EMPTY = (1 << 64) - 1

_OVERFLOW, _META = 4, 8
_INTEGER_KEYS = 8

_BLOCK_PAGES = 256
"""Pages that are checked at once: their arrays stay in the processor's cache."""

_BLOCK_RUNS = 4096
"""Heads of overflow runs that are asked of the device at once."""

_META_COUNT = 2
_TRANSACTION_BITS = 48
"""Nobody counts further. What is written after such a number would be verified as damage."""
_FREE_KEY_BYTES = 8
_NO_NUMBERS: Numbers = np.empty(0, np.int64)


@dataclass(slots=True)
class _Tree:
    """One B+tree: its root as stored, and what was found below it."""

    name: str
    row: npt.NDArray[np.void]
    leaves: Numbers = field(default_factory=lambda: _NO_NUMBERS)
    floors: Numbers = field(default_factory=lambda: _NO_NUMBERS)
    """Of each leaf the number that the branches give as its least, if keys are numbers."""
    branch_count: int = 0
    entry_count: int = 0
    overflow_count: int = 0

    @property
    def is_empty(self) -> bool:
        return int(self.row["root"]) == _EMPTY


def find_damage(descriptor: int, *, page_count_max: int) -> str:
    """Verify a data file that nobody has open; return what is wrong with it, empty: nothing.

    An empty file is a new one. More pages than `page_count_max` and than the file has are taken for
    damage. Reads every page of every tree, and
    the head of every overflow run: in the kernel's cache about 110 ms for a catalog of 10^6 records
    (200 MiB), and 1.6 us per run.

    Raises:
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    if size == 0:
        return ""
    try:
        _Image(descriptor, size, page_count_max).verify()
    except ImageDamagedError as error:
        return str(error)
    return ""


def image_bytes(descriptor: int) -> int:
    """Return the size of a sound data file up to its last page; what lies behind is nothing.

    Raises:
        OSError: it cannot be read.
    """
    first = _meta_of(_read(descriptor, META_DTYPE.itemsize, 0))
    page_bytes = int(first["free"]["pad"])
    second = _meta_of(_read(descriptor, META_DTYPE.itemsize, page_bytes))
    # The older one was not verified: nobody reads it any more.
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


class _Image:
    def __init__(self, descriptor: int, size: int, page_count_max: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._page_count_max = page_count_max
        self._page_bytes = 0
        self._page_count = 0
        self._transaction = 0
        self._used = np.zeros(0, bool)

    def verify(self) -> None:
        meta = self._read_metas()
        self._used = np.zeros(self._page_count, bool)
        free, main = _Tree("free", meta["free"]), _Tree("main", meta["main"])
        if free.row["flags"] != _INTEGER_KEYS:
            damage("database free", "flags")
        free_pages = self._verify_free(free)
        named = self._verify_trees([main])
        if self._verify_trees(named):
            damage("database", "named databases in a named database")
        # Last, so that a page that is free and used is found here.
        self._use(free_pages, "free list")
        # A page that is neither would be charged for good, and so would be each that a damaged
        # number adds. The library's own audit wants them to add up, too.
        if not self._used[_META_COUNT:].all():
            first = _META_COUNT + int(np.argmin(self._used[_META_COUNT:]))
            damage(f"page {first}", "without a purpose")

    def _read_metas(self) -> npt.NDArray[np.void]:
        metas = [_meta_of(self._read(0, META_DTYPE.itemsize))]
        page_bytes = self._page_bytes = int(metas[0]["free"]["pad"])
        if page_bytes not in {1 << shift for shift in range(9, 17)}:
            damage("page 0", "page size")
        metas.append(_meta_of(self._read(page_bytes, META_DTYPE.itemsize)))
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
        meta = _younger(*metas)
        self._transaction = int(meta["transaction"])
        self._page_count = int(meta["last_page"]) + 1
        count_max = max(self._page_count_max, self._size // page_bytes)
        if not _META_COUNT <= self._page_count <= count_max:
            damage("meta page", "last page")
        return meta

    def _verify_trees(self, trees: list[_Tree]) -> list[_Tree]:
        """Verify trees down to their values; return the named databases found in them."""
        for tree in trees:
            if tree.row["flags"]:
                damage(f"database {tree.name}", "flags")
            self._descend(tree)
        numbers = np.concatenate([tree.leaves for tree in trees] or [_NO_NUMBERS])
        owners = np.repeat(np.arange(len(trees)), [len(tree.leaves) for tree in trees])
        # All trees in one pass over the file, in its order: their leaves lie mixed.
        order = np.argsort(numbers)
        numbers, owners = numbers[order], owners[order]
        named: list[_Tree] = []
        runs: list[Numbers] = []
        done = 0
        for block, words in self._pages(numbers):
            nodes = nodes_of(block, words, LEAF)
            block_owners = owners[done : done + len(block)]
            done += len(block)
            counts = np.bincount(block_owners, nodes.counts, len(trees)).tolist()
            for tree, count in zip(trees, counts, strict=True):
                tree.entry_count += int(count)
            content = words.view(np.uint8).reshape(-1)
            big = np.flatnonzero(nodes.flags == BIG)
            if len(big):
                first = u64_at(content, nodes.key_at[big] + nodes.key_bytes[big])
                big_owners = block_owners[nodes.page()[big]]
                runs.append(np.stack([first, nodes.size[big], big_owners], axis=1))
            rows = np.flatnonzero(nodes.flags == NAMED).tolist()
            named += [_named_tree(content, nodes, index) for index in rows]
        for run_block in runs:
            self._verify_runs(trees, run_block)
        for tree in trees:
            _verify_counts(tree)
        return named

    def _verify_free(self, tree: _Tree) -> Numbers:
        """Verify the database of free pages; return the pages that it lists."""
        self._descend(tree)
        lists = [_NO_NUMBERS]
        youngest = 0
        done = 0
        for block, words in self._pages(tree.leaves):
            nodes = nodes_of(block, words, LEAF)
            content = words.view(np.uint8).reshape(-1)
            floors = tree.floors[done : done + len(block) + 1]
            done += len(block)
            tree.entry_count += len(nodes.flags)
            if (nodes.key_bytes != _FREE_KEY_BYTES).any() or (nodes.flags > BIG).any():
                damage("free list", "a node")
            transactions = u64_at(content, nodes.key_at)
            # By what the branches say the library searches: it would miss a list, or add it anew.
            ends = np.cumsum(nodes.counts)
            is_misled = bool((transactions[ends - nodes.counts] < floors[: len(block)]).any())
            before = ends[: len(floors) - 1] - 1
            if is_misled or (transactions[before] >= floors[1:]).any():
                damage("free list", "its branches")
            for i, transaction in enumerate(transactions.tolist()):
                if not youngest < transaction <= self._transaction:
                    damage("free list", "the order of transactions")
                youngest = transaction
                lists.append(self._free_list(tree, content, nodes, i))
        _verify_counts(tree)
        return np.concatenate(lists)

    def _free_list(self, tree: _Tree, content: Bytes, nodes: Nodes, index: int) -> Numbers:
        start = int(nodes.key_at[index]) + _FREE_KEY_BYTES
        size = int(nodes.size[index])
        if nodes.flags[index] == BIG:
            first = int(u64_at(content, np.array([start]))[0])
            self._verify_runs([tree], np.array([[first, size, 0]], np.int64))
            raw = self._read(first * self._page_bytes + HEADER_BYTES, size)
        else:
            raw = content[start : start + size].tobytes()
        if size < _FREE_KEY_BYTES or size % _FREE_KEY_BYTES:
            damage("free list", "its length")
        numbers = np.frombuffer(raw, "<i8")
        count = int(numbers[0])
        if not 0 <= count < len(numbers):
            damage("free list", "its count")
        numbers = numbers[1 : count + 1]
        if (np.diff(numbers) >= 0).any():
            damage("free list", "its order")
        return numbers

    def _descend(self, tree: _Tree) -> None:
        """Find the leaves of a tree in the order of keys; verify the branches above them."""
        depth = int(tree.row["depth"])
        where = f"database {tree.name}"
        if tree.is_empty:
            if depth:
                damage(where, "no root")
            return
        if not 1 <= depth <= _DEPTH_MAX:
            damage(where, "depth")
        level = np.array([min(int(tree.row["root"]), self._page_count)], np.int64)
        tree.floors = np.zeros(1, np.int64)
        for _ in range(depth - 1):
            self._use(level, where)
            children, floors = [], []
            done = 0
            for block, words in self._pages(level):
                nodes = nodes_of(block, words, BRANCH)
                children.append(nodes.size | nodes.flags.astype(np.int64) << 32)
                if tree.row["flags"] == _INTEGER_KEYS:
                    floors.append(_floors(words, nodes, tree.floors[done : done + len(block)]))
                done += len(block)
            tree.branch_count += len(level)
            level = np.concatenate(children)
            tree.floors = np.concatenate(floors or [_NO_NUMBERS])
        self._use(level, where)
        tree.leaves = level

    def _use(self, numbers: Numbers, where: str) -> None:
        """Note pages that have a purpose; none has two."""
        if not len(numbers):
            return
        if int(numbers.min()) < _META_COUNT or int(numbers.max()) >= self._page_count:
            damage(where, "a page number beyond the last page")
        if self._used[numbers].any() or len(np.unique(numbers)) < len(numbers):
            damage(where, "a page with two purposes")
        self._used[numbers] = True

    def _verify_runs(self, trees: list[_Tree], runs: Numbers) -> None:
        """Verify the heads of overflow runs, given as first page, bytes and index of the tree."""
        for start in range(0, len(runs), _BLOCK_RUNS):
            first, size, owner = runs[start : start + _BLOCK_RUNS].T
            if int(first.min()) < _META_COUNT or int(first.max()) >= self._page_count:
                damage("overflow run", "its page number")
            offsets = (first * self._page_bytes).tolist()
            for offset in offsets:
                # All at once to the device, if they are not in the kernel's cache.
                os.posix_fadvise(self._descriptor, offset, 1, os.POSIX_FADV_WILLNEED)
            heads = b"".join([self._read(offset, HEADER_BYTES) for offset in offsets])
            words = np.frombuffer(heads, np.uint16).reshape(-1, HEADER_BYTES // 2)
            numbers = words.view("<i8")[:, 0]
            counts = words.view("<u4")[:, 3].astype(np.int64)
            needed = (HEADER_BYTES + size - 1) // self._page_bytes + 1
            sound = (numbers == first) & (words[:, 5] == _OVERFLOW) & (counts >= needed)
            sound &= first + counts <= self._page_count
            sound &= (first + needed) * self._page_bytes <= self._size
            require(sound, first, "head of an overflow run")
            if int(counts.sum()) > self._page_count:
                damage("overflow run", "a page with two purposes")
            ramps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            self._use(np.repeat(first, counts) + ramps, "overflow run")
            sums = np.bincount(owner, weights=counts, minlength=len(trees)).tolist()
            for tree, pages in zip(trees, sums, strict=True):
                tree.overflow_count += int(pages)

    def _pages(self, numbers: Numbers) -> Iterator[tuple[Numbers, Words]]:
        """Read pages, some at a time, as rows of 16-bit words; valid until the next are asked."""
        buffer = np.empty((min(_BLOCK_PAGES, len(numbers)), self._page_bytes), np.uint8)
        for start in range(0, len(numbers), _BLOCK_PAGES):
            block = numbers[start : start + _BLOCK_PAGES]
            content = buffer[: len(block)]
            begins = np.concatenate([[0], np.flatnonzero(np.diff(block) != 1) + 1, [len(block)]])
            firsts = block[begins[:-1]].tolist()
            for first, (begin, end) in zip(firsts, pairwise(begins.tolist()), strict=True):
                part = content[begin:end].reshape(-1).data
                offset = first * self._page_bytes
                if read_up_to_end(os.preadv, self._descriptor, part, offset) < len(part):
                    damage(f"page {first + end - begin - 1}", "beyond the end of the file")
            yield block, content.view(np.uint16)

    def _read(self, offset: int, size: int) -> bytes:
        content = _read(self._descriptor, size, offset)
        if len(content) < size:
            damage(f"page {offset // (self._page_bytes or 1)}", "beyond the end of the file")
        return content


def _floors(words: Words, nodes: Nodes, own: Numbers) -> Numbers:
    """Return the least number below each child: its key, or of the first one its parent's."""
    floors = np.empty(len(nodes.size), np.int64)
    is_first = np.zeros(len(floors), bool)
    is_first[np.cumsum(nodes.counts) - nodes.counts] = True
    floors[is_first] = own
    if (nodes.key_bytes[~is_first] != _FREE_KEY_BYTES).any():
        damage("free list", "a key of a branch")
    floors[~is_first] = u64_at(words.view(np.uint8).reshape(-1), nodes.key_at[~is_first])
    return floors


def _named_tree(content: Bytes, nodes: Nodes, index: int) -> _Tree:
    start = int(nodes.key_at[index])
    value_at = start + int(nodes.key_bytes[index])
    if nodes.size[index] != DB_DTYPE.itemsize:
        damage("database", "length of its row")
    row = np.frombuffer(content[value_at : value_at + DB_DTYPE.itemsize].tobytes(), DB_DTYPE)[0]
    return _Tree(content[start:value_at].tobytes().decode("ascii", "replace"), row)


def _verify_counts(tree: _Tree) -> None:
    row = tree.row
    for name, found in (
        ("branch_pages", tree.branch_count),
        ("leaf_pages", len(tree.leaves)),
        ("overflow_pages", tree.overflow_count),
        ("entries", tree.entry_count),
    ):
        if row[name] != found:
            damage(f"database {tree.name}", f"{name} is {row[name]}, found {found}")
