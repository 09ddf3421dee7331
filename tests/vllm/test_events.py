"""KV cache events say what host memory and the disk hold, at every moment and nothing else.

Goal: a listener that believes them knows what the tiers hold, and from the tokens alone. Method: a
strict listener behind the tiers, through evictions, failed copies, promotions, resets and restarts;
and behind real vLLM, over its own publisher.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_listener import DISK, MEMORY, StrictListener
from lab import run_lab
from scenario import Scenario, tier_config
from tiny_models import DTYPES, build_model
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from tierstore import Manifest
from tierstore.clock import MonotonicClock
from tierstore.config import load_config
from tierstore.embedded.loop import PlaneLoop
from tierstore.executor import TransferExecutor
from tierstore.key import OffloadKey, make_offload_keys
from tierstore.layout import GroupKind
from tierstore.manifest import GroupManifest
from tierstore.metrics import Counters
from tierstore.tier.movement_log import Movement, MovementLog
from tierstore.tier.opening import open_stack
from tierstore.tier.reservation import ChunkState
from tierstore_vllm.kv_events.engine_words import EventGroup, describe_event_groups
from tierstore_vllm.kv_events.source import EventSource, TokenSpan
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.scheduler import SchedulerHalf

CHUNK_BYTES = 256 << 10
HASH_TOKENS = 4
SLOT_COUNT = 8
REQUEST_COUNT = 6
CHUNKS_PER_REQUEST = 4
DIGEST = b"0123456789abcdef"
ADAPTER = LoRARequest("poet", 1, "/adapters/poet")


def make_manifest(blocks_per_chunk: int) -> Manifest:
    """Describe two groups, whose blocks have two hashes each."""
    group = GroupManifest(
        kind=GroupKind.FULL,
        tokens_per_block=2 * HASH_TOKENS,
        layer_names=("layer",),
        page_bytes=(CHUNK_BYTES // blocks_per_chunk,),
    )
    return dataclasses.replace(
        Manifest.simple("m", CHUNK_BYTES),
        blocks_per_chunk=blocks_per_chunk,
        groups=(group, group),
    )


def make_requests(tokens_per_chunk: int, *, shared_tokens: int | None = None) -> list[Request]:
    """Make requests of vLLM: two share a prefix (two chunks), one has an adapter, one a salt."""
    shared_tokens = shared_tokens or 2 * tokens_per_chunk
    init_none_hash(sha256)
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    chosen = random.Random(8)
    length = CHUNKS_PER_REQUEST * tokens_per_chunk + 3
    prompts = [[chosen.randrange(50_000) for _ in range(length)] for _ in range(REQUEST_COUNT)]
    prompts[1][:shared_tokens] = prompts[0][:shared_tokens]
    prompts[3] = prompts[2]
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=ADAPTER if number == 3 else None,
            cache_salt="salt" if number == 4 else None,
            block_hasher=hasher,
        )
        for number, prompt in enumerate(prompts)
    ]


class Engine:
    """Tiers that requests store to and load from, as the scheduler half has them do."""

    def __init__(
        self, path: Path, blocks_per_chunk: int, cascade: str, capacities: Sequence[str]
    ) -> None:
        self.manifest = make_manifest(blocks_per_chunk)
        self.requests = make_requests(self.manifest.group_specs()[0].tokens_per_chunk)
        self.listener = StrictListener(HASH_TOKENS, {ADAPTER.lora_name: ADAPTER.lora_path})
        for request in self.requests:
            self.listener.learn(request.block_hashes)
        self._path = path
        disks = [
            {"name": f"d{i}", "backend": "file", "path": str(path / f"d{i}"), "capacity": capacity}
            for i, capacity in enumerate(capacities)
        ]
        self._config = load_config(
            {
                "primary": {"capacity": f"{SLOT_COUNT * CHUNK_BYTES}B", "eviction": "lru"},
                "secondary": [{**disk, "cascade": cascade} for disk in disks],
            }
        )
        self._is_reset = False
        self._epochs = itertools.count()
        self._open(self.manifest)

    def _open(self, manifest: Manifest) -> None:
        self._named = manifest
        log, counters = MovementLog(), Counters()
        self.stack = open_stack(
            self._config, manifest, rank_count=1, counters=counters, movements=log
        )
        self._executor = TransferExecutor.open(
            self._config, manifest, rank=0, rank_count=1, caches=None, counters=counters
        )
        self._loop = PlaneLoop(self.stack, self._executor, MonotonicClock())
        self._source = EventSource(
            log,
            manifest.group_specs(),
            manifest.namespace,
            hash_tokens=HASH_TOKENS,
            own_hash=lambda named: named.removesuffix(DIGEST),
        )

    def close(self) -> None:
        self._executor.close()
        self.stack.close()

    def keys(self, request: Request, group_idx: int, count: int) -> list[OffloadKey]:
        """Name the first chunks of a request, those of an adapter with a digest behind."""
        step = self.manifest.blocks_per_chunk * 2
        hashes = request.block_hashes[step - 1 :: step][:count]
        behind = DIGEST if request.lora_request else b""
        return make_offload_keys(self._named.namespace, group_idx, [h + behind for h in hashes])

    def store(self, request: Request, group_idx: int, count: int, *, fails: bool) -> None:
        reservation = self.stack.reserve_offload(group_idx, self.keys(request, group_idx, count))
        self._describe(request)
        failed = [0] if fails and reservation.keys else []
        self.stack.finish_offload(reservation, failed)

    def load(self, request: Request, group_idx: int, count: int) -> None:
        wanted = [(group_idx, self.keys(request, group_idx, count))]
        reservation = self.stack.reserve_load(wanted, partial=True)
        self._describe(request)
        if reservation is not None:
            load = self._loop.start_load(reservation)
            self._loop.wait_for(load)
            self._loop.finish_load(load)

    def _describe(self, request: Request) -> None:
        self._source.describe([TokenSpan(request, request.num_tokens, request.num_tokens)])

    def reset(self) -> None:
        """Reset vLLM's own pool, then the tiers, with events that nobody has taken yet."""
        self._is_reset = True
        self.listener.take(AllBlocksCleared())
        self._named = self.manifest.in_epoch(f"epoch {next(self._epochs)}")
        self.stack.reset(self._named)
        self._source.reset(self._named.namespace)

    def restart(self, model: str = "m") -> None:
        """Start an engine anew, perhaps with another model; its listener is another one then."""
        self.hear()
        self.close()
        self.listener.restart()
        if self._is_reset:  # what an epoch has recorded is nobody's
            self.listener.take(AllBlocksCleared())
        self._is_reset = False
        if model != self.manifest.model:
            self.listener.take(AllBlocksCleared())
            self.manifest = dataclasses.replace(self.manifest, model=model)
        self._open(self.manifest)

    def damage(self) -> None:
        """Overwrite all records."""
        self.hear()
        for segment in self._path.glob("d*/rank0/*.seg"):
            with segment.open("r+b") as file:
                file.write(b"\1" * segment.stat().st_size)

    def hear(self) -> None:
        """Tell the listener, once what was begun has ended."""
        self.settle()
        for event in self._source.take():
            self.listener.take(event)

    def settle(self) -> None:
        """Let what was begun end."""
        assert self._loop.settle(lambda: not self.stack.has_work(), 60)
        assert all(secondary.wait(60) for secondary in self.stack.secondaries)
        self._loop.pump()

    def truth(self) -> tuple[set[tuple[int, Any]], set[tuple[int, Any]]]:
        """Return the blocks in memory and those on disk, in any tier."""
        memory = self._blocks_where(
            lambda keys: [state is ChunkState.RESIDENT for state in self.stack.states(keys)]
        )
        return memory, set().union(*(self.recorded(i) for i in range(len(self.stack.secondaries))))

    def recorded(self, tier_idx: int) -> set[tuple[int, Any]]:
        """Return the blocks that a tier has on disk."""
        tier = self.stack.secondaries[tier_idx]
        return self._blocks_where(lambda keys: [p is not None for p in tier.locate(keys)])

    def _blocks_where(
        self, are_there: Callable[[list[OffloadKey]], list[bool]]
    ) -> set[tuple[int, Any]]:
        found = set()
        step = self.manifest.blocks_per_chunk * 2
        for request, group_idx in itertools.product(self.requests, (0, 1)):
            for i, is_there in enumerate(
                are_there(self.keys(request, group_idx, CHUNKS_PER_REQUEST))
            ):
                hashes = request.block_hashes[i * step + 1 : (i + 1) * step : 2]
                blocks = {(group_idx, maybe_convert_block_hash(BlockHash(h))) for h in hashes}
                found |= blocks if is_there else set()
        return found


