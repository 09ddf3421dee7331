"""What one process keeps of the index in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from tierstore.catalog.index.hashes import Numbers, hash_keys
from tierstore.catalog.index.head import HEAD_KEY, Head
from tierstore.catalog.index.log_row import LogRow, log_key, unpack_log_row
from tierstore.catalog.index.searching import Quick
from tierstore.catalog.index.shard import Shard, shard_key, unpack_shard
from tierstore.catalog.index.tail import Tail
from tierstore.errors import CatalogDamagedError
from tierstore.lmdb_env.library import Database, Transaction

__all__ = ["BYTES_MAX", "IndexBounds", "IndexCache", "IndexDatabases", "Written"]

BYTES_MAX = 1 << 28
"""Of shards in memory, 16 bytes per record: all of a catalog of some sixteen million.

Keys spread over all shards: with fewer in memory, each request would read the others again.
"""


@dataclass(frozen=True, slots=True)
class IndexBounds:
    """How large the parts of the index become. Processes on one path may differ.

    An entry is written again with its shard each time, so that a record costs as many times 16
    bytes as a shard has entries for each op that is merged at once: `log_share`, about.
    """

    shard_entries_max: int = 1 << 14
    """A larger shard is split."""
    log_share: int = 8
    """The log has at most one op for so many entries."""
    log_ops_min: int = 1 << 14
    """The log may have so many ops, whatever its share."""
    log_ops_max: int = 1 << 19
    """It never has more of them, but for what one transaction adds: 24 bytes each in memory."""
    row_ops_min: int = 32
    """A row of the log counts as so many ops: the rows are read one by one."""


class IndexDatabases(Protocol):
    """Where the index is stored."""

    @property
    def shards(self) -> Database:
        """The head and the shards."""

    @property
    def log(self) -> Database:
        """What transactions added and removed, by number."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a transaction wrote: of use to others if it was committed, as its checksums tell."""

    log_row: LogRow | None = None
    shards: dict[int, Shard] = field(default_factory=dict)
    """By start."""


class IndexCache:
    """Parts of the index that transactions read before; any thread.

    A shard and a log row are known by their checksums, so that it does not matter which
    transaction read or wrote them, how old its snapshot is, and whether it was committed.
    """

    def __init__(
        self,
        bytes_max: int = BYTES_MAX,
        *,
        bounds: IndexBounds | None = None,
        hashing: Callable[[Sequence[bytes]], Numbers] = hash_keys,
        quick: Quick | None = None,
    ) -> None:
        """`hashing` has to be the same in all processes, always. `quick` (None: by the library)."""
        self.quick = quick or Quick()
        self.bounds = bounds or IndexBounds()
        self.hashing = hashing
        self._bytes_max = bytes_max
        self._head: tuple[bytes, Head] | None = None
        self._tail = Tail(0, 0, 0)
        self._written = Written()
        self._shards: dict[int, Shard] = {}
        """By start."""
        self._size_bytes = 0
        self._use_count = 0
        self._lock = Lock()
        """Of the dict and its size; never held while the library is called."""

    @property
    def size_bytes(self) -> int:
        """What the shards in memory take."""
        return self._size_bytes

    def head(self, txn: Transaction, databases: IndexDatabases) -> Head:
        """Return the head, not to be changed; one call of the library.

        Raises:
            CatalogDamagedError: it is damaged, or missing although there is an index.
        """
        value = txn.get(HEAD_KEY, db=databases.shards)
        known = self._head
        if known is not None and known[0] == value:
            return known[1]
        if value is None:
            for database in (databases.shards, databases.log):
                if txn.stat(db=database)["entries"]:
                    raise CatalogDamagedError("the head of the index is missing")
            return Head()
        head = Head.unpack(value)
        self._head = (value, head)
        self._keep_written(head)
        return head

    def tail(self, txn: Transaction, databases: IndexDatabases, head: Head) -> Tail:
        """Return the log, as `head` says; one call of the library for each row that is new.

        Raises:
            CatalogDamagedError: a row is missing or damaged.
        """
        known, written = self._tail, self._written
        if known.covers(head):
            return known

        def read(number: int) -> LogRow:
            row = written.log_row
            if row is not None and number == head.last_number and row.version == head.log_version:
                return row
            return unpack_log_row(txn.get(log_key(number), db=databases.log), number)

        tail = known.up_to(head, read)
        # Not of an old snapshot: the next one would have to read what this one knew.
        if tail.identity != known.identity or tail.last_number > known.last_number:
            self._tail = tail
        return tail

    def shards(
        self,
        txn: Transaction,
        databases: IndexDatabases,
        head: Head,
        indices: Sequence[int],
    ) -> list[Shard | None]:
        """Return shards, None for an empty one; a call of the library for each one not in memory.

        Raises:
            CatalogDamagedError: a row is missing or damaged.
        """
        self._use_count += 1
        starts, versions, known = head.starts, head.versions, self._shards
        result: list[Shard | None] = []
        for index in indices:
            version = versions[index]
            shard = known.get(starts[index])
            if shard is not None and shard.version == version:
                shard.used_at = self._use_count
                result.append(shard)
            else:
                result.append(self._fetched(txn, databases, head, index) if version else None)
        return result

    def note_written(self, written: Written) -> None:
        """Keep what a transaction is going to commit."""
        self._written = written

    def _fetched(
        self, txn: Transaction, databases: IndexDatabases, head: Head, index: int
    ) -> Shard:
        start, version = head.starts[index], head.versions[index]
        shard = self._written.shards.get(start)
        if shard is None or shard.version != version:
            shard = unpack_shard(txn.get(shard_key(start), db=databases.shards), head, index)
        self._keep(start, shard)
        return shard

    def _keep_written(self, head: Head) -> None:
        """Keep shards that a transaction wrote, now that it is committed."""
        written = self._written.shards
        if written:
            versions = dict(zip(head.starts, head.versions, strict=True))
            for start, shard in written.items():
                if versions.get(start) == shard.version:
                    self._keep(start, shard)

    def _keep(self, start: int, shard: Shard) -> None:
        with self._lock:
            former = self._shards.get(start)
            self._size_bytes += shard.size_bytes - (former.size_bytes if former else 0)
            shard.used_at = self._use_count
            self._shards[start] = shard
            if self._size_bytes > self._bytes_max:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Make room for more than one, since all are sorted for it."""
        by_use = sorted(self._shards.items(), key=lambda item: item[1].used_at)
        for start, shard in by_use:
            if self._size_bytes <= self._bytes_max * 7 // 8:
                break
            del self._shards[start]
            self._size_bytes -= shard.size_bytes
