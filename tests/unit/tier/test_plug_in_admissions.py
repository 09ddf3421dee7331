"""Admissions of other packages: made with their options, and believed of the chunks in memory only.

Goal: whatever one answers or raises, chunks have their own bytes, and nothing stays pinned.
"""

import pytest
from opened_stack import MANIFEST, RECORDED, keys, opened
from store_kit import Chunks, config_of
from written_plug_in import installer

from tierstore import TierStore, load_config
from tierstore.errors import ConfigError
from tierstore.layout import PAGE_BYTES
from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.admission import make_admission
from tierstore.tier.admission.write_through import WriteThrough
from tierstore.tier.opening import check_tiers
from tierstore.transfer import TransferDone

CALLS = (
    "on_resident",
    "on_touched",
    "on_victims",
    "on_admitted",
    "on_promoted",
    "on_evicted",
    "on_withdrawn",
    "on_records_lost",
    "reset",
    "admitted",
)

GREEDY = """
from tierstore.tier.admission.on_evict import OnEvict

class Greedy(OnEvict):
    def __init__(self):
        super().__init__()
        self.seen = []

    def _all(self, keys):
        self.seen += keys
        return [*reversed(self.seen), b"stranger", *keys, 7, []]

    def on_resident(self, keys, use): return self._all(keys)
    def on_touched(self, keys, use): return self._all(keys)
    def on_victims(self, keys): return self._all(keys)
    def on_evicted(self, keys): return 1_000_000
    def admitted(self, keys): return self._all(keys)

make = Greedy
"""

NONE_ANSWERED = """
from tierstore.tier.admission.on_evict import OnEvict

class Silent(OnEvict):
    def on_resident(self, keys, use): ...
    def on_touched(self, keys, use): ...
    def on_victims(self, keys): ...
    def on_evicted(self, keys): return "many"

make = Silent
"""

