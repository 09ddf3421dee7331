"""Policies of other packages: made with their options, asked who leaves, believed nothing else."""

import pytest
from store_kit import Chunks, config_of
from written_plug_in import installer

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

FOUL = """
from tierstore.policy.lru import LruPolicy
from tierstore.policy.plan import EvictionPlan

calls = [0]

class Foul(LruPolicy):
    needs_use = True
    def {name}(self, *args):
        answer = super().{name}(*args)
        calls[0] += 1
        if calls[0] > 3:
            {foul}
        return answer

def make(capacity_chunks):
    return Foul()
"""

FOULS = [
    ("evict", "return [0] * len(answer)"),
    ("evict", "return answer[1:]"),
    ("evict", "return [1 << 40 for _ in answer]"),
    ("evict", "return None"),
    ("victims", "return None"),
    ("victims", "return EvictionPlan([])"),
    ("victims", "return EvictionPlan([None, 5, 'x', [1]])"),
    ("victims", "return EvictionPlan(answer.keys[1:] + answer.keys[:1], ())"),
    ("victims", "args[1].clear()"),
    ("victims", "args[2].clear()"),
    ("insert", "args[0].reverse()"),
    ("insert", "args[1].reverse()"),
    ("insert", "self.remove(args[0])"),
    ("touch", "args[0].clear()"),
    ("touch", "self.touch(*args)"),
    ("remove", "return [0] * len(answer)"),
    ("clear", "raise RuntimeError('not now')"),
    *((name, "raise RuntimeError('not now')") for name in ("evict", "victims", "insert", "touch")),
    *(("locate", f"return {lie}") for lie in ("[0] * len(answer)", "[None] * len(answer)", "[]")),
    *((f"holds_{which}", f"return {lie}") for which in ("any", "all") for lie in (True, False)),
    ("__len__", "return -1"),
]


@pytest.fixture
def install(tmp_path, monkeypatch):
    return installer(tmp_path / "installed", monkeypatch, "tierstore.policies")


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


@pytest.mark.parametrize(("name", "foul"), FOULS)
def test_a_policy_that_fails_or_lies_costs_neither_a_byte_nor_the_store(
    install, tmp_path, name, foul
):
    """Every `get` compares all bytes, of chunks from memory and from disk, before and after."""
    policy = install(FOUL.format(name=name, foul=foul))
    chunks = Chunks()
    config = config_of(tmp_path / "tier", primary="1MiB")
    config["primary"]["eviction"] = policy
    numbers = range(64)
    with chunks.open(config) as store:
        for _ in range(2):
            for first in range(0, 64, 8):
                assert chunks.put_each(store, range(first, first + 8)) == [True] * 8
                assert len(chunks.found(store, range(max(0, first - 20), first + 8))) >= 8
            store.flush()
            assert chunks.found(store, numbers) == list(numbers)
            assert store.check() == []
        store.reset()
        assert chunks.found(store, numbers) == []
        assert chunks.put(store, numbers) == 64
        assert store.check() == []
    with chunks.open(config) as store:
        assert chunks.found(store, numbers) == list(numbers)


def test_a_policy_that_failed_is_told_of_once_and_not_asked_again(install, caplog):
    name = install(FOUL.format(name="touch", foul="raise RuntimeError('not now')"))
    policy = make_policy(name, 8)
    keys = keys_of(*range(8))
    policy.insert(keys, range(8))
    for _ in range(9):
        policy.touch(keys[:2])
    assert policy.victims(3, ()).keys == keys[2:5]
    (record,) = caplog.records
    assert f"policy={name} cause=RuntimeError: not now" in record.getMessage()


def test_one_whose_properties_raise_is_refused(install):
    source = "needs_use = property(lambda self: 1 / 0)"
    name = install(f"class make:\n    def __init__(self, capacity_chunks): ...\n    {source}")
    with pytest.raises(ConfigError, match=r"cannot be looked at: ZeroDivisionError"):
        make_policy(name, 1)
