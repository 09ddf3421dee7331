"""The primary tier tells its policy on whose behalf chunks come, are used, and evict others."""

import pytest
from written_plug_in import write_plug_in

from tierstore.config import PrimaryConfig
from tierstore.layout import PAGE_BYTES
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.memory.primary import PrimaryTier

SOURCE = """
from tierstore.policy.lru import LruPolicy

class Recorder(LruPolicy):
    needs_use = True
    heard = []

    def insert(self, keys, slots, use):
        self.heard.append(("insert", list(keys), use))
        super().insert(keys, slots, use)

    def touch(self, keys, use):
        self.heard.append(("touch", list(keys), use))
        super().touch(keys, use)

    def victims(self, count, pinned, incoming=(), use=None):
        self.heard.append(("victims", list(incoming), use))
        return super().victims(count, pinned, incoming, use)

    def evict(self, plan):
        self.heard.append(("evict", list(plan.incoming), plan.use))
        return super().evict(plan)

def make(capacity_chunks):
    Recorder.heard.clear()
    return Recorder()
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"recorder_{tmp_path.name}"
    value = write_plug_in(tmp_path, "tierstore.policies", name, SOURCE, attribute="make")
    config = PrimaryConfig(capacity_bytes=4 * PAGE_BYTES, eviction=name)

    def open_tier(*slot_pages):
        return PrimaryTier(config, [pages * PAGE_BYTES for pages in slot_pages])

    def heard():
        module = __import__(value.partition(":")[0])
        calls = list(module.Recorder.heard)
        module.Recorder.heard.clear()
        return calls

    return open_tier, heard


def test_each_call_hands_its_use_to_the_policy(recorded):
    open_tier, heard = recorded
    tier = open_tier(1)
    assert tier.needs_use
    a, b = UseContext.of("a", priority=-1), UseContext.of("b", parent_id="a", turn=1)
    old, new = keys_of(1, 2, 3, 4), keys_of(5)
    tier.reserve(0, old, use=a)
    assert heard() == [("evict", old, a)]
    tier.commit(old, use=a)
    assert heard() == [("insert", old, a)]
    tier.touch(old[:2], use=b)
    assert heard() == [("touch", old[:2], b)]
    tier.pin(old[:1])
    tier.release(old[:1], use=b)
    assert heard() == [("touch", old[:1], b)]
    tier.reserve(0, new, use=b)
    assert heard() == [("victims", new, b), ("evict", new, b)]
    slots = tier.detach(new)
    tier.reattach(new, slots, use=a)
    assert heard() == [("evict", new, a)]
    tier.victims(1, set())
    assert heard() == [("victims", [], UNKNOWN_USE)]
    assert tier.check() == []


def test_with_slots_of_several_sizes_too(recorded):
    open_tier, heard = recorded
    tier = open_tier(1, 2)
    use = UseContext.of("a")
    small, large = keys_of(1, 2, 3, 4), keys_of(5)
    tier.reserve(0, small, use=use)
    tier.commit(small, use=use)
    heard()
    tier.reserve(1, large, use=use)
    calls = heard()
    assert {call[0] for call in calls[:-1]} == {"victims"}
    assert calls[-1][0] == "evict"
    assert all(call[1:] == (large, use) for call in calls)


def test_a_call_without_a_use_says_that_it_is_unknown(recorded):
    open_tier, heard = recorded
    tier = open_tier(1)
    keys = keys_of(1)
    tier.reserve(0, keys)
    tier.commit(keys)
    tier.touch(keys)
    assert [call[2] for call in heard()] == [UNKNOWN_USE] * 3


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_built_in_policies_need_no_use_and_ignore_it(eviction):
    def order(use):
        tier = PrimaryTier(
            PrimaryConfig(capacity_bytes=8 * PAGE_BYTES, eviction=eviction), [PAGE_BYTES]
        )
        assert not tier.needs_use
        for first in (0, 8, 4, 20):
            keys = keys_of(*range(first, first + 4))
            new = [key for key, slot in zip(keys, tier.locate(keys), strict=True) if slot is None]
            tier.touch([key for key in keys if key not in new], use=use(first))
            tier.reserve(0, new, use=use(first))
            tier.commit(new, use=use(first))
        return tier.coldest(8)

    assert order(lambda n: UseContext.of(str(n), priority=-n)) == order(lambda n: UNKNOWN_USE)