@contextmanager
def opened(
    blocks_per_chunk: int = 1,
    cascade: str = "write_through",
    capacities: Sequence[str] = ("8MiB",),
) -> Iterator[Engine]:
    with TemporaryDirectory() as folder:
        engine = Engine(Path(folder), blocks_per_chunk, cascade, capacities)
        yield engine
        engine.close()


def assert_listener_knows(engine: Engine) -> None:
    engine.hear()
    memory, disk = engine.truth()
    assert engine.listener.blocks(MEMORY) == memory
    assert engine.listener.blocks(DISK) == disk


TRANSFERS = st.tuples(
    st.sampled_from(["store", "store", "load", "fail"]),
    st.integers(0, REQUEST_COUNT - 1),
    st.integers(0, 1),
    st.integers(1, CHUNKS_PER_REQUEST),
)
OTHERS = st.tuples(st.sampled_from(["reset", "restart", "hear"]))


@settings(max_examples=30)
@given(
    st.sampled_from([1, 2]),
    st.sampled_from(["write_through", "on_evict", "second_touch"]),
    st.lists(st.one_of(TRANSFERS, TRANSFERS, OTHERS), max_size=40),
)
def test_a_listener_that_applies_all_events_knows_what_the_tiers_hold(
    blocks_per_chunk: int, cascade: str, actions: list[tuple[Any, ...]]
) -> None:
    with opened(blocks_per_chunk, cascade) as engine:
        for action, *chosen in actions:
            if chosen:
                number, group_idx, count = chosen
                request = engine.requests[number]
                if action == "load":
                    engine.load(request, group_idx, count)
                else:
                    engine.store(request, group_idx, count, fails=action == "fail")
            else:
                getattr(engine, action)()
        assert_listener_knows(engine)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_chunks_that_are_evicted_from_either_medium_are_told(blocks_per_chunk: int) -> None:
    with opened(blocks_per_chunk) as engine:
        for request, group_idx in itertools.product(engine.requests, (0, 1)):
            engine.store(request, group_idx, CHUNKS_PER_REQUEST, fails=False)
            engine.hear()
        told = dict.fromkeys((MEMORY, DISK), 0)
        for event in engine.listener.stored:
            told[event.medium] += len(event.block_hashes)
        memory, disk = engine.truth()
        assert len(memory) == SLOT_COUNT * blocks_per_chunk < told[MEMORY]
        assert 0 < len(disk) < told[DISK]
        assert_listener_knows(engine)
        assert engine.listener.unknown_removals == 0


