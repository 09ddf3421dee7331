"""KV cache events say what host memory holds, at every moment and nothing else."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from engine import EngineJob, Round, run_engine
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DTYPES, build_model
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tierstore import Manifest, make_offload_keys
from tierstore.config import load_config
from tierstore.metrics import Counters
from tierstore.tier.opening import open_stack
from tierstore.tier.residency import ResidencyLog
from tierstore_vllm.events import EventSource

CHUNK = 4096
SLOTS = 4
HASHES = [bytes([n]) * 32 for n in range(12)]


@given(st.lists(st.one_of(st.just("reset"), st.integers(0, 11)), max_size=40))
def test_a_listener_that_applies_all_events_knows_what_is_resident(actions: list) -> None:
    manifest = Manifest.simple("m", CHUNK)
    log = ResidencyLog()
    config = load_config({"primary": {"capacity": f"{SLOTS * CHUNK}B"}})
    stack = open_stack(config, manifest, rank_count=1, counters=Counters(), residency=log)
    source = EventSource(log, manifest.group_specs(), lambda named: named[:32])
    # Those of adapters have a digest behind vLLM's hash, of which listeners know nothing.
    named = [block_hash + b"digest" * (i % 2) for i, block_hash in enumerate(HASHES)]
    keys = make_offload_keys(manifest.namespace, 0, named)
    heard: set[object] = set()
    for action in actions:
        if action == "reset":
            stack.reset(manifest)
        else:
            reservation = stack.reserve_offload(0, keys[action : action + 2])
            failed = [0] if action == 3 and reservation.keys else []
            stack.finish_offload(reservation, failed=failed)
        for event in source.take():
            assert event.medium == "CPU"
            if isinstance(event, BlockStored):
                assert event.block_size == manifest.group_specs()[0].tokens_per_chunk
                assert heard.isdisjoint(event.block_hashes)
                heard.update(event.block_hashes)
            else:
                assert heard.issuperset(event.block_hashes)
                heard.difference_update(event.block_hashes)
        resident = {
            maybe_convert_block_hash(BlockHash(block_hash))
            for block_hash, key in zip(HASHES, keys, strict=True)
            if stack.match_prefix([key])
        }
        assert heard == resident
    stack.close()


def test_vllm_publishes_what_tierstore_holds(tmp_path) -> None:
    job = EngineJob(
        model=str(build_model("llama", tmp_path)),
        dtype=DTYPES["llama"],
        rounds={"cold": Round(prompts=[list(range(2, 202))])},
        config={"version": 1, "primary": {"capacity": "64MiB"}},
    )
    heard: dict[str | None, set[object]] = {}
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as listener,
        ThreadPoolExecutor(1) as threads,
    ):
        listener.subscribe("")
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        job.engine["kv_events_config"] = events
        run = threads.submit(run_engine, job, tmp_path)
        while listener.poll(500) or not run.done():
            if not listener.poll(0):
                continue
            batch = msgspec.msgpack.decode(listener.recv_multipart()[-1], type=KVEventBatch)
            for event in batch.events:
                if isinstance(event, BlockStored):
                    heard.setdefault(event.medium, set()).update(event.block_hashes)
        run.result()
    assert len(heard["CPU"]) == 200 // 32
    assert heard["CPU"] == heard["GPU"]
