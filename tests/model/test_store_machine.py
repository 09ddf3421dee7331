"""The store against a dict, over every backend, cascade and eviction policy."""

import numpy as np
import pytest
from hypothesis import settings

from tierstore import Manifest, TierStore, make_offload_keys
from tierstore.testing.spread import spread_hashes
from tierstore.testing.store_machine import make_store_machine

MANIFEST = Manifest.simple("machine", chunk_bytes=12_288)
LIMITS = settings(max_examples=12, stateful_step_count=20, deadline=None)


def opener(primary, **tier):
    def open_store(path, manifest):
        secondary = [{"name": "disk", "path": str(path / "disk"), **tier}] if tier else []
        return TierStore.open({"version": 1, "primary": primary, "secondary": secondary}, manifest)

    return open_store


def run(open_store, *, roomy):
    machine = make_store_machine(open_store, MANIFEST, roomy=roomy)
    case = machine.TestCase()
    case.settings = LIMITS
    case.runTest()


@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("cascade", ["write_through", "on_evict"])
def test_a_roomy_store_finds_all_that_it_accepted(eviction, backend, cascade):
    run(
        opener(
            {"capacity": "144KiB", "eviction": eviction},
            backend=backend,
            capacity="64MiB",
            cascade=cascade,
        ),
        roomy=True,
    )


def test_a_store_of_memory_alone_finds_only_what_it_accepted():
    primary = {"capacity": "144KiB", "eviction": "arc"}
    machine = make_store_machine(opener(primary), MANIFEST, roomy=False)
    case = machine.TestCase()
    case.settings = LIMITS
    case.runTest()


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("cascade", ["write_through", "on_evict", "second_touch"])
def test_a_tight_store_never_serves_what_it_did_not_accept(backend, cascade):
    run(
        opener(
            {"capacity": "96KiB", "eviction": "arc"},
            backend=backend,
            capacity="8MiB",
            cascade=cascade,
        ),
        roomy=False,
    )


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ([0, 2, 1, *range(3, 13)], [0, 1, 2, 4]),
        ([0, 2, 3, 1, 4, 19, 5, 6, 7, 8, 9, 10, 12, 13], [0, 1, 2, 19]),
    ],
)
def test_a_get_does_not_lose_what_it_evicts(tmp_path, stored, asked):
    """Found by the machine above: twelve slots, and records that take the place of victims."""
    open_store = opener(
        {"capacity": "144KiB", "eviction": "lru"},
        backend="file",
        capacity="64MiB",
        cascade="on_evict",
    )
    keys = make_offload_keys(MANIFEST.namespace, 0, spread_hashes(range(20)))
    rows = np.repeat(np.arange(20, dtype=np.uint8)[:, None], 12_288, axis=1)
    with open_store(tmp_path, MANIFEST) as store:
        assert store.put([keys[i] for i in stored], rows[stored]) == [True] * len(stored)
        out = np.zeros((len(asked), 12_288), np.uint8)
        assert store.get([keys[i] for i in asked], out) == [True] * len(asked)
        assert np.array_equal(out, rows[asked])
