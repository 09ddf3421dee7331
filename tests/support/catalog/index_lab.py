"""An index in an environment of its own, beside a model of what it should find."""

from collections import Counter
from contextlib import contextmanager, suppress

import numpy as np
from xxhash import xxh3_128_digest

from tierstore.catalog.index.cache import IndexBounds, IndexCache
from tierstore.catalog.index.check import check_index
from tierstore.catalog.index.hashes import hash_keys
from tierstore.catalog.index.index import Index
from tierstore.catalog.index.searching import Quick
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.native.library import Loaded

SMALL = IndexBounds(
    shard_entries_max=16, log_share=4, log_ops_min=24, log_ops_max=96, row_ops_min=3
)


def key_of(number):
    return xxh3_128_digest(number.to_bytes(8, "little")) * 2


def colliding_hashes(keys):
    """As `hash_keys`, but in a few ranges, and with few hashes: many keys have the same one."""
    hashes = hash_keys(keys)
    return hashes & np.uint64(0xE0070000_0000000F)


class CountedCalls:
    """A transaction that counts its calls."""

    def __init__(self, txn):
        self._txn = txn
        self.calls = Counter()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls[name] += 1
            return getattr(self._txn, name)(*args, **kwargs)

        return call


WITHOUT_LIBRARY = Quick(lambda: Loaded(None, "not wanted"))


class IndexLab:
    def __init__(self, path, *, bounds=SMALL, hashing=hash_keys, cache_count=1):
        self.env = LmdbEnv.open(path, map_bytes=1 << 30)
        self.shards = self.env.database(b"shards")
        self.log = self.env.database(b"log")
        self.bounds = bounds
        self.hashing = hashing
        # Every second one searches without the native library.
        self.caches = [
            self.new_cache(quick=WITHOUT_LIBRARY if number % 2 else None)
            for number in range(cache_count)
        ]
        self.living = {}
        """The committed entries: key -> clusters, the youngest last."""

    def new_cache(self, **options):
        return IndexCache(bounds=self.bounds, hashing=self.hashing, **options)

    @contextmanager
    def write(self, which=0):
        with self.env.write() as txn:
            yield Index(txn, self, self.caches[which])

    @contextmanager
    def read(self, which=0):
        with self.env.read() as txn:
            yield Index(txn, self, self.caches[which])

    def index_of(self, txn, cache):
        return Index(txn, self, cache)

    def change(self, ops, which=0, *, aborts=False):
        """Make one transaction of ops (cluster, keys, is added)."""
        living = {key: list(clusters) for key, clusters in self.living.items()}
        with suppress(ZeroDivisionError), self.write(which) as index:
            for cluster, keys, is_added in ops:
                self.apply(living, index, cluster, keys, is_added)
            index.flush()
            _ = 1 // (not aborts)
        if not aborts:
            self.living = living

    def apply(self, living, index, cluster, keys, is_added):
        (index.add if is_added else index.remove)(cluster, keys)
        for key in keys:
            clusters = living.setdefault(key, [])
            if is_added:
                clusters.append(cluster)
            elif cluster in clusters:
                del clusters[len(clusters) - 1 - clusters[::-1].index(cluster)]

    def assert_finds(self, index, living, keys, *, exact=True):
        """Each key's living clusters are found; no others but for keys with the same hash."""
        keys = list(keys)
        by_hash = {}
        for key, clusters in living.items():
            by_hash.setdefault(int(self.hashing([key])[0]), set()).update(clusters)
        for key, number, found in zip(keys, self.hashing(keys), index.find(keys), strict=True):
            assert set(living.get(key, ())) <= set(found)
            assert len(set(found)) == len(found)
            if exact:
                assert set(found) == by_hash.get(int(number), set())

    def check(self):
        pairs = [(key, cluster) for key, clusters in self.living.items() for cluster in clusters]
        hashes = self.hashing([key for key, _ in pairs])
        clusters = np.array([cluster for _, cluster in pairs], np.uint64)
        with self.env.read() as txn:
            return check_index(txn, self, hashes, clusters)

    def row_counts(self):
        with self.env.read() as txn:
            return [txn.stat(db=database)["entries"] for database in (self.shards, self.log)]

    def close(self):
        self.env.close()
