"""What a request supplies comes to the log cut, escaped, and once."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from hooked import HookedEngine, block, make_request, scheduled
from transfers import tierstore

from tierstore import Manifest
from tierstore.config import load_config
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.lora.digests import AdapterRequests
from tierstore_vllm.lora.watch import LoraWatch
from tierstore_vllm.messages import Adapter, AdapterUse
from tierstore_vllm.scheduler import SchedulerHalf

HUGE = "x\n[ERROR] forged\x1b[2J" * 50_000


@pytest.fixture
def half():
    shape = EngineShape(rank_count=1, hash_block_tokens=1, alignment_tokens=1)
    config = load_config({"primary": {"capacity": "1MiB"}})
    opened = SchedulerHalf.open(config, Manifest.simple("m", 4096), shape)
    yield opened
    opened.close()


@pytest.fixture
def said(caplog):
    """The lines of tierstore as a plain handler writes them."""

    def lines() -> list[str]:
        formatter = logging.Formatter("%(message)s")
        return [formatter.format(r) for r in caplog.records if r.name.startswith("tierstore")]

    with caplog.at_level(logging.DEBUG):
        yield lines


class Request(SimpleNamespace):
    """A request of vLLM that says more than it should."""

    def __init__(self, **changes):
        fields = {"request_id": HUGE, "lora_request": None, "kv_transfer_params": None}
        super().__init__(**fields, **changes)

    @property
    def block_hashes(self):
        raise KeyError(self.request_id)


@pytest.mark.parametrize(
    "params", [{"tierstore.cache": HUGE}, [HUGE], HUGE, {"tierstore.cache": [HUGE]}]
)
def test_a_parameter_that_is_not_understood_is_told_of_once_and_cut(half, said, params) -> None:
    for number in range(3):
        half.on_new_request(
            SimpleNamespace(request_id=f"{number}{HUGE}", kv_transfer_params=params)
        )
    (line,) = said()
    assert "expected true or false" in line
    assert len(line) < 2_000
    assert line.isprintable()
    assert not half.has_given_up


def test_a_hook_that_fails_with_the_words_of_a_request_is_told_of_once_and_cut(half, said) -> None:
    for _ in range(2):
        half.on_new_request(Request())
    (text,) = said()
    assert "scheduler hook failed: hook=on_new_request cause=KeyError" in text
    assert "in block_hashes" in text, "the trace names the line"
    assert len(text) < 10_000
    assert "\n[ERROR] forged" not in text
    assert "\x1b" not in text


def test_the_name_and_path_of_an_adapter_are_cut(said) -> None:
    requests = AdapterRequests(1)
    for number in range(2):
        requests.learn([AdapterUse(0, Adapter(HUGE, HUGE), bytes([number]) * 16)])
    (line,) = said()
    assert "LoRA adapter" in line
    assert len(line) < 20_000
    assert line.isprintable()


def test_an_adapter_that_cannot_be_digested_is_told_of_once_and_cut(said) -> None:
    class Model:
        def __init__(self) -> None:
            self.weights = type(HUGE, (), {})()

    names = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "fully_sharded_loras")
    config = SimpleNamespace(**dict.fromkeys(names, False), lora_dtype="auto", target_modules=None)
    watch = LoraWatch(config, 0)
    for number in range(3):
        request = SimpleNamespace(
            lora_name=f"{number}{HUGE}", lora_path=HUGE, lora_int_id=number, is_3d_lora_weight=False
        )
        watch.on_load(None, request, Model(), None)
    assert {use.digest for use in watch.take()} == {b""}
    (line,) = said()
    assert "cause=TypeError" in line
    assert len(line) < 20_000
    assert line.isprintable()


def test_a_request_with_a_huge_name_is_stored_loaded_and_not_logged(said) -> None:
    engine = HookedEngine(tierstore({"version": 1, "primary": {"capacity": "1MiB"}}))
    request = make_request("r", 3, request_id=HUGE)
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (0, False)
    blocks = SimpleNamespace(blocks=([block(block_id) for block_id in [1, 2, 3, 4]],))
    engine.scheduler.update_state_after_alloc(request, blocks, 0)
    engine.step(scheduled((request, [1, 2, 3, 4])))
    engine.step()
    again = make_request("r", 3, request_id=f"again{HUGE}")
    engine.scheduler.on_new_request(again)
    assert engine.match(again) == (48, True)
    engine.close()
    assert all(len(line) < 2_000 and "forged" not in line for line in said())