def test_a_block_that_two_chunks_hold_is_gone_with_the_last_of_them() -> None:
    with opened(blocks_per_chunk=2) as engine:
        tokens_per_chunk = engine.manifest.group_specs()[0].tokens_per_chunk
        shared_tokens = 2 * tokens_per_chunk + tokens_per_chunk // 2
        engine.requests = make_requests(tokens_per_chunk, shared_tokens=shared_tokens)
        for number in (0, 1, 2, 1, 0, 4, 5, 0, 3, 1, 2, 5, 4, 3, 1, 0):
            engine.store(engine.requests[number], 0, CHUNKS_PER_REQUEST, fails=False)
            assert_listener_knows(engine)
        assert engine.listener.unknown_removals == 0


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("capacities", [("8MiB", "12MiB"), ("12MiB", "8MiB"), ("8MiB", "8MiB")])
def test_of_two_tiers_on_disk_each_tells_of_its_own_blocks(
    capacities: Sequence[str], blocks_per_chunk: int
) -> None:
    with opened(blocks_per_chunk, "write_through", capacities) as engine:
        tokens_per_chunk = engine.manifest.group_specs()[0].tokens_per_chunk
        shared_tokens = 2 * tokens_per_chunk + tokens_per_chunk // 2
        engine.requests = make_requests(tokens_per_chunk, shared_tokens=shared_tokens)
        for number, group_idx in itertools.product((0, 1, 2, 3, 4, 5, 1, 0), (0, 1)):
            engine.store(engine.requests[number], group_idx, CHUNKS_PER_REQUEST, fails=False)
            assert_listener_knows(engine)
            for tier_idx in range(2):
                told = engine.listener.held.get(f"{DISK}/d{tier_idx}", set())
                assert told == engine.recorded(tier_idx)
        assert engine.listener.unknown_removals == 0


def test_what_an_earlier_process_recorded_comes_to_memory_with_its_tokens_and_leaves_the_disk() -> (
    None
):
    with opened() as engine:
        first, _, *others = engine.requests
        engine.store(first, 0, 2, fails=False)
        engine.restart()
        assert len(engine.listener.blocks(DISK)) == 2
        engine.listener.stored.clear()
        engine.load(first, 0, 2)
        engine.hear()
        assert [event.medium for event in engine.listener.stored] == [MEMORY]
        for request, group_idx in itertools.product(others, (0, 1)):
            engine.store(request, group_idx, CHUNKS_PER_REQUEST, fails=False)
            engine.hear()
        assert engine.stack.states(engine.keys(first, 0, 2)) == [ChunkState.ABSENT] * 2
        assert_listener_knows(engine)


