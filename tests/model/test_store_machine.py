"""The store against a dict, over every backend, cascade and eviction policy."""

import pytest
from hypothesis import settings

from tierstore import Manifest, TierStore
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
