"""A request says itself whether it may be cached."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tierstore import Manifest
from tierstore.config import load_config
from tierstore_vllm.layout import EngineShape
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


def test_a_request_with_an_adapter_stays_unknown(half) -> None:
    adapter = SimpleNamespace(lora_name="a", lora_path="a")
    half.on_new_request(
        SimpleNamespace(
            request_id="r",
            lora_request=adapter,
            kv_transfer_params=None,
            block_hashes=[b"h" * 32],
        )
    )
    assert not half._planner.completing(["r"], [1 << 62])
