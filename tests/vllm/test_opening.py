"""How the scheduler half comes to know what the workers hold, and what it does before.

Method: both connectors are driven through vLLM's hooks. Ranks of other processes get and give
pickled messages only.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hooked import HookedEngine, block, make_request, scheduled
from transfers import far, several, tierstore
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from tierstore.errors import ConfigError
from tierstore_vllm.messages import Adapter, AdapterUse, WorkerReport
from tierstore_vllm.opening import ASKING_STEPS_MAX

pytestmark = pytest.mark.vllm

MEMORY = {"version": 1, "primary": {"capacity": "1MiB"}}
ALONE = tierstore(MEMORY)


def disk(path: Path, **changes: Any) -> dict[str, Any]:
    tier = {"name": "disk", "backend": "file", "path": str(path), "capacity": "512MiB"}
    return MEMORY | {"secondary": [tier | changes]}


def compute(engine: HookedEngine, request: SimpleNamespace, block_ids: list[int]) -> Any:
    """Admit and compute a request; return what the workers were told."""
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (0, False)
    admit(engine, request, block_ids)
    return engine.step(scheduled((request, block_ids)))


def admit(engine: HookedEngine, request: SimpleNamespace, block_ids: list[int]) -> None:
    blocks = SimpleNamespace(blocks=([block(block_id) for block_id in block_ids],))
    engine.scheduler.update_state_after_alloc(request, blocks, 0)


def again(request: SimpleNamespace, name: str) -> SimpleNamespace:
    return SimpleNamespace(**(vars(request) | {"request_id": name, "num_computed_tokens": 0}))


def cached_tokens(engine: HookedEngine, request: SimpleNamespace) -> int | None:
    """Ask for the same prompt in another request."""
    other = again(request, f"{request.request_id} again")
    engine.scheduler.on_new_request(other)
    tokens, _ = engine.match(other)
    engine.scheduler.request_finished_all_groups(other, ([],))
    return tokens


def test_a_worker_of_the_same_process_is_known_before_the_first_request():
    engine = HookedEngine(ALONE)
    assert not engine.scheduler.has_pending_push_work()
    request = make_request("r", 3)
    compute(engine, request, [1, 2, 3, 4])
    engine.step()
    assert cached_tokens(engine, request) == 48
    engine.close()


def test_nothing_of_ours_is_in_the_handshake_of_other_connectors():
    engine = HookedEngine(ALONE)
    assert engine.workers[0].get_handshake_metadata() is None
    engine.close()


@pytest.mark.parametrize("rank_count", [1, 2, 3])
def test_ranks_elsewhere_are_asked_until_all_have_answered(rank_count: int):
    engine = HookedEngine(ALONE, rank_count=rank_count, shares_process=False)
    request = make_request("r", 3)
    engine.scheduler.on_new_request(request)
    for rank in range(rank_count):
        # A rank's answer comes when it comes; until the last one the engine steps on.
        assert engine.scheduler.has_pending_push_work()
        assert engine.match(request) == (None, False)
        engine.step(ranks=range(rank, rank + 1))
    assert engine.match(request) == (0, False)
    assert not engine.scheduler.has_pending_push_work()
    admit(engine, request, [1, 2, 3, 4])
    engine.step(scheduled((request, [1, 2, 3, 4])))
    engine.step()
    assert cached_tokens(engine, request) == 48
    engine.close()


def test_a_request_waits_a_bounded_number_of_steps_and_later_answers_count():
    engine = HookedEngine(ALONE, rank_count=2, shares_process=False)
    request = make_request("r", 3)
    engine.scheduler.on_new_request(request)
    for _ in range(ASKING_STEPS_MAX):
        assert engine.match(request) == (None, False)
        engine.step(ranks=range(1))
    assert engine.match(request) == (0, False)
    assert not engine.scheduler.has_pending_push_work()
    engine.step()
    compute(engine, make_request("s", 2), [7, 8, 9])
    engine.step()
    assert cached_tokens(engine, make_request("s", 2)) == 32
    engine.close()


def test_what_was_computed_before_the_ranks_answered_is_not_offloaded_piecemeal():
    engine = HookedEngine(ALONE, rank_count=2, shares_process=False)
    request = make_request("r", 3)
    engine.scheduler.on_new_request(request)
    request.num_computed_tokens = 32  # vLLM did not ask, or stopped asking
    engine.step(scheduled((request, [1, 2, 3, 4])))
    assert not engine.step().plan
    assert cached_tokens(engine, request) == 0
    engine.close()


def test_a_request_that_ended_before_the_ranks_answered_is_forgotten():
    engine = HookedEngine(ALONE, rank_count=2, shares_process=False)
    request = make_request("r", 3)
    engine.scheduler.on_new_request(request)
    engine.scheduler.request_finished_all_groups(request, ([],))
    engine.step()
    step = engine.step(scheduled((request, [1, 2, 3, 4])))
    assert not step.plan
    engine.close()


def test_a_reset_before_the_ranks_answered_is_one_after(tmp_path: Path):
    first = HookedEngine(tierstore(disk(tmp_path)))
    request = make_request("r", 3)
    compute(first, request, [1, 2, 3, 4])
    first.close()
    second = HookedEngine(tierstore(disk(tmp_path)), shares_process=False)
    assert second.scheduler.reset_cache()
    second.step()
    assert cached_tokens(second, request) == 0
    second.close()
    third = HookedEngine(tierstore(disk(tmp_path)))
    assert cached_tokens(third, request) == 0
    third.close()


def test_adapters_that_ranks_tell_of_before_the_last_has_answered_are_known():
    engine = HookedEngine(ALONE, rank_count=2, shares_process=False)
    lora = LoRARequest("adapter", 1, "/adapter")
    for rank in range(2):
        use = AdapterUse(rank, Adapter.of(lora), b"weights")
        engine.scheduler.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=WorkerReport(adapter_uses=[use]))
        )
    engine.step()
    request = make_request("r", 3, lora_request=lora)
    assert len(compute(engine, request, [1, 2, 3, 4]).plan.commands) == 1
    engine.close()


TOO_SMALL = {"version": 1, "primary": {"capacity": "4KiB"}}
LARGE_CHUNKS = {"primary": {"capacity": "64MiB"}, "offload": {"blocks_per_chunk": 1024}}


@pytest.mark.parametrize("shares_process", [True, False])
def test_a_configuration_that_cannot_work_stops_the_engine_at_its_start(
    shares_process: bool,  # noqa: FBT001 - a parameter of the test
    tmp_path: Path,
):
    def start(config: dict[str, Any]) -> HookedEngine:
        return HookedEngine(tierstore(config), shares_process=shares_process)

    start(disk(tmp_path)).close()
    with pytest.raises(ConfigError, match=r"primary\.capacity"):
        start(TOO_SMALL)
    with pytest.raises(ConfigError, match=r"capacity: .* too few"):
        start(disk(tmp_path / "small", capacity="8MiB") | LARGE_CHUNKS)
    with pytest.raises(ConfigError, match="another backend"):
        start(disk(tmp_path, backend="lmdb"))


@pytest.mark.parametrize("shares_process", [True, False])
def test_an_engine_that_cannot_be_described_is_one_warning_and_no_cache(
    shares_process: bool,  # noqa: FBT001 - a parameter of the test
    caplog: pytest.LogCaptureFixture,
):
    engine = HookedEngine(ALONE, shares_process=shares_process, spoil=forget_draft_groups)
    engine.step()
    request = make_request("r", 3)
    assert not compute(engine, request, [1, 2, 3, 4]).plan
    warnings = [
        r.getMessage() for r in caplog.records if r.name.startswith("tierstore") and not r.exc_info
    ]
    assert len(warnings) == 1
    assert "caches nothing" in warnings[0]
    assert "is_eagle_group" in warnings[0]
    engine.close()


def forget_draft_groups(config: Any) -> Any:
    """Leave the scheduler what the worker reads, and nothing more."""
    groups = [
        SimpleNamespace(kv_cache_spec=group.kv_cache_spec, layer_names=group.layer_names)
        for group in config.kv_cache_groups
    ]
    return SimpleNamespace(**(vars(config) | {"kv_cache_groups": groups}))


def test_what_another_connector_loads_into_is_not_kept_from_before():
    engine = HookedEngine(ALONE)
    first, second, third = make_request("a", 3), make_request("b", 2), make_request("c", 1)
    engine.scheduler.on_new_request(first)
    admit(engine, first, [1, 2, 3, 4])
    engine.step(scheduled((first, [1, 2, 3, 4])), is_looked_at=False)
    engine.scheduler.request_finished_all_groups(first, ([],))
    # Its offload is under way, its blocks are free: another connector loads into one of them,
    # which no step computes, so no fence holds it back.
    for request in (second, third):
        engine.scheduler.on_new_request(request)
    blocks = [block(1, is_shared=True), block(3), block(9)]
    engine.scheduler.update_state_after_alloc(second, SimpleNamespace(blocks=(blocks,)), 0)
    admit(engine, third, [2, 7])
    step = engine.step(scheduled((third, [2, 7])))
    assert len(step.plan.fence_job_ids) == 1
    assert cached_tokens(engine, first) == 32
    assert cached_tokens(engine, third) == 16
    assert engine.scheduler._scheduler.check() == []
    engine.close()


def test_what_another_connector_loads_for_the_very_step_is_not_kept_from_before():
    engine = HookedEngine(ALONE)
    first, second = make_request("a", 3), make_request("b", 3)
    engine.scheduler.on_new_request(first)
    admit(engine, first, [1, 2, 3, 4])
    engine.step(scheduled((first, [1, 2, 3, 4])), is_looked_at=False)
    engine.scheduler.request_finished_all_groups(first, ([],))
    # Its offload is under way, its blocks are free. vLLM holds nothing of the next request, has
    # another connector load two blocks, and hashes them at once, since no request waits for that.
    engine.scheduler.on_new_request(second)
    assert engine.match(second) == (0, False)
    blocks = [block(3, is_shared=True), block(1, is_shared=True), block(9), block(10)]
    engine.scheduler.update_state_after_alloc(second, SimpleNamespace(blocks=(blocks,)), 0)
    second.num_computed_tokens = 32
    step = engine.step(scheduled((second, [3, 1, 9, 10]), computed_tokens=32))
    assert len(step.plan.fence_job_ids) == 1
    assert cached_tokens(engine, first) == 0
    assert cached_tokens(engine, second) == 48
    assert engine.scheduler._scheduler.check() == []
    engine.close()


@pytest.mark.parametrize("step_number", [0, 1])
def test_what_a_failed_load_of_another_connector_was_computed_with_is_not_kept(step_number: int):
    engine = HookedEngine(ALONE)
    first, second = make_request("a", 3), make_request("b", 2)
    for request, block_ids in ((first, [1, 2, 3, 4]), (second, [5, 6, 7])):
        engine.scheduler.on_new_request(request)
        admit(engine, request, block_ids)
    failed = [frozenset([1]), frozenset()][:: 1 - 2 * step_number]
    engine.step(scheduled((first, [1, 2, 3, 4])), is_looked_at=False, invalid_block_ids=failed[0])
    engine.step(scheduled((second, [5, 6, 7])), invalid_block_ids=failed[1])
    # vLLM looks at the steps in their order, so what comes before the failure is sound.
    assert cached_tokens(engine, first) == (0, 48)[step_number]
    assert cached_tokens(engine, second) == 0
    engine.close()


@pytest.mark.parametrize("paths", [("a", "b"), ("a", "a")])
@pytest.mark.parametrize("shares_process", [True, False])
def test_twice_beside_another_connector(
    shares_process: bool,  # noqa: FBT001 - a parameter of the test
    paths: tuple[str, str],
    tmp_path: Path,
):
    children = [tierstore(disk(tmp_path / path)) for path in paths]
    engine = HookedEngine(several(*children, far(tmp_path / "far")), shares_process=shares_process)
    engine.step()
    request = make_request("r", 3)
    engine.scheduler.on_new_request(request)
    admit(engine, request, [1, 2, 3, 4])
    engine.step(scheduled((request, [1, 2, 3, 4])))
    engine.step()
    assert cached_tokens(engine, request) == 48
    for child in engine.scheduler.sub_connectors[: len(set(paths))]:
        assert cached_tokens(SimpleNamespace(scheduler=child, match=child_match(child)), request)
    engine.close()


def child_match(child: Any) -> Any:
    return lambda request: child.get_num_new_matched_tokens(request, 0)
