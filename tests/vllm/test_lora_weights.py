"""No chunk is ever found by weights other than those that computed it, whatever is loaded when.

Goal: adapters are reloaded in place, moved, dropped and read again, their files change, requests
run through it, reports come late; each chunk in memory holds what the weights behind its key
compute, and a load brings nothing else. Method: a model of an engine, in which the KV of a token is
the list of the weights that computed it and all before it, drives the real scheduler half and the
real watch of each rank.
"""

import shutil
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from tierstore import Manifest
from tierstore.config import load_config
from tierstore.key import get_offload_block_hash
from tierstore.transfer import Load, Offload, TransferDone
from tierstore_vllm.layout import EngineShape
from tierstore_vllm.lora.watch import LoraWatch, digest_adapter, file_states
from tierstore_vllm.messages import RankAnswer, StepMetadata, WorkerReport
from tierstore_vllm.scheduler import SchedulerHalf

RANKS = (0, 1)
TOKENS = 5
"""Of each prompt; a block, and a chunk, is one token, and the last one is never cached."""
STEP_TOKENS = 2
VERSIONS = st.integers(1, 3)
NAMES = st.sampled_from("mn")
PATHS = st.sampled_from("pq")
CONFIG = SimpleNamespace(enable_tower_connector_lora=False)
Content = tuple[int, ...]


def make_model(version: int) -> LoRAModel:
    tensor = torch.full((1, 2), float(version))
    return LoRAModel(1, 1, {"layer": LoRALayerWeights("layer", 1, 1, tensor, tensor.T)})


def digest_of(version: int) -> bytes:
    """What stands behind the block hashes of these weights, on so many equal ranks."""
    request = LoRARequest("any", 1, "any")
    return xxhash.xxh3_128_digest(digest_adapter(request, make_model(version), CONFIG) * len(RANKS))


@dataclass
class Asked:
    """A request, as far as the connector looks at it."""

    request_id: str
    lora_request: LoRARequest
    block_hashes: list[bytes]
    num_tokens: int = TOKENS
    num_prompt_tokens: int = TOKENS
    num_computed_tokens: int = 0
    kv_transfer_params: None = None
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = field(default_factory=list)
    is_loading: bool = False
    is_admitted: bool = False


class Rank:
    """One worker's adapters."""

    def __init__(self, rank: int) -> None:
        self.loaded: dict[int, int] = {}
        self.watch = LoraWatch(CONFIG, rank)
        self._manager: Any = SimpleNamespace(lora_config=CONFIG, list_adapters=self.loaded.keys)

    def load(self, request: LoRARequest) -> None:
        before = file_states(request.lora_path)
        version = int((Path(request.lora_path) / "weights").read_text())
        self.watch.on_load(self._manager, request, make_model(version), before)
        self.loaded[request.lora_int_id] = version

    def use(self, request: LoRARequest) -> None:
        if request.lora_int_id not in self.loaded:
            self.load(request)
        self.watch.on_use(request)


