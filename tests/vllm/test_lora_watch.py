"""What a rank says of its adapters: all that decides their work counts, and nothing else."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from tierstore.config import load_config
from tierstore.transfer import FailureReason, JobId, Load, StepPlan
from tierstore_vllm.engine_names import LORA_NAMES
from tierstore_vllm.lora import watch as lora_watch
from tierstore_vllm.lora.digests import AdaptedHashes
from tierstore_vllm.lora.watch import ADAPTER_COUNT_MAX, LoraWatch, digest_adapter, file_states
from tierstore_vllm.messages import Adapter, AdapterClaim, AdapterUse, StepMetadata
from tierstore_vllm.worker import WorkerHalf

pytestmark = pytest.mark.vllm

CONFIG = SimpleNamespace(
    enable_tower_connector_lora=False,
    fully_sharded_loras=False,
    lora_dtype=torch.bfloat16,
    target_modules=None,
    max_loras=1,
)


def make_model(number: int = 1, **changes: Any) -> LoRAModel:
    a = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    layer = {"module_name": "q", "rank": 2, "lora_alpha": 4, "lora_a": a, "lora_b": a.T}
    return LoRAModel(number, 2, {"q": LoRALayerWeights(**(layer | changes))})


def digest(model: LoRAModel, *, is_3d: bool = False, **config: Any) -> bytes:
    request = LoRARequest("a", 1, "p", is_3d_lora_weight=is_3d)
    return digest_adapter(request, model, SimpleNamespace(**(vars(CONFIG) | config)))


def flipped() -> torch.Tensor:
    a = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    a.view(torch.uint8)[1, 3] ^= 1
    return a


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(make_model(lora_a=flipped())),
        lambda: digest(make_model(lora_a=None)),
        lambda: digest(make_model(lora_a=torch.arange(8).bfloat16().reshape(4, 2))),
        lambda: digest(make_model(lora_a=torch.arange(8).half().reshape(2, 4))),
        lambda: digest(make_model(lora_alpha=8)),
        lambda: digest(make_model(scaling=1.5)),
        lambda: digest(make_model(module_name="k")),
        lambda: digest(make_model(), is_3d=True),
        lambda: digest(make_model(), fully_sharded_loras=True),
        lambda: digest(make_model(), target_modules=["q"]),
        lambda: digest(make_model(), lora_dtype=torch.float16),
    ],
)
def test_whatever_decides_an_adapters_work_changes_its_digest(other: Callable[[], bytes]) -> None:
    assert other() != digest(make_model())


def test_an_adapters_number_and_the_room_for_others_do_not_change_its_digest() -> None:
    assert digest(make_model(7), max_loras=9) == digest(make_model())


def test_an_adapter_with_a_part_of_an_unknown_kind_is_not_cached_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LoraWatch(CONFIG, 0)
    watch.on_load(SimpleNamespace(), LoRARequest("a", 1, "p"), make_model(lora_a=object()), None)
    watch.on_use(LoRARequest("a", 1, "p"))
    assert watch.take() == [AdapterUse(0, Adapter("a", "p"), b"")]
    assert "name=a" in caplog.text
    watch.tell_all()
    assert watch.take() == [AdapterUse(0, Adapter("a", "p"), b"")]


def test_adapters_that_vllm_warms_up_with_are_not_told() -> None:
    watch = LoraWatch(CONFIG, 0)
    watch.on_use(LoRARequest("warmup_1", 1, "/not/a/real/path"))
    assert watch.take() == []


@pytest.mark.parametrize(
    ("towers", "names", "said"),
    [
        (True, LORA_NAMES, "enable_tower_connector_lora"),
        (False, {"vllm.lora.worker_manager": {"Gone": ("load",)}}, "vLLM lacks .*manager.Gone"),
        (False, LORA_NAMES, ""),
    ],
)
def test_where_adapters_cannot_be_watched_they_are_not_cached_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    towers: bool,  # noqa: FBT001 - a setting of vLLM
    names: Any,
    said: str,
) -> None:
    monkeypatch.setattr(lora_watch, "LORA_NAMES", names)
    config = SimpleNamespace(**(vars(CONFIG) | {"enable_tower_connector_lora": towers}))
    manager: Any = SimpleNamespace(lora_config=config)
    watch = LoraWatch(config, 0)
    watch.open()
    assert list(lora_watch._watches_of(manager)) == ([] if said else [watch])
    assert re.search(said, caplog.text)
    assert bool(caplog.text) == bool(said)
    watch.close()
    assert list(lora_watch._watches_of(manager)) == []


def test_only_changes_are_told() -> None:
    watch = LoraWatch(CONFIG, 3)
    request, model = LoRARequest("a", 1, "p"), make_model()
    manager: Any = SimpleNamespace(list_adapters=lambda: {1})
    for _ in range(2):
        watch.on_load(manager, request, model, None)
        watch.on_use(request)
    assert watch.take() == [AdapterUse(3, Adapter("a", "p"), digest(model))]
    watch.on_load(manager, LoRARequest("b", 1, "q"), make_model(lora_alpha=8), None)
    told = {use.adapter: use.digest for use in watch.take()}
    watch.tell_all()
    assert {use.adapter: use.digest for use in watch.take()} == told
    assert told == dict.fromkeys(
        (Adapter("a", "p"), Adapter("b", "q")), digest(make_model(lora_alpha=8))
    )


def test_more_adapters_than_the_maximum_are_not_told_and_those_told_still_are() -> None:
    watch = LoraWatch(CONFIG, 0)
    model = make_model()
    for number in range(1, ADAPTER_COUNT_MAX + 10):
        watch.on_load(SimpleNamespace(), LoRARequest(f"a{number}", number, "p"), model, None)
    assert len(watch.take()) == ADAPTER_COUNT_MAX
    watch.on_load(SimpleNamespace(), LoRARequest("a5", 5, "p"), make_model(lora_alpha=8), None)
    assert [use.adapter.name for use in watch.take()] == ["a5"]


def test_a_claim_holds_for_the_weights_in_memory_or_for_unchanged_files(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    watch, held = LoraWatch(CONFIG, 0), {1}
    manager: Any = SimpleNamespace(list_adapters=lambda: held)
    request = LoRARequest("a", 1, str(tmp_path))
    claim = AdapterClaim(Adapter("a", str(tmp_path)), 1, {0: digest(make_model())})
    assert not watch.holds(claim)
    watch.on_load(manager, request, make_model(), file_states(str(tmp_path)))
    assert watch.holds(claim)
    assert not watch.holds(replace(claim, digests={0: b"other"}))
    assert not watch.holds(replace(claim, lora_int_id=2))
    held.clear()
    assert watch.holds(claim)
    (tmp_path / "weights").write_text("2")
    assert not watch.holds(claim)
    held.add(1)
    assert watch.holds(claim)


def test_files_that_change_while_they_are_read_hold_no_claim_later(tmp_path: Path) -> None:
    before = file_states(str(tmp_path))
    (tmp_path / "weights").write_text("1")
    watch = LoraWatch(CONFIG, 0)
    manager: Any = SimpleNamespace(list_adapters=set)
    watch.on_load(manager, LoRARequest("a", 1, str(tmp_path)), make_model(), before)
    claim = AdapterClaim(Adapter("a", str(tmp_path)), 1, {0: digest(make_model())})
    assert not watch.holds(claim)


def test_hashes_of_an_adapter_are_a_live_view() -> None:
    hashes = [b"1", b"2", b"3"]
    adapted = AdaptedHashes(hashes, b"d")
    assert adapted[1] == b"2d"
    assert adapted[0::2] == [b"1d", b"3d"]
    hashes.append(b"4")
    assert list(adapted) == [b"1d", b"2d", b"3d", b"4d"]
    assert len(adapted) == len(hashes)


def test_a_refused_load_says_why_though_all_its_chunks_are_in_memory() -> None:
    engine: Any = SimpleNamespace(max_concurrent_batches=1)
    half = WorkerHalf(engine, engine, load_config({"primary": {"capacity": "1MiB"}}))
    load = Load(job_id=JobId(1), parts=())
    claim = AdapterClaim(Adapter("a", "p"), 1, {0: b"other"})
    plan = StepPlan(commands=(load,))
    half.start_transfers(StepMetadata(plan, {JobId(1): "r"}, claims={JobId(1): claim}))
    report = half.take_report()
    assert report is not None
    assert set(report.answers[JobId(1)].failed.values()) == {FailureReason.OUTDATED}
    assert half.take_results().failed_recving == {"r"}
