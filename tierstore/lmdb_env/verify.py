"""Verification of an LMDB data file at rest, before the library maps it.

LMDB trusts its pages: a flipped bit in one may end the process or destroy other records. What is
verified here is all that the library relies on when it follows, changes and frees pages; not what
keys and values say, nor that keys are in order: those cost a miss, or a catalog finds them itself
(`catalog.check`). See `page` for the format.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierstore.lmdb_env.image import META_COUNT, Image
from tierstore.lmdb_env.pace import UNHURRIED, VerifyPace
from tierstore.lmdb_env.page import (
    BIG,
    BRANCH,
    DB_DTYPE,
    HEADER_BYTES,
    LEAF,
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

__all__ = ["find_damage"]

_DEPTH_MAX = 32
_EMPTY = (1 << 64) - 1

_OVERFLOW = 4
_INTEGER_KEYS = 8

_BLOCK_RUNS = 4096
"""Heads of overflow runs that are asked of the device at once."""

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


def find_damage(descriptor: int, *, page_count_max: int, pace: VerifyPace = UNHURRIED) -> str:
    """Verify a data file that no process has open; return what is wrong with it, empty: nothing.

    An empty file is a new one. More pages than `page_count_max` and than the file has are taken for
    damage. Reads every page of every tree, and the head of every overflow run: in the kernel's
    cache about 110 ms for a catalog of 10^6 records (200 MiB), and 1.6 us per run. In steps of
    `pace`.

    Raises:
        ClosedError: see `VerifyPace.step`.
        OSError: it cannot be read.
    """
    if os.fstat(descriptor).st_size == 0:
        return ""
    try:
        _Verification(Image(descriptor, page_count_max, pace)).run()
    except ImageDamagedError as error:
        return str(error)
    return ""


class _Verification:
    def __init__(self, image: Image) -> None:
        self._image = image
        self._used = np.zeros(image.page_count, bool)

    def run(self) -> None:
        meta = self._image.meta
        free, main = _Tree("free", meta["free"]), _Tree("main", meta["main"])
        if free.row["flags"] != _INTEGER_KEYS:
            damage("database free", "flags")
        free_pages = self._verify_free(free)
        named = self._verify_trees([main])
        if self._verify_trees(named):
            damage("database", "named databases in a named database")
        # Last, so that a page that is free and used is found here.
        self._use(free_pages, "free list")
        # A page that is neither would stay charged, and so would each that a damaged number adds.
        # The library's own audit requires that they add up, too.
        if not self._used[META_COUNT:].all():
            first = META_COUNT + int(np.argmin(self._used[META_COUNT:]))
            damage(f"page {first}", "without a purpose")

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
        for block, words in self._image.pages(numbers):
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
        for block, words in self._image.pages(tree.leaves):
            nodes = nodes_of(block, words, LEAF)
            content = words.view(np.uint8).reshape(-1)
            floors = tree.floors[done : done + len(block) + 1]
            done += len(block)
            tree.entry_count += len(nodes.flags)
            if (nodes.key_bytes != _FREE_KEY_BYTES).any() or (nodes.flags > BIG).any():
                damage("free list", "a node")
            transactions = u64_at(content, nodes.key_at)
            # The library searches by the branches: it would miss a list, or add it a second time.
            ends = np.cumsum(nodes.counts)
            is_misled = bool((transactions[ends - nodes.counts] < floors[: len(block)]).any())
            before = ends[: len(floors) - 1] - 1
            if is_misled or (transactions[before] >= floors[1:]).any():
                damage("free list", "its branches")
            for i, transaction in enumerate(transactions.tolist()):
                if not youngest < transaction <= self._image.transaction:
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
            raw = self._image.read(first * self._image.page_bytes + HEADER_BYTES, size)
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
        level = np.array([min(int(tree.row["root"]), self._image.page_count)], np.int64)
        tree.floors = np.zeros(1, np.int64)
        for _ in range(depth - 1):
            self._use(level, where)
            children, floors = [], []
            done = 0
            for block, words in self._image.pages(level):
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
        if int(numbers.min()) < META_COUNT or int(numbers.max()) >= self._image.page_count:
            damage(where, "a page number beyond the last page")
        if self._used[numbers].any() or len(np.unique(numbers)) < len(numbers):
            damage(where, "a page with two purposes")
        self._used[numbers] = True

    def _verify_runs(self, trees: list[_Tree], runs: Numbers) -> None:
        """Verify the heads of overflow runs, given as first page, bytes and index of the tree."""
        for start in range(0, len(runs), _BLOCK_RUNS):
            first, size, owner = runs[start : start + _BLOCK_RUNS].T
            if int(first.min()) < META_COUNT or int(first.max()) >= self._image.page_count:
                damage("overflow run", "its page number")
            offsets = (first * self._image.page_bytes).tolist()
            for offset in offsets:
                # All at once to the device, if they are not in the kernel's cache.
                os.posix_fadvise(self._image.descriptor, offset, 1, os.POSIX_FADV_WILLNEED)
            heads = b"".join([self._image.read(offset, HEADER_BYTES) for offset in offsets])
            words = np.frombuffer(heads, np.uint16).reshape(-1, HEADER_BYTES // 2)
            numbers = words.view("<i8")[:, 0]
            counts = words.view("<u4")[:, 3].astype(np.int64)
            needed = (HEADER_BYTES + size - 1) // self._image.page_bytes + 1
            sound = (numbers == first) & (words[:, 5] == _OVERFLOW) & (counts >= needed)
            sound &= first + counts <= self._image.page_count
            sound &= (first + needed) * self._image.page_bytes <= self._image.size_bytes
            require(sound, first, "head of an overflow run")
            if int(counts.sum()) > self._image.page_count:
                damage("overflow run", "a page with two purposes")
            ramps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            self._use(np.repeat(first, counts) + ramps, "overflow run")
            sums = np.bincount(owner, weights=counts, minlength=len(trees)).tolist()
            for tree, pages in zip(trees, sums, strict=True):
                tree.overflow_count += int(pages)
            self._image.pace.step()


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
