"""Policies of other packages: made with their options, and never believed about pins."""

import pytest
from written_plug_in import write_plug_in

from tierstore.config import PrimaryConfig
from tierstore.errors import ConfigError
from tierstore.layout import PAGE_BYTES
from tierstore.policy import make_policy
from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.memory.primary import PrimaryTier

GREEDY = """
from tierstore.policy.lru import LruPolicy
from tierstore.policy.plan import EvictionPlan

class Greedy(LruPolicy):
    def victims(self, count, pinned, incoming=(), use=None):
        cold = super().victims(count + 2, (), (), use).keys
        return EvictionPlan([*cold[:1], *cold, b"stranger"], incoming, use)

def make(capacity_chunks):
    return Greedy()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"policy_{tmp_path.name}"

    def write(source):
        write_plug_in(tmp_path, "tierstore.policies", name, source, attribute="make")
        return name

    return write


def test_a_plug_in_is_given_the_capacity_and_its_options(install):
    name = install(
        "from tierstore.policy.lru import LruPolicy\n"
        "given = []\n"
        "def make(capacity_chunks, *, share):\n"
        "    if (capacity_chunks, share) != (7, 0.5): raise ValueError(capacity_chunks, share)\n"
        "    return LruPolicy()\n"
    )
    assert len(make_policy(name, 7, {"share": 0.5})) == 0
    for options in ({}, {"share": 1}, {"share": 0.5, "other": 1}, {"capacity_chunks": 3}):
        with pytest.raises(ConfigError, match=r"^primary\.eviction: .*eviction_options") as caught:
            make_policy(name, 7, options)
        assert caught.value.__cause__ is not None


def test_what_is_no_policy_is_refused_with_what_it_lacks(install):
    name = install("class make:\n    def __init__(self, capacity_chunks): ...")
    with pytest.raises(ConfigError, match=r"has no __len__, clear, evict, .*needs_use.*victims"):
        make_policy(name, 1)


def test_an_unknown_policy_is_refused_by_the_one_who_makes_it():
    with pytest.raises(ConfigError, match=r"^primary\.eviction: expected 'lru' or 'arc', got 'fi"):
        make_policy("fifo", 1)


def test_pinned_repeated_and_strange_victims_are_passed_over(install, caplog):
    config = PrimaryConfig(capacity_bytes=4 * PAGE_BYTES, eviction=install(GREEDY))
    tier = PrimaryTier(config, [PAGE_BYTES])
    old = keys_of(1, 2, 3, 4)
    tier.reserve(0, old)
    tier.commit(old)
    tier.pin(old[:2])
    slots = tier.locate(old[:2])
    reservation = tier.reserve(0, keys_of(5))
    assert reservation is not None
    assert reservation.evicted == [old[2]]
    assert tier.locate(old[:2]) == slots
    assert tier.reserve(0, keys_of(6)) is not None
    assert tier.reserve(0, keys_of(7)) is None
    tier.unpin(old[:2])
    assert tier.coldest(9) == old[:2]
    assert tier.check() == []
    assert len([r for r in caplog.records if "a policy names victims" in r.getMessage()]) == 1
