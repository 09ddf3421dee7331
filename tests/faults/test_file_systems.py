"""The capacity is hard, and well used, whatever pieces a file system gives out and takes back."""

import random

import pytest
from filesystems import mounted, sampled
from store_kit import MIB, Chunks, config_of, du

CAPACITY_BYTES = 64 * MIB

PARTS = ["ext4", "ext4-1k", "ext4-bigalloc", "ext4-no-extents", "ext4-no-extents-1k", "ext2"]
HUGE = ["tmpfs-huge", "tmpfs-within-size"]
MEMORY = ["tmpfs", *HUGE]
OTHERS = ["xfs", "btrfs", "ext4-bigalloc-1m"]


def least_share(kind, backend):
    """Return which part of the capacity records have; each of a few small files takes a unit."""
    if kind == "ext4-bigalloc-1m" or (kind in HUGE and backend == "lmdb"):
        return 0.5
    return 0.7


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("chunk_bytes", [65_536, 1 << 20])
@pytest.mark.parametrize("kind", [*PARTS, *MEMORY, *OTHERS])
def test_no_sample_is_over_the_capacity_and_most_of_it_is_used(
    tmp_path, kind, chunk_bytes, backend
):
    """Goal: bytes on disk in every sample, over a life with evictions, uses and a restart."""
    chunks = Chunks(chunk_bytes)
    chosen = random.Random(7)
    batch = 4 * MIB // chunk_bytes
    with mounted(kind, 512 * MIB, below=tmp_path) as mount:
        path = mount / "tier"
        path.mkdir()
        config = config_of(path, backend=backend)
        with sampled(path) as usage:
            written = 0
            for _ in range(2):
                with chunks.open(config) as store:
                    for _ in range(28):
                        chunks.put(store, range(written, written + batch))
                        written += batch
                        newest = max(0, written - 8 * batch)
                        used = [chosen.randrange(newest, written) for _ in range(batch // 2)]
                        chunks.found(store, used)
                    store.flush()
                    assert store.check() == []
                    stats = store.stats().secondary["disk"]
                    assert stats.charged_bytes <= CAPACITY_BYTES
                    assert stats.payload_bytes >= least_share(kind, backend) * CAPACITY_BYTES
                    newest = range(written - batch, written)
                    assert chunks.found(store, newest) == list(newest)
        assert usage.bytes_max <= CAPACITY_BYTES
        assert du(path) <= CAPACITY_BYTES
