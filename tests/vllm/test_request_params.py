"""A request says itself whether it may be cached."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tierstore import Manifest
from tierstore.config import load_config
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.lora.digests import ASK_COUNT_MAX, AdapterRequests
from tierstore_vllm.messages import Adapter, AdapterUse, WorkerReport
from tierstore_vllm.scheduler import SchedulerHalf


@pytest.fixture
def half():
    shape = EngineShape(rank_count=1, hash_block_tokens=1, alignment_tokens=1)
    config = load_config({"primary": {"capacity": "1MiB"}})
    opened = SchedulerHalf.open(config, Manifest.simple("m", 4096), shape)
    yield opened
    opened.close()


def knows(half: SchedulerHalf, params: object) -> bool:
    half.on_new_request(
        SimpleNamespace(
            request_id="r", lora_request=None, kv_transfer_params=params, block_hashes=[b"h" * 32]
        )
    )
    return bool(half._planner.completing(["r"], [1 << 62]))


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"tierstore.cache": True}])
def test_a_request_is_cached_unless_it_says_otherwise(half, params) -> None:
    assert knows(half, params)


def test_a_request_that_says_no_stays_unknown(half, caplog) -> None:
    assert not knows(half, {"tierstore.cache": False})
    assert not caplog.records


@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_word_that_is_not_understood_keeps_the_request_out_and_is_named(
    half, caplog, value
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not knows(half, {"tierstore.cache": value})
    assert f"tierstore.cache={value!r}, expected true or false" in caplog.text


class Adapted:
    """A request with an adapter."""

    def __init__(self, request_id: str, **changes: object) -> None:
        self.request_id = request_id
        adapter = {"lora_name": "a", "lora_path": "p", "lora_int_id": 1, "load_inplace": False}
        self.lora_request = SimpleNamespace(**(adapter | changes))
        self.kv_transfer_params = None
        self.block_hashes = [b"h" * 32]
        self.num_tokens = 2
        self.num_computed_tokens = 0
        self.skip_reading_prefix_cache = False


def tell(half: SchedulerHalf, digest: bytes) -> None:
    use = AdapterUse(rank=0, adapter=Adapter("a", "p"), digest=digest)
    half.take_report(WorkerReport(adapter_uses=[use]))


def is_known(half: SchedulerHalf, request: Adapted) -> bool:
    return bool(half._planner.completing([request.request_id], [1 << 62]))


def test_a_request_with_an_adapter_is_known_once_the_ranks_have_told_its_weights(half) -> None:
    early, running, late = (Adapted(name) for name in ("early", "running", "late"))
    half.on_new_request(early)
    half.on_new_request(running)
    assert half.get_num_new_matched_tokens(early, 0) == (None, False)
    assert not is_known(half, early)
    running.num_computed_tokens = 1
    tell(half, b"1" * 16)
    half.on_new_request(late)
    assert is_known(half, early)
    assert is_known(half, late)
    assert not is_known(half, running)
    assert half.get_num_new_matched_tokens(early, 0) == (0, False)


def test_a_request_whose_adapter_nobody_has_loaded_is_computed_in_the_end(half) -> None:
    request = Adapted("r")
    half.on_new_request(request)
    answers = [half.get_num_new_matched_tokens(request, 0) for _ in range(ASK_COUNT_MAX + 1)]
    assert answers == [(None, False)] * ASK_COUNT_MAX + [(0, False)]


def test_an_adapter_that_changes_is_unknown_until_a_reset_and_named(half, caplog) -> None:
    before, between, after = (Adapted(name) for name in ("before", "between", "after"))
    tell(half, b"1" * 16)
    half.on_new_request(before)
    assert is_known(half, before)
    with caplog.at_level(logging.WARNING):
        tell(half, b"2" * 16)
        tell(half, b"3" * 16)
    assert len(caplog.records) == 1
    assert "name=a path=p" in caplog.text
    half.on_new_request(between)
    assert not is_known(half, before)
    assert not is_known(half, between)
    half.reset_cache()
    assert half.plan_idle_step().asks_for_adapters
    assert not half.plan_idle_step().asks_for_adapters
    half.on_new_request(after)
    assert not is_known(half, after)
    tell(half, b"4" * 16)
    assert is_known(half, after)
    assert not is_known(half, between)


def test_a_request_that_loads_its_adapter_in_place_stays_unknown(half) -> None:
    tell(half, b"1" * 16)
    request = Adapted("r", load_inplace=True)
    half.on_new_request(request)
    assert not is_known(half, request)


def test_an_adapter_that_a_rank_cannot_tell_is_unknown_until_a_reset(half) -> None:
    first, then, after = (Adapted(name) for name in ("first", "then", "after"))
    tell(half, b"")
    half.on_new_request(first)
    assert half.get_num_new_matched_tokens(first, 0) == (0, False)
    assert not is_known(half, first)
    tell(half, b"1" * 16)  # vLLM's own cache still has what the unknown weights computed
    half.on_new_request(then)
    assert not is_known(half, then)
    half.reset_cache()
    tell(half, b"1" * 16)
    half.on_new_request(after)
    assert is_known(half, after)


def test_an_adapter_that_a_rank_cannot_tell_any_more_stays_unknown_after_a_reset(half) -> None:
    tell(half, b"1" * 16)
    half.reset_cache()
    tell(half, b"")
    request = Adapted("r")
    half.on_new_request(request)
    assert not is_known(half, request)


def test_an_adapter_that_goes_on_changing_costs_others_their_offloads_only_once() -> None:
    adapters = AdapterRequests(rank_count=1)
    uses = [AdapterUse(0, Adapter("a", "p"), bytes([number]) * 16) for number in range(3)]
    assert [adapters.learn([use]) for use in uses] == [set(), {Adapter("a", "p")}, set()]


def test_a_claim_of_an_adapter_that_a_reset_has_forgotten_names_no_weights() -> None:
    adapters = AdapterRequests(rank_count=1)
    assert adapters.claim(Adapted("r").lora_request).digests == {}


def test_an_adapters_digest_behind_vllms_hash_is_taken_off_for_listeners() -> None:
    adapters = AdapterRequests(rank_count=1)
    adapters.learn([AdapterUse(0, Adapter("a", "p"), b"1" * 16)])
    hashes = adapters.hashes(Adapted("r"))
    assert hashes is not None
    (named,) = hashes
    own = b"h" * 32
    assert (named != own, named.startswith(own)) == (True, True)
    assert adapters.block_hash(named) == adapters.block_hash(own) == own