RAISING = """
from tierstore.tier.admission.{module} import {name}

class Raising({name}):
    def {call}(self, *told):
        raise ZeroDivisionError("{call}")

make = Raising
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    return installer(tmp_path / "installed", monkeypatch, "tierstore.admissions")


def test_a_plug_in_is_given_its_options(install):
    name = install(
        "from tierstore.tier.admission.on_evict import OnEvict\n"
        "def make(*, share):\n"
        "    if share != 0.5: raise ValueError(share)\n"
        "    return OnEvict()\n"
    )
    assert make_admission(name, {"share": 0.5}).admits_victims
    wrong = rf"^secondary\[\]\.cascade: '{name}': .*cascade_options"
    for options in ({}, {"share": 1}, {"share": 0.5, "other": 1}):
        with pytest.raises(ConfigError, match=wrong) as caught:
            make_admission(name, options)
        assert caught.value.__cause__ is not None


def test_an_error_that_the_plug_in_words_itself_is_left_as_it_is(install):
    name = install(
        "from tierstore.errors import ConfigError\n"
        "def make(): raise ConfigError('share: too small')\n"
    )
    with pytest.raises(ConfigError, match=r"^share: too small$"):
        make_admission(name)


def test_what_is_no_admission_is_refused_with_what_it_lacks(install):
    name = install("class make:\n    needs_use = False\n    def reset(self, queued): ...")
    with pytest.raises(ConfigError) as caught:
        make_admission(name)
    text = str(caught.value)
    assert text.startswith(f"secondary[].cascade: '{name}': the plug-in made ")
    lacking = text.partition("which has no ")[2].partition(";")[0].split(", ")
    assert set(lacking) == {*CALLS, "admits_arrivals", "admits_victims"} - {"reset"}


def test_a_store_that_it_is_refused_to_leaves_nothing_open(install, tmp_path):
    name = install("def make(): return 3")
    disk = {"name": "d", "backend": "file", "path": str(tmp_path / "d"), "capacity": "16MiB"}
    config = {"primary": {"capacity": "1MiB"}, "secondary": [disk]}
    broken = {**config, "secondary": [disk | {"cascade": name}]}
    for opening in (
        lambda: TierStore.open(broken, MANIFEST),
        lambda: check_tiers(load_config(broken), MANIFEST, rank_count=1),
    ):
        with pytest.raises(ConfigError, match=r"^secondary\[\]\.cascade: "):
            opening()
    with TierStore.open(config, MANIFEST) as store:
        assert store.check() == []


def test_each_tier_has_an_admission_of_its_own_and_built_in_ones_are_as_they_are(install):
    name = install("from tierstore.tier.admission.write_through import WriteThrough as make")
    first, second = make_admission(name), make_admission(name)
    first.on_admitted(keys_of(1))
    assert first.admitted(keys_of(1)) == keys_of(1)
    assert second.admitted(keys_of(1)) == []
    assert type(make_admission("write_through")) is WriteThrough


def use_all_of(tiers):
    """Let chunks come, be used, go down, leave, be promoted, lose their records, be forgotten."""
    for numbers in ((1, 2), (3, 4), (1, 2, 3), (5, 6), (7, 8)):
        tiers.keep(*numbers)
        tiers.stack.touch(keys(*numbers))
        tiers.stack.touch(keys(*numbers))
        tiers.settle_writes()
    tiers.loop.flush()
    load = tiers.stack.reserve_load([(0, keys(1, 2, 7, 8))], partial=True)
    tiers.stack.finish_load(load, TransferDone(job_id=load.job_id))
    tiers.stack.cascades[0].on_catalog_lost()
    held = tiers.stack.reserve_load([(0, keys(7, 8))], partial=True)
    tiers.reset()
    tiers.stack.finish_load(held, TransferDone(job_id=held.job_id))


def wrong_answers_in(caplog):
    return [r for r in caplog.records if "an admission asks for" in r.getMessage()]


@pytest.mark.parametrize("source", [GREEDY, NONE_ANSWERED], ids=["greedy", "none"])
def test_a_wrong_answer_is_passed_over_and_logged_once(install, tmp_path, caplog, source):
    with opened(tmp_path, {"cascade": install(source)}) as tiers:
        use_all_of(tiers)
        tiers.assert_all_slots_can_be_had()
    assert len(wrong_answers_in(caplog)) == 1


def test_only_chunks_that_it_is_told_of_go_down_and_each_once(install):
    admission = make_admission(install(GREEDY))
    assert admission.on_resident(keys_of(1, 2)) == keys_of(1, 2)
    admission.on_admitted(keys_of(1))
    assert admission.on_touched(keys_of(1, 2, 3)) == keys_of(2, 3)
    admission.on_promoted(keys_of(3))
    assert admission.on_victims(keys_of(3, 2)) == keys_of(2)
    assert admission.admitted(keys_of(1, 2, 3)) == keys_of(1, 3)
    assert admission.on_evicted(keys_of(1, 2)) == 1
    assert admission.on_resident(keys_of(1)) == keys_of(1)


def test_a_chunk_that_is_being_written_is_not_written_again(install, tmp_path):
    with opened(tmp_path, {"cascade": install(GREEDY)}) as tiers:
        tiers.keep(1)
        before = tiers.stack.cascades[0].demotes.queue.queued_bytes
        tiers.stack.touch(keys(1))
        assert tiers.stack.cascades[0].demotes.queue.queued_bytes == before == PAGE_BYTES
        assert tiers.recorded(0, 1, 2) == [1]


@pytest.mark.parametrize("call", CALLS)
def test_one_that_raises_does_not_tear_the_tiers(install, tmp_path, caplog, call):
    rule = ("on_evict", "OnEvict") if call == "on_victims" else ("write_through", "WriteThrough")
    source = RAISING.format(module=rule[0], name=rule[1], call=call)
    with opened(tmp_path, {"cascade": install(source)}) as tiers:
        use_all_of(tiers)
        tiers.assert_all_slots_can_be_had()
    failures = [r for r in caplog.records if "an admission fails" in r.getMessage()]
    assert len(failures) == (call != "admitted"), "what is admitted is known without asking it"
    assert all(f'ZeroDivisionError("{call}")' in caplog.text for _ in failures)


@pytest.mark.parametrize("call", CALLS)
def test_a_store_whose_admission_raises_returns_the_bytes_that_were_put(install, tmp_path, call):
    name = install(RAISING.format(module="write_through", name="WriteThrough", call=call))
    chunks = Chunks()
    config = config_of(tmp_path / "d", primary=f"{4 * chunks.chunk_bytes}B", cascade=name)
    with chunks.open(config) as store:
        for number in range(16):
            assert chunks.put(store, [number]) == 1
        store.flush()
        found = chunks.found(store, range(16))
        assert len(found) == (4 if call == "on_resident" else 16)
        assert store.check() == []


def test_an_admission_that_always_raises_leaves_the_other_tiers_alone(install, tmp_path):
    source = RAISING.format(module="write_through", name="WriteThrough", call="on_resident")
    with opened(tmp_path, {"cascade": install(source)}, {}) as tiers:
        tiers.store(1, 2)
        tiers.store(3, 4, 5, 6)
        assert tiers.locate(1, 2) == [RECORDED, RECORDED]
        assert tiers.recorded(0, 1, 2) == []
        assert tiers.recorded(1, 1, 2) == [1, 2]
