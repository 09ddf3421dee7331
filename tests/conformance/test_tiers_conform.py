import threading
from contextlib import contextmanager

from remote_tier import RemoteStore, RemoteTier

from tierstore.config import SecondaryConfig
from tierstore.testing.tier_conformance import CAPACITY_BYTES, TierConformance
from tierstore.tier.disk.tier import DiskTier

HOLD_SECONDS_MAX = 300


class DiskConformance(TierConformance):
    backend = "file"

    def make(self, directory, manifest):
        config = SecondaryConfig(
            name="t",
            backend=self.backend,
            path=directory / "tier",
            capacity_bytes=CAPACITY_BYTES,
        )
        return DiskTier(config, manifest, tier_idx=0, rank_count=1, lookup_seconds_max=0.2)

    @contextmanager
    def held(self, tier):
        """Keep the thread that reads in a lookup, and the catalog in another's transaction."""
        may_go_on = threading.Event()
        tier._threads.reads.ask(lambda: may_go_on.wait(HOLD_SECONDS_MAX))
        try:
            with tier._threads.catalog._env.write():
                yield
        finally:
            may_go_on.set()


class TestFiles(DiskConformance):
    pass


class TestLmdb(DiskConformance):
    backend = "lmdb"


class TestRemoteStore(TierConformance):
    keeps_pinned = False
    tells_of_evictions = False

    def make(self, directory, manifest):
        return RemoteTier(RemoteStore(capacity_count=100))

    def held(self, tier):
        return tier.store.held()
