"""An engine small enough to know what every block must hold: the opponent of the planner.

Copies are lazy: an offload reads its blocks when it is answered, or when a fence forces it to,
and a load writes its blocks when it is answered. So a missing fence shows as wrong bytes in a slot.
Freed blocks are handed out again at once.

Like vLLM's scheduler with asynchronous outputs or speculation, it may know a state only one or
two steps after it was computed (`hash_lag`), keep it for the next allocation to free, and offer it
in the very step in which that allocation hands its block out. A decoding request may be given
several tokens at once (`accepted`), whose boundary then lies inside a step.
"""

from dataclasses import dataclass, field

from reference_stack import ReferenceStack

from tierstore.key import get_offload_block_hash, get_offload_group_idx, get_offload_namespace
from tierstore.layout import GroupKind, GroupSpec
from tierstore.manifest import Manifest
from tierstore.metrics import Counters
from tierstore.planner import (
    EngineStep,
    FullTable,
    LastTable,
    LoadTarget,
    NewBlocks,
    OffloadPlanner,
    Progress,
    StateBlock,
)
from tierstore.planner.wait import WAIT_SECONDS_MAX
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import FailureReason, Load, Offload, TransferDone

HASH_TOKENS, STATE_TOKENS, ALIGNMENT = 4, 8, 16
FULL, WINDOW, STATE = 0, 1, 2
BLOCK_TOKENS = (4, 4, 8)
WINDOW_TOKENS = 10
STEP_TOKENS_MAX = 16


def _spec(group_idx, kind, blocks_per_chunk, window_tokens=0):
    return GroupSpec(
        group_idx=group_idx,
        kind=kind,
        tokens_per_block=BLOCK_TOKENS[group_idx],
        blocks_per_chunk=blocks_per_chunk,
        chunk_bytes=1,
        window_tokens=window_tokens,
    )


SPECS = (
    _spec(FULL, GroupKind.FULL, 2),
    _spec(WINDOW, GroupKind.SLIDING_WINDOW, 4, WINDOW_TOKENS),
    _spec(STATE, GroupKind.STATE, 1),
)


@dataclass
class Request:
    name: str
    tokens: bytes
    hashes: list = field(default_factory=list)
    computed: int = 0
    tables: list = field(default_factory=lambda: [[], [], []])
    status: str = "waiting"
    is_new: bool = True
    run: object = None
    """Another one each time that the request starts anew."""
    weights: int = 0
    """Of the oldest KV that its KV comes after."""

    def hash_blocks(self):
        for end in range((len(self.hashes) + 1) * HASH_TOKENS, len(self.tokens) + 1, HASH_TOKENS):
            self.hashes.append(b"hashed: " + self.tokens[:end])