class Engine(RuleBasedStateMachine):
    """Schedules like vLLM: a prefix cache by block hash, loads before computing, late reports."""

    @initialize(late=st.booleans())
    def open(self, late: bool) -> None:  # noqa: FBT001 - a drawn value
        self.folder = Path(tempfile.mkdtemp())
        self.late = late
        self.ranks = [Rank(rank) for rank in RANKS]
        self.half = SchedulerHalf.open(
            load_config({"primary": {"capacity": "4MiB"}}),
            Manifest.simple("m", 4096),
            EngineShape(rank_count=len(RANKS), hash_block_tokens=1, alignment_tokens=1),
        )
        self.served = {
            name: LoRARequest(name, number, str(self.folder / "p"))
            for number, name in enumerate("mn", 1)
        }
        self.requests: dict[str, Asked] = {}
        self.asked_count = 0
        self.kv: dict[int, Content] = {}
        self.cached: dict[bytes, int] = {}
        self.slots: dict[int, Content] = {}
        self.reports: deque[tuple[WorkerReport, dict[str, bool]]] = deque()
        for path, version in (("p", 1), ("q", 2)):
            self.write(path, version)
        for name in "mmnn":  # the first request loads the adapter, the second is stored
            self.ask(name, step_count=TOKENS)
            self.evict()

    def teardown(self) -> None:
        if hasattr(self, "half"):
            for _ in range(8):
                self.step()
            self.deliver_all()
            assert not self.half.has_given_up
            assert self.half.check() == []
            self.half.close()
            shutil.rmtree(self.folder)

    @rule(path=PATHS, version=VERSIONS)
    def write(self, path: str, version: int) -> None:
        (self.folder / path).mkdir(exist_ok=True)
        new = self.folder / "new"
        new.write_text(str(version))
        new.rename(self.folder / path / "weights")

    @rule(name=NAMES, path=PATHS)
    def reload(self, name: str, path: str) -> None:
        """Load in place, from the same path or another one."""
        number = self.served[name].lora_int_id
        self.served[name] = LoRARequest(name, number, str(self.folder / path))
        for rank in self.ranks:
            rank.load(self.served[name])

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        """Make room: the worker reads the adapter again when it needs it."""
        for rank in self.ranks:
            rank.loaded.pop(self.served[name].lora_int_id, None)

    @rule()
    def evict(self) -> None:
        """Let vLLM give its cached blocks to others: only tierstore can hit then."""
        self.cached.clear()

    @rule(name=NAMES, step_count=st.integers(0, 3))
    def ask(self, name: str, step_count: int) -> None:
        adapter = self.served[name]
        hashes = [
            f"{name}{Path(adapter.lora_path).name}{i}".encode().ljust(32) for i in range(TOKENS)
        ]
        request = Asked(f"r{self.asked_count}", adapter, hashes)
        self.asked_count += 1
        self.requests[request.request_id] = request
        self.half.on_new_request(request)
        for _ in range(step_count):
            self.step()

    @rule()
    def step(self) -> None:
        new, cached = [], []
        scheduled: dict[str, int] = {}
        for request in self.requests.values():
            if request.is_loading or not (request.is_admitted or self.admit(request)):
                continue
            tokens = min(STEP_TOKENS, TOKENS - request.num_computed_tokens)
            fresh = self.allocate(request, request.num_computed_tokens + tokens)
            (cached if request.is_admitted else new).append((request, fresh))
            request.is_admitted = True
            scheduled[request.request_id] = tokens
        metadata = self.half.build_connector_meta(self.output(new, cached, scheduled))
        self.reports.append(self.work(metadata, scheduled))
        self.finish(scheduled)
        while len(self.reports) > self.late:
            self.deliver()

    def admit(self, request: Asked) -> bool:
        """Find what is there of a request; say whether it is computed in this step."""
        local = 0
        while local < TOKENS - 1 and request.block_hashes[local] in self.cached:
            local += 1
        count, is_async = self.half.get_num_new_matched_tokens(request, local)
        if count is None:
            return False
        request.blocks = [self.cached[name] for name in request.block_hashes[:local]]
        request.num_computed_tokens = local
        self.allocate(request, local + count)
        if count:
            blocks = [
                SimpleNamespace(block_id=block, block_hash=b"" if i < local else None)
                for i, block in enumerate(request.blocks)
            ]
            allocated = SimpleNamespace(blocks=(blocks,))
            self.half.update_state_after_alloc(request, allocated, count)
            request.is_loading = True
            request.num_computed_tokens = local + count
        return not is_async

    def allocate(self, request: Asked, tokens: int) -> list[int]:
        fresh = list(range(len(self.kv) + 1, len(self.kv) + 1 + tokens - len(request.blocks)))
        self.kv.update(dict.fromkeys(fresh, ()))
        request.blocks += fresh
        return fresh

    def output(self, new: list[Any], cached: list[Any], scheduled: dict[str, int]) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=(list(request.blocks),),
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _ in cached],
                resumed_req_ids=set(),
                new_block_ids=[(fresh,) for _, fresh in cached],
                num_computed_tokens=[request.num_computed_tokens for request, _ in cached],
            ),
            num_scheduled_tokens=scheduled,
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
            preempted_req_ids=None,
        )

    def work(
        self, metadata: StepMetadata, scheduled: dict[str, int]
    ) -> tuple[WorkerReport, dict[str, bool]]:
        """Take the step in the workers: adapters, KV, then what the connector asks for."""
        running = [self.requests[name] for name in scheduled]
        for request in {r.lora_request.lora_int_id: r.lora_request for r in running}.values():
            for rank in self.ranks:
                rank.use(request)
        for request in running:
            self.compute(request, scheduled[request.request_id])
        if metadata.asks_for_adapters:
            for rank in self.ranks:
                rank.watch.tell_all()
        loaded: dict[str, bool] = {}
        report = WorkerReport(adapter_uses=self.ranks[0].watch.take())
        report.aggregate(WorkerReport(adapter_uses=self.ranks[1].watch.take()))
        for command in metadata.plan.commands:
            ok = self.move(command, metadata)
            for _ in RANKS:
                done = TransferDone(job_id=command.job_id, ok=ok, failed={})
                answer = WorkerReport({command.job_id: RankAnswer.of(done, again=False)})
                report.aggregate(answer)
            if isinstance(command, Load):
                loaded[metadata.load_requests[command.job_id]] = ok
        loaded.update(dict.fromkeys(metadata.failed_requests, False))
        return report, loaded

    def compute(self, request: Asked, tokens: int) -> None:
        version = self.ranks[0].loaded[request.lora_request.lora_int_id]
        first = request.num_computed_tokens
        for i in range(first, first + tokens):
            before = self.kv[request.blocks[i - 1]] if i else ()
            self.kv[request.blocks[i]] = (*before, version)

    def move(self, command: Any, metadata: StepMetadata) -> bool:
        if isinstance(command, Offload):
            for (block,), slot in zip(
                command.block_ids.tolist(), command.slots.tolist(), strict=True
            ):
                self.slots[slot] = self.kv[block]
            return True
        assert isinstance(command, Load)
        claim = metadata.claims[command.job_id]
        if not all(rank.watch.holds(claim) for rank in self.ranks):
            return False
        path = Path(claim.adapter.path) / "weights"
        on_disk = int(path.read_text())
        version = self.ranks[0].loaded.get(claim.lora_int_id, on_disk)
        for part in command.parts:
            for (block,), slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
                assert set(self.slots[slot]) == {version}
                self.kv[block] = self.slots[slot]
        return True

    def finish(self, scheduled: dict[str, int]) -> None:
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            self.remember(request)
            if request.num_computed_tokens == TOKENS:
                self.half.request_finished(self.requests.pop(name))

    def remember(self, request: Asked) -> None:
        for i in range(request.num_computed_tokens):
            self.cached.setdefault(request.block_hashes[i], request.blocks[i])

    def deliver(self) -> None:
        report, loaded = self.reports.popleft()
        self.half.take_report(report)
        for name, ok in loaded.items():
            request = self.requests[name]
            request.is_loading = False
            if ok:
                self.remember(request)
            else:
                request.num_computed_tokens = 0
                request.blocks = []

    def deliver_all(self) -> None:
        while self.reports:
            self.deliver()

    @precondition(lambda self: not self.requests)
    @rule()
    def reset(self) -> None:
        self.cached.clear()
        assert self.half.reset_cache()

    @invariant()
    def chunks_hold_what_the_weights_behind_their_keys_compute(self) -> None:
        if not hasattr(self, "half"):
            return
        primary = self.half._stack.primary
        keys = primary.coldest(len(primary))
        for key, slot in zip(keys, primary.locate(keys), strict=True):
            versions = set(self.slots[slot])
            assert len(versions) == 1
            assert get_offload_block_hash(key)[32:] == digest_of(versions.pop())


Engine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestEngine = Engine.TestCase
TestEngine.pytestmark = [pytest.mark.vllm]
