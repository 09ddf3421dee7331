"""On whose behalf chunks are stored and used: what reaches admissions and the policy of memory."""

from contextlib import contextmanager

import pytest
from fake_clock import FakeClock
from opened_stack import ABSENT, RECORDED, RESIDENT, keys, opened

from tierstore.policy.lru import LruPolicy
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.admission import ADMISSIONS
from tierstore.tier.admission.second_touch import SecondTouch
from tierstore.tier.admission.write_through import WriteThrough
from tierstore.tier.memory import primary
from tierstore.transfer import FailureReason, TransferDone

ONE, TWO = UseContext.of("request-1"), UseContext.of("request-2", parent_id="request-1", turn=1)


class TellTale(WriteThrough):
    """Writes everything through, and keeps what it was told."""

    def __init__(self, heard):
        self.heard = heard

    def on_resident(self, keys, use=UNKNOWN_USE):
        self.heard.append(("resident", list(keys), use))
        return keys

    def on_touched(self, keys, use=UNKNOWN_USE):
        self.heard.append(("touched", list(keys), use))
        return ()

    def on_promoted(self, keys, use=UNKNOWN_USE):
        self.heard.append(("promoted", list(keys), use))


class TellTalePolicy(LruPolicy):
    def __init__(self, heard):
        super().__init__()
        self.heard = heard

    def insert(self, keys, slots, use=UNKNOWN_USE):
        super().insert(keys, slots, use)
        self.heard.append(("insert", list(keys), use))

    def touch(self, keys, use=UNKNOWN_USE):
        super().touch(keys, use)
        self.heard.append(("touch", list(keys), use))

    def victims(self, *given):
        self.heard += [("victims", [], use) for use in given if isinstance(use, UseContext)]
        return super().victims(*given)


@pytest.fixture
def heard(monkeypatch):
    heard = []
    monkeypatch.setitem(ADMISSIONS, "write_through", lambda: TellTale(heard))
    return heard


def take(heard):
    taken = heard[:]
    heard.clear()
    return taken


@contextmanager
def recorded(path, heard, *disks, **options):
    """Open tiers that have chunks 1 and 2 on disk only, and have told all of it."""
    with opened(path, *disks, **options) as tiers:
        tiers.store(1, 2)
        tiers.store(11, 12, 13, 14)
        assert tiers.locate(1, 2) == [RECORDED, RECORDED]
        take(heard)
        yield tiers


def test_an_admission_is_told_who_stores_and_who_uses(tmp_path, heard):
    with opened(tmp_path, {}) as tiers:
        offload = tiers.stack.reserve_offload(0, keys(1, 2), use=ONE)
        assert offload.use is ONE
        assert take(heard) == []
        tiers.stack.finish_offload(offload)
        assert take(heard) == [("resident", keys(1, 2), ONE)]
        tiers.stack.touch(keys(1, 2), use=TWO)
        assert take(heard) == [("touched", keys(1, 2), TWO)]
        tiers.stack.reserve_offload(0, keys(1), use=TWO)
        assert take(heard) == [("touched", keys(1), TWO)], "stored again"


def test_an_admission_is_told_who_loads_from_memory_when_the_load_ends(tmp_path, heard):
    with opened(tmp_path, {}) as tiers:
        tiers.store(1, 2)
        take(heard)
        load = tiers.stack.reserve_load([(0, keys(1, 2))], use=TWO)
        assert load.use is TWO
        assert take(heard) == []
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        assert take(heard) == [("touched", keys(1, 2), TWO)]


def test_admissions_are_told_for_whom_a_chunk_came_from_disk(tmp_path, heard):
    with recorded(tmp_path, heard, {}, {}) as tiers:
        load = tiers.stack.reserve_load([(0, keys(1, 2))], use=TWO)
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        assert take(heard) == [("promoted", keys(1, 2), TWO), ("resident", keys(1, 2), TWO)]


def test_a_chunk_that_comes_late_comes_for_the_request_that_asked(tmp_path, heard):
    with recorded(tmp_path, heard, {}, clock=FakeClock()) as tiers:
        load = tiers.stack.reserve_load([(0, keys(1, 2))], use=TWO)
        late = {1: FailureReason.DEADLINE}
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id, ok=False, failed=late))
        assert take(heard) == [("promoted", keys(1), TWO)]
        assert tiers.locate(1, 2) == [RESIDENT, ABSENT]
        assert tiers.stack.complete(TransferDone(job_id=load.job_id))
        assert take(heard) == [("promoted", keys(2), TWO)]


def test_a_load_that_is_tried_again_is_of_the_same_use(tmp_path, heard):
    with opened(tmp_path, {}, {}) as tiers:
        for number in (1, 11, 12, 13, 14):  # the write queue of each holds one chunk
            tiers.store(number)
        assert tiers.locate(1) == [RECORDED]
        load = tiers.stack.reserve_load([(0, keys(1))], use=TWO)
        done = TransferDone(job_id=load.job_id, ok=False, failed={0: FailureReason.IO_ERROR})
        tiers.stack.finish_load(load, done)
        again = tiers.stack.retry_load(load, done)
        assert again.use is TWO
        take(heard)
        tiers.stack.finish_load(again, TransferDone(job_id=again.job_id))
        assert ("promoted", keys(1), TWO) in take(heard)


def test_who_says_nothing_of_the_use_tells_that_it_is_unknown(tmp_path, heard):
    with opened(tmp_path, {}) as tiers:
        tiers.store(1)
        tiers.stack.touch(keys(1))
        assert {use for _, _, use in take(heard)} == {UNKNOWN_USE}


def test_the_policy_of_memory_is_told_who_stores_and_who_uses(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(primary, "make_policy", lambda *_: TellTalePolicy(heard))
    with opened(tmp_path, {}) as tiers:
        tiers.store(11, 12, 13, 14)
        take(heard)
        offload = tiers.stack.reserve_offload(0, keys(1, 2), use=ONE)
        assert take(heard) == [("victims", [], ONE)]
        tiers.stack.finish_offload(offload)
        assert take(heard) == [("insert", keys(2, 1), ONE)]
        tiers.stack.touch(keys(1, 2), use=TWO)
        assert take(heard) == [("touch", keys(2, 1), TWO)]
        load = tiers.stack.reserve_load([(0, keys(1))], use=ONE)
        tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
        assert take(heard) == [("touch", keys(1), ONE)]


@pytest.mark.parametrize("asks", ["nobody", "admission", "policy"])
def test_uses_are_needed_if_a_policy_or_an_admission_goes_by_them(tmp_path, monkeypatch, asks):
    class Asking(SecondTouch):
        needs_use = asks == "admission"

    class AskingPolicy(LruPolicy):
        needs_use = asks == "policy"

    monkeypatch.setitem(ADMISSIONS, "second_touch", Asking)
    monkeypatch.setattr(primary, "make_policy", lambda *_: AskingPolicy())
    with opened(tmp_path, {}, {"cascade": "second_touch"}) as tiers:
        assert tiers.stack.needs_use == (asks != "nobody")