class AskedClock:
    """Goes on with each question."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        self.now += WAIT_SECONDS_MAX / 32
        return self.now


class SmallEngine:
    def __init__(self, block_count, *, hash_lag=0, accepted=1, slot_count=None):
        self.stack = ReferenceStack(slot_count)
        self.hash_lag = hash_lag
        self.accepted = accepted
        self.computed_states = []  # (step in which it is hashed, request's run, state)
        self.hashed_states = []  # (request's run, state): offered in the next step
        self.step_count = 0
        self.states_offered_late = 0
        self.manifest = Manifest.simple("m", 1)
        self.planner = OffloadPlanner(
            SPECS,
            self.manifest.namespace,
            self.stack,
            hash_tokens=HASH_TOKENS,
            counters=Counters(),
            clock=AskedClock(),
        )
        self.free = list(range(1, block_count + 1))
        self.block_count = block_count
        self.memory = {}
        self.slots = {}
        self.records = {}
        self.requests = {}
        self.unread = {}  # offloads that were submitted and have not read their blocks yet
        self.jobs = {}
        self.loaders = {}
        self.failed = []
        self.names = 0
        self.weights = 0
        self.loads_verified = 0

    # What the tests do.

    def add(self, tokens):
        self.names += 1
        request = Request(f"r{self.names}", tokens, run=object())
        request.hash_blocks()
        self.requests[request.name] = request
        self.planner.add_request(request.name, request.hashes)

    def abort(self, name):
        """Let a request end, now or when its load has come; blocks are handed out again at once."""
        request = self.requests[name]
        # The KV of the newest token is never counted on: it may have been sampled alone.
        ready_tokens = min(request.computed, len(request.tokens) - 1)
        last = LastTable([list(table) for table in request.tables], ready_tokens)
        self.planner.finish_request(name, last)
        if request.status == "loading":
            request.status = "aborted"
        else:
            self._release(request)
            del self.requests[name]

    def change_weights(self):
        self.weights += 1
        self.manifest = self.manifest.in_epoch(str(self.weights))
        self.planner.reset(self.manifest)

    def step(self, count=1):
        for _ in range(count):
            self._step()

    def answer_all(self):
        for job_id in list(self.jobs):
            self.answer(job_id, ok=True)

    def _step(self):
        for name in self.failed:
            self._recompute(name)
        self.failed = []
        self.preempted, self.new_blocks, self.scheduled = [], [], {}
        full_tables = []
        for request in list(self.requests.values()):
            if request.status == "running":
                self._schedule(request)
        if not self.preempted:
            for request in list(self.requests.values()):
                if request.status in ("waiting", "loaded"):
                    self._admit(request)
        for name, count in self.scheduled.items():
            request = self.requests[name]
            if request.is_new:
                tables = [list(table) for table in request.tables]
                full_tables.append(FullTable(name, tables, request.computed))
                request.is_new = False
            self._expect_state(request, request.computed + count)
        self._hash_states(0)
        state_blocks = self._take_hashed_states()
        planned = self.planner.plan_step(
            EngineStep(
                full_tables=full_tables,
                new_blocks=self.new_blocks,
                progress=[
                    self._progress(self.requests[n], count) for n, count in self.scheduled.items()
                ],
                state_blocks=state_blocks,
                preempted=self.preempted,
            )
        )
        self._run(planned)
        self.step_count += 1
        self._hash_states(1)

    def answer(self, job_id, *, ok):
        command = self.jobs.pop(job_id)
        if isinstance(command, Offload):
            self._read(job_id)
            failed = {} if ok else {0: FailureReason.IO_ERROR}
            self.planner.complete(TransferDone(job_id=job_id, ok=ok, failed=failed))
            self._verify_residents()
        else:
            self._finish_load(job_id, command, ok=ok)

    def evict(self, key, *, record):
        if self.stack.states.get(key) is ChunkState.RESIDENT and not self.stack.pins.get(key):
            self.stack.evict([key])
            if record:
                self.stack.states[key] = ChunkState.RECORDED

    def drain(self):
        while self.jobs or self.requests or self.failed or self.planner.has_work():
            for job_id in list(self.jobs):
                self.answer(job_id, ok=True)
            for name in list(self.requests):
                self.abort(name)
            self.step()
        assert self.planner.check() == []
        assert self.stack.leaks() == []
        assert sorted(self.free) == list(range(1, self.block_count + 1))

    # The engine's own business.

    def _progress(self, request, count):
        """With outputs that come late, what was sampled last is not known to the plan."""
        known_tokens = len(request.tokens) - (self.accepted if self.hash_lag else 0)
        ready_tokens = min(request.computed + count, known_tokens)
        return Progress(request.name, request.computed, ready_tokens)

    def _expect_state(self, request, end):
        boundary = end - end % STATE_TOKENS
        if boundary > request.computed:
            block = request.tables[STATE][boundary // STATE_TOKENS - 1]
            state = StateBlock(request.name, STATE, block, boundary)
            self.computed_states.append((self.step_count + self.hash_lag, request.run, state))

    def _hash_states(self, lag_min):
        """Hash what an allocation (0) or the outputs before the next one (1) make known."""
        for entry in list(self.computed_states):
            due, run, state = entry
            if self.hash_lag >= lag_min and due <= self.step_count:
                self.computed_states.remove(entry)
                request = self.requests.get(state.request_id)
                index = state.boundary_tokens // STATE_TOKENS - 1
                if request and request.run is run and request.tables[STATE][index]:
                    self.hashed_states.append((run, state))

    def _take_hashed_states(self):
        taken, self.hashed_states = self.hashed_states, []
        offered = []
        for run, state in taken:
            request = self.requests.get(state.request_id)
            if request and request.run is run:
                offered.append(state)
                self.states_offered_late += state.boundary_tokens <= request.computed
        return offered

    def _take(self, count):
        if len(self.free) < count:
            return None
        return [self.free.pop() for _ in range(count)]

    def _release(self, request):
        for table in request.tables:
            self.free.extend(block for block in table if block)
        request.tables = [[], [], []]
        request.computed = 0
        request.run = object()
        request.is_new = True

    def _recompute(self, name):
        request = self.requests[name]
        self._release(request)
        if request.status == "aborted":
            del self.requests[name]
        else:
            request.status = "waiting"

    def _schedule(self, request):
        if request.computed == len(request.tokens):
            for _ in range(self.accepted):
                request.tokens += bytes([request.tokens[-1] % 250 + 1])
            request.hash_blocks()
        boundary = (request.computed // STATE_TOKENS + 1) * STATE_TOKENS
        count = min(STEP_TOKENS_MAX, len(request.tokens) - request.computed)
        if count > self.accepted and request.computed + count > boundary:
            count -= (request.computed + count) % STATE_TOKENS
        if not self._grow(request, request.computed + count):
            self._release(request)
            request.status = "waiting"
            self.preempted.append(request.name)
            return False
        self.scheduled[request.name] = count
        return True

    def _grow(self, request, end):
        skipped = max(0, request.computed - WINDOW_TOKENS) // BLOCK_TOKENS[WINDOW]
        for i, block in enumerate(request.tables[WINDOW][:skipped]):
            if block:
                self.free.append(block)
                request.tables[WINDOW][i] = 0
        # The newest state is what the next one is computed from.
        for i in range(-(-request.computed // STATE_TOKENS) - 1):
            if request.tables[STATE][i]:
                self.free.append(request.tables[STATE][i])
                request.tables[STATE][i] = 0
        added = []
        for group_idx in (FULL, WINDOW, STATE):
            table = request.tables[group_idx]
            missing = -(-end // BLOCK_TOKENS[group_idx]) - len(table)
            nulls = 0
            if group_idx == STATE and end - request.computed > self.accepted:
                nulls = max(missing - 1, 0)
            blocks = self._take(missing - nulls if missing > 0 else 0)
            if blocks is None:
                return False
            added.append([0] * nulls + blocks)
            table.extend(added[-1])
        if any(added) and not request.is_new:
            self.new_blocks.append(NewBlocks(request.name, added))
        return True

    def _admit(self, request):
        if request.status == "waiting":
            answer = self.planner.match(request.name, 0, len(request.tokens))
            for _ in range(3):
                self.planner.match(request.name, 0, len(request.tokens))
            if answer.ask_again:
                return
            if answer.token_count:
                self._begin_load(request, answer.token_count)
                return
        request.is_new = True
        if self._schedule(request):
            request.status = "running"

    def _begin_load(self, request, hit):
        assert hit % ALIGNMENT == 0
        assert 0 < hit < len(request.tokens)
        skipped = max(0, hit - WINDOW_TOKENS) // BLOCK_TOKENS[WINDOW]
        nulls = (0, skipped, hit // BLOCK_TOKENS[STATE] - 1)
        counts = [hit // size - null for size, null in zip(BLOCK_TOKENS, nulls, strict=True)]
        blocks = self._take(sum(counts))
        if blocks is None:
            return
        for group_idx, (null, count) in enumerate(zip(nulls, counts, strict=True)):
            request.tables[group_idx] = [0] * null + [blocks.pop() for _ in range(count)]
        request.computed = hit
        request.weights = self.weights
        request.status = "loading"
        target = LoadTarget(0, hit, {i: list(table) for i, table in enumerate(request.tables)})
        promoted_tokens = self.planner.begin_load(request.name, target)
        assert (promoted_tokens is None) == self.stack.refuses_loads, "a promise was broken"

    def _run(self, planned):
        for job_id in planned.plan.fence_job_ids:
            self._read(job_id)
        self.failed.extend(planned.failed_requests)
        for command in planned.plan.commands:
            if isinstance(command, Load):
                self.jobs[command.job_id] = command
                self.loaders[command.job_id] = planned.load_requests[command.job_id]
        self._compute()
        for command in planned.plan.commands:
            if isinstance(command, Offload):
                self.jobs[command.job_id] = self.unread[command.job_id] = command

    def _compute(self):
        for name, count in self.scheduled.items():
            request = self.requests[name]
            start, request.computed = request.computed, request.computed + count
            if start == 0:
                request.weights = self.weights
            for group_idx, size in enumerate(BLOCK_TOKENS):
                for i in range(start // size, -(-request.computed // size)):
                    end = min((i + 1) * size, request.computed)
                    block = request.tables[group_idx][i]
                    if block:
                        self.memory[block] = (group_idx, request.tokens[:end], request.weights)

    def _read(self, job_id):
        command = self.unread.pop(job_id, None)
        if command is not None:
            for row, slot in zip(command.block_ids.tolist(), command.slots.tolist(), strict=True):
                self.slots[slot] = [self.memory[block] for block in row]

    def _finish_load(self, job_id, load, *, ok):
        request = self.requests[self.loaders.pop(job_id)]
        for promote in load.promotes:
            for key, slot in zip(promote.keys, promote.slots.tolist(), strict=True):
                self.slots[slot] = self.records[key]
        for part in load.parts:
            for row, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
                for block, content in zip(row, self.slots[slot], strict=True):
                    if block >= 0:
                        self.memory[block] = content if ok else "torn"
        promoted_count = sum(len(promote.keys) for promote in load.promotes)
        # Of a load from the tiers one chunk is lost, and the others arrive.
        lost = {} if ok or not promoted_count else {promoted_count // 2: FailureReason.CORRUPT}
        self.planner.complete(TransferDone(job_id=job_id, ok=ok, failed=lost))
        if not ok or request.status == "aborted":
            self._recompute(request.name)
            return
        self._verify_hit(request)
        request.status = "loaded"

    def _verify_hit(self, request):
        """Every position that the next token depends on must hold its own bytes."""
        hit = request.computed
        needed = {
            FULL: range(hit),
            WINDOW: range(max(0, hit - WINDOW_TOKENS), hit),
            STATE: [hit - 1],
        }
        for group_idx, positions in needed.items():
            size = BLOCK_TOKENS[group_idx]
            for i in {position // size for position in positions}:
                block = request.tables[group_idx][i]
                content = (group_idx, request.tokens[: (i + 1) * size], request.weights)
                assert self.memory[block] == content
        self.loads_verified += 1

    def _verify_residents(self):
        for key, state in self.stack.states.items():
            if state is ChunkState.RESIDENT:
                assert get_offload_namespace(key) == self.manifest.namespace
                group_idx = get_offload_group_idx(key)
                prefix = get_offload_block_hash(key).removeprefix(b"hashed: ")
                size, count = BLOCK_TOKENS[group_idx], SPECS[group_idx].blocks_per_chunk
                ends = range(len(prefix) - size * (count - 1), len(prefix) + 1, size)
                expected = [(group_idx, prefix[:end], self.weights) for end in ends]
                assert self.slots[self.stack.slots[key]] == expected, (key, state)
                self.records[key] = expected
