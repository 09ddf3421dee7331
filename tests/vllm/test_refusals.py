"""What the connector does not know is not cached, and vLLM runs on.

Goal: every KV cache that cannot be described ends in one warning that names layer and reason, no
external hit, and no exception. Method: both connectors are driven through vLLM's hooks as an engine
does, with a KV cache that was spoiled in one way; and a real engine has one group of that kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from allocation import (
    BLOCK_COUNT,
    Memory,
    Specs,
    attention,
    latent_attention,
    latent_window,
    state,
    window,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface as specs

from tierstore.errors import LayoutError
from tierstore_vllm import TierStoreConnector
from tierstore_vllm.messages import StepMetadata

pytestmark = pytest.mark.vllm


@dataclass(frozen=True, kw_only=True)
class UnknownSpec(specs.FullAttentionSpec):
    """A spec of a future vLLM or of a plug-in: derived, but of unknown meaning."""


def spoil_nothing(memory: Memory) -> None:
    """Leave everything as vLLM made it."""


def give_a_raw_buffer(memory: Memory) -> None:
    """Deliver the whole backing tensor, as for specs without views of layers."""
    memory.views["layer.1"] = memory.bytes.view(torch.int8)


def declare_no_views(memory: Memory) -> None:
    memory.config.kv_cache_groups[0].kv_cache_spec = specs.HiSparseResidentSpec(
        block_size=16, page_size=4096
    )
    give_a_raw_buffer(memory)


def lose_a_layer(memory: Memory) -> None:
    del memory.views["layer.1"]


def register_nothing(memory: Memory) -> None:
    memory.views.clear()


def halve_the_heads(memory: Memory) -> None:
    memory.views["layer.1"] = memory.views["layer.1"][:, :2]


def halve_the_blocks(memory: Memory) -> None:
    memory.views["layer.1"] = memory.views["layer.1"][: BLOCK_COUNT // 2]


def double_the_blocks(memory: Memory) -> None:
    memory.views["layer.1"] = torch.zeros(2 * BLOCK_COUNT, 4, 16, 64, dtype=torch.float16)


def repeat_one_block(memory: Memory) -> None:
    memory.views["layer.1"] = memory.views["layer.1"][:1].expand(BLOCK_COUNT, -1, -1, -1)


def repeat_one_head(memory: Memory) -> None:
    memory.views["layer.1"] = memory.views["layer.1"][:, :1].expand(-1, 4, -1, -1)


def move_to_the_host(memory: Memory) -> None:
    memory.config.kv_cache_groups[0].host_resident = True


def exclude_from_transfer(memory: Memory) -> None:
    memory.config.kv_cache_groups[0].enable_kv_transfer = False


def drop_an_attribute(memory: Memory) -> None:
    memory.config = SimpleNamespace(
        kv_cache_groups=memory.config.kv_cache_groups, num_blocks=BLOCK_COUNT
    )


def forget_the_groups(memory: Memory) -> None:
    memory.config.kv_cache_groups = []


def register_no_tensor(memory: Memory) -> None:
    memory.views["layer.1"] = None


def full() -> Specs:
    return {f"layer.{i}": attention() for i in range(3)}


def only(spec: specs.KVCacheSpec) -> Callable[[], Specs]:
    return lambda: {"layer.1": spec}


RING = specs.CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float16)
GROWING = specs.RSWASpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16, rswa_window=64
)
SIZES = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float16}
UNKNOWN = {f"layer.{i}": (window() if i % 2 else UnknownSpec(**SIZES)) for i in range(2)}


@pytest.mark.parametrize(
    ("make_specs", "spoil", "layer", "reason"),
    [
        (full, give_a_raw_buffer, "layer.1", "expected a view"),
        (full, declare_no_views, "layer.0", "HiSparseResidentSpec"),
        (full, lose_a_layer, "layer.1", "not registered"),
        (full, register_nothing, "layer.0", "not registered"),
        (full, halve_the_heads, "layer.1", "specifies 8192 bytes"),
        (full, halve_the_blocks, "layer.1", "12 blocks, vLLM says 24"),
        (full, double_the_blocks, "layer.1", "specifies 8192 bytes"),
        (full, repeat_one_block, "layer.1", "beyond"),
        (full, repeat_one_head, "layer.1", "overlap"),
        (full, move_to_the_host, "layer.0", "device memory"),
        (full, exclude_from_transfer, "layer.0", "device memory"),
        (full, drop_an_attribute, "", "kv_cache_layout"),
        (full, register_no_tensor, "layer.1", "expected a view"),
        (full, forget_the_groups, "", "no KV cache"),
        (only(attention(non_causal=True)), spoil_nothing, "layer.1", "prefix cache"),
        (only(state(None, mode="none")), spoil_nothing, "layer.1", "prefix cache"),
        (only(GROWING), spoil_nothing, "layer.1", "RSWASpec"),
        (only(RING), spoil_nothing, "layer.1", "CircularBufferSpec"),
        (only(latent_window(bounded_replay=True)), spoil_nothing, "layer.1", "prefix cache"),
        (lambda: UNKNOWN, spoil_nothing, "layer.0", "UnknownSpec"),
    ],
)
def test_what_cannot_be_described_is_one_warning_and_no_hit(
    make_specs: Callable[[], Specs],
    spoil: Callable[[Memory], None],
    layer: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
):
    memory = Memory(make_specs(), "LBHNC")
    spoil(memory)
    with pytest.raises(LayoutError, match=reason):
        memory.describe()
    worker, scheduler = start_connectors(memory)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("tierstore")]
    assert len(warnings) == 1
    assert "caches nothing" in warnings[0]
    assert layer in warnings[0]
    assert reason in warnings[0]
    run_without_cache(worker, scheduler)


def test_pages_are_not_guessed_from_a_known_shape():
    """The same bytes under a spec of another type are refused, though every size fits."""
    known = Memory({"layer.0": latent_attention()}, "LBHNC")
    assert known.describe().manifest.chunk_bytes(0) == 64 * 1152
    group = known.config.kv_cache_groups[0]
    group.kv_cache_spec = specs.HiddenStateCacheSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    with pytest.raises(LayoutError, match="HiddenStateCacheSpec"):
        known.describe()


def test_chunks_that_are_too_large_for_a_record_are_one_warning_and_no_hit(caplog):
    page = attention(num_kv_heads=64, head_size=512)
    memory = Memory({"layer.0": page, "layer.1": page}, "LBHNC")
    worker, scheduler = start_connectors(memory, blocks_per_chunk=1024)
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("tierstore")]
    assert "caches nothing" in warning
    assert "change blocks_per_chunk" in warning
    run_without_cache(worker, scheduler)


def test_what_a_worker_raises_while_it_describes_itself_is_one_warning_and_no_hit(caplog):
    memory = Memory(full(), "LBHNC")
    del memory.vllm_config.lora_config  # which is read when the executor is open already
    worker, scheduler = start_connectors(memory)
    said = [r for r in caplog.records if r.name.startswith("tierstore")]
    error, warning = said
    assert error.exc_info is not None
    assert "caches nothing" in warning.getMessage()
    assert "lora_config" in warning.getMessage()
    run_without_cache(worker, scheduler)


def test_an_engine_with_one_group_that_cannot_be_cached_moves_nothing(tmp_path: Path):
    """Without prefix caching the states of qwen3_next are not restorable, its attention is."""
    from engine import Round, run_engine
    from scenario import Scenario, tier_config
    from tiny_models import DTYPES, build_model

    scenario = Scenario(build_model("qwen3_next", tmp_path), DTYPES["qwen3_next"])
    one = Round(prompts=[prompt for prompt in scenario.first if len(prompt) > 320], one_by_one=True)
    rounds = {"first": one, "second": one}
    config = tier_config("file", tmp_path / "tier")
    engine = {"enable_prefix_caching": False}
    result = run_engine(scenario.job(rounds, config=config, engine=engine), tmp_path)
    assert [a.tokens for a in result.rounds["second"]] == [a.tokens for a in result.rounds["first"]]
    assert {answer.cached for answer in result.rounds["second"]} == {0}
    said = [line for line in result.log.splitlines() if "tierstore caches nothing: cause=" in line]
    assert len(said) == 1
    assert "MambaSpec) cannot be restored from a prefix cache" in said[0]
    assert not any(value for name, value in result.metrics.items() if "tierstore" in name)
    assert not (tmp_path / "tier").exists()


def start_connectors(
    memory: Memory, **offload: int
) -> tuple[TierStoreConnector, TierStoreConnector]:
    """Do what an engine does before the first request."""
    config = memory.vllm_config
    store = {"version": 1, "primary": {"capacity": "64MiB"}, "offload": offload}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="TierStoreConnector",
        kv_connector_module_path="tierstore_vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tierstore.config": store},
    )
    config.parallel_config.rank = 0
    config.parallel_config.world_size = 1
    worker = TierStoreConnector(config, KVConnectorRole.WORKER, memory.config)
    worker.register_kv_caches(memory.views)
    scheduler = TierStoreConnector(config, KVConnectorRole.SCHEDULER, memory.config)
    scheduler.set_xfer_handshake_metadata_pp_aware({})
    return worker, scheduler


def run_without_cache(worker: TierStoreConnector, scheduler: TierStoreConnector) -> None:
    """Call every hook of a request's life; each must answer as if there were no connector."""
    request = SimpleNamespace(request_id="r")
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=()), 0)
    assert scheduler.get_external_cache_hit_sources(request, 0) == {}
    step = scheduler.build_connector_meta(SimpleNamespace())
    assert step == StepMetadata()
    worker.handle_preemptions(step)
    worker.bind_connector_metadata(step)
    worker.start_load_kv(SimpleNamespace())
    worker.wait_for_save()
    results = worker.get_transfer_results({"r"})
    assert not results.finished_recving
    assert not results.failed_recving
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    assert not scheduler.has_pending_push_work()
    assert scheduler.reset_cache()
    worker.shutdown()
    scheduler.shutdown()