def test_records_that_turn_out_worthless_are_told() -> None:
    with opened() as engine:
        first = engine.requests[0]
        engine.store(first, 0, 2, fails=False)
        engine.damage()
        engine.restart()
        assert len(engine.listener.blocks(DISK)) == 2
        engine.load(first, 0, 2)
        assert_listener_knows(engine)
        assert engine.stack.states(engine.keys(first, 0, 2)) == [ChunkState.ABSENT] * 2


def test_what_was_recorded_before_a_reset_is_not_told_after_it() -> None:
    with opened() as engine:
        engine.store(engine.requests[0], 0, 2, fails=False)
        engine.settle()
        engine.reset()
        assert_listener_knows(engine)
        assert engine.listener.held.get(DISK) is None
        assert not engine.listener.blocks(MEMORY)


def test_records_of_another_model_that_are_evicted_are_not_told_as_own() -> None:
    with opened() as engine:
        first, *others = engine.requests
        engine.store(first, 0, 4, fails=False)
        engine.restart(model="another")
        for request, group_idx in itertools.product([first, *others], (0, 1)):
            engine.store(request, group_idx, CHUNKS_PER_REQUEST, fails=False)
            assert_listener_knows(engine)


def kv_cache_config() -> SimpleNamespace:
    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


@pytest.mark.parametrize("enabled", [None, False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_events_are_published_if_both_configurations_say_so(
    caplog: pytest.LogCaptureFixture,
    *,
    enabled: bool | None,
    wanted: bool,
) -> None:
    config = load_config({"primary": {"capacity": "1MiB"}, "offload": {"events": wanted}})
    publisher = None if enabled is None else SimpleNamespace(enable_kv_cache_events=enabled)
    vllm_config: Any = SimpleNamespace(kv_events_config=publisher)
    groups = describe_event_groups(config, vllm_config, kv_cache_config())
    expected = (EventGroup("sliding_window", 64),) if enabled and wanted else None
    assert groups == expected
    assert ("offload.events" in caplog.text) is (wanted and not enabled)


class BrokenLog(MovementLog):
    """A log that cannot be read."""

    def take(self) -> list[Movement]:
        raise RuntimeError("broken")


def test_events_that_fail_end_and_the_cache_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    manifest = make_manifest(1)
    config = load_config({"primary": {"capacity": "4MiB"}})
    log, counters = BrokenLog(), Counters()
    stack = open_stack(config, manifest, rank_count=1, counters=counters, movements=log)
    shape = EngineShape(rank_count=1, hash_block_tokens=HASH_TOKENS, alignment_tokens=HASH_TOKENS)
    half = SchedulerHalf(stack, manifest, shape, counters, config=config.offload, movements=log)
    request = make_requests(2 * HASH_TOKENS)[0]
    for _ in range(20):
        assert list(half.take_events()) == []
        half.on_new_request(request)
        assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    assert half.reset_cache()
    assert not half.has_given_up
    assert caplog.text.count("KV cache events end") == 1
    key = make_offload_keys(manifest.namespace, 0, [bytes(32)])
    stack.finish_offload(stack.reserve_offload(0, key))
    assert log.take_undescribed() == []
    half.close()


@pytest.mark.vllm
def test_a_listener_of_real_vllm_knows_what_the_tiers_hold(tmp_path: Path) -> None:
    scenario = Scenario(build_model("llama", tmp_path), DTYPES["llama"], 32)
    config = tier_config("file", tmp_path / "tier", events=True)
    config["primary"]["capacity"] = "2MiB"
    job = {
        "model": str(scenario.model),
        "dtype": scenario.dtype,
        "config": config,
        "prompts": [prompt for prompt in scenario.first if len(prompt) >= 300],
        "hash_tokens": 32,
    }
    found = run_lab("listening.py", "run", job, tmp_path)
    assert found.pop("problems") == []
    for phase, state in found.items():
        assert not state["wrong in memory"], (phase, state)
        assert not state["wrong on disk"], (phase, state)
    assert found["promotions"]["told"].get(MEMORY), "nothing came to memory"
    assert found["restart"]["told"].get(MEMORY), "nothing came to memory after the restart"
    assert found["reset"]["on disk"] < found["restart"]["on disk"]
    assert found["evictions"]["on disk"] > found["evictions"]["in memory"] > 0
