"""The scheduler's step does not wait for a catalog; what is recorded is found all the same."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from tierstore import Manifest, TierStore, make_offload_keys
from tierstore.config import load_config
from tierstore.testing.spread import spread_hashes
from tierstore.tier.secondary import ASKED_AT_ONCE_MAX
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.scheduler import SchedulerHalf
from tierstore_vllm.scheduler import half as half_module

CHUNK = 4096
MANIFEST = Manifest.simple("m", CHUNK)
HASHES = spread_hashes(range(20 * ASKED_AT_ONCE_MAX))
SHAPE = EngineShape(rank_count=1, hash_block_tokens=1, alignment_tokens=1)


def open_half(path, *, recorded: int) -> SchedulerHalf:
    """Open a scheduler half that finds so many chunks on disk and none in memory."""
    disk = {"name": "d", "backend": "file", "path": str(path), "capacity": "64MiB"}
    config = load_config({"primary": {"capacity": "8MiB"}, "secondary": [disk]})
    keys = make_offload_keys(MANIFEST.namespace, 0, HASHES[:recorded])
    with TierStore.open(config, MANIFEST) as store:
        if recorded:
            assert all(store.put(keys, np.zeros((recorded, CHUNK), np.uint8)))
        store.flush()
    return SchedulerHalf.open(config, MANIFEST, SHAPE)


def questions(half: SchedulerHalf) -> list[tuple[int | None, bool]]:
    """Ask about a prompt of all hashes, as vLLM does every step, until there is an answer."""
    request = SimpleNamespace(
        request_id="r",
        lora_request=None,
        kv_transfer_params=None,
        block_hashes=HASHES,
        num_tokens=len(HASHES) + 1,
        skip_reading_prefix_cache=False,
    )
    half.on_new_request(request)
    answers = [half.get_num_new_matched_tokens(request, 0)]
    while answers[-1][0] is None:
        half.plan_idle_step()
        answers.append(half.get_num_new_matched_tokens(request, 0))
    assert not half.has_given_up
    half.close()
    return answers


@pytest.mark.parametrize("recorded", [ASKED_AT_ONCE_MAX + 1, len(HASHES) // 2, len(HASHES)])
def test_a_long_prefix_on_disk_is_found_by_asking_again(tmp_path, recorded) -> None:
    answers = questions(open_half(tmp_path, recorded=recorded))
    assert answers[0] == (None, False)
    assert answers[-1] == (recorded, True)


@pytest.mark.parametrize("recorded", [1, ASKED_AT_ONCE_MAX - 1])
def test_a_short_prefix_on_disk_is_found_at_once(tmp_path, recorded) -> None:
    assert questions(open_half(tmp_path, recorded=recorded)) == [(recorded, True)]


def test_a_prefix_of_which_nothing_is_recorded_is_a_miss_at_once(tmp_path) -> None:
    assert questions(open_half(tmp_path, recorded=0)) == [(0, False)]


def engine_step(scheduled_tokens: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens=scheduled_tokens,
        kv_connector_block_state=None,
        kv_cache_block_copies=[],
        preempted_req_ids=None,
    )


def test_a_step_with_nothing_to_do_lets_our_threads_work(tmp_path, monkeypatch) -> None:
    half = open_half(tmp_path, recorded=0)
    pauses: list[float] = []
    monkeypatch.setattr(half_module, "time", SimpleNamespace(sleep=pauses.append))
    assert half.build_connector_meta(engine_step({"r": 1})).is_empty()
    assert pauses == [], "what is computed must not wait"
    assert half.build_connector_meta(engine_step({})).is_empty()
    assert 0 < sum(pauses) <= 0.001
    assert not half.has_given_up
    half.close()
