"""An engine small enough to know what every block must hold: the opponent of the planner.

Copies are lazy: an offload reads its blocks when it is answered, or when a fence forces it to,
and a load writes its blocks when it is answered. So a missing fence shows as wrong bytes in a slot.
Freed blocks are handed out again at once.

Like vLLM's scheduler with asynchronous outputs or speculation, it may know a state only one or
two steps after it was computed (`hash_lag`, see `late_states`). A decoding request may be given
several tokens at once (`accepted`), whose boundary then lies inside a step.
"""

from engine_request import (
    ALIGNMENT,
    BLOCK_TOKENS,
    FULL,
    HASH_TOKENS,
    SPECS,
    STATE,
    STATE_TOKENS,
    STEP_TOKENS_MAX,
    WINDOW,
    WINDOW_TOKENS,
    Request,
)
from held_bytes import HeldBytes
from late_states import LateStates
from reference_stack import ReferenceStack

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
)
from tierstore.planner.wait import WAIT_SECONDS_MAX
from tierstore.tier.reservation import ChunkState
from tierstore.transfer import FailureReason, Load, Offload, TransferDone


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
        self.states = LateStates(hash_lag)
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
        self.held = HeldBytes()
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
            self.states.compute(request, request.computed + count)
        self.states.hash_known(self.requests)
        state_blocks = self.states.take(self.requests)
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
        self.states.end_step(self.requests)

    def answer(self, job_id, *, ok):
        command = self.jobs.pop(job_id)
        if isinstance(command, Offload):
            self._read(job_id)
            failed = {} if ok else {0: FailureReason.IO_ERROR}
            self.planner.complete(TransferDone(job_id=job_id, ok=ok, failed=failed))
            self.held.verify_residents(self.stack, self.manifest.namespace, self.weights)
        else:
            self._finish_load(job_id, command, ok=ok)

    def evict(self, key, *, record):
        if self.stack.state_by_key.get(key) is ChunkState.RESIDENT and not self.stack.pins.get(key):
            self.stack.evict([key])
            if record:
                self.stack.state_by_key[key] = ChunkState.RECORDED

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
        for name, count in self.scheduled.items():
            request = self.requests[name]
            start, request.computed = request.computed, request.computed + count
            if start == 0:
                request.weights = self.weights
            self.held.compute(request, start)
        for command in planned.plan.commands:
            if isinstance(command, Offload):
                self.jobs[command.job_id] = self.unread[command.job_id] = command

    def _read(self, job_id):
        command = self.unread.pop(job_id, None)
        if command is not None:
            self.held.offload(command)

    def _finish_load(self, job_id, load, *, ok):
        request = self.requests[self.loaders.pop(job_id)]
        self.held.load(load, ok=ok)
        promoted_count = sum(len(promote.keys) for promote in load.promotes)
        # Of a load from the tiers one chunk is lost, and the others arrive.
        lost = {} if ok or not promoted_count else {promoted_count // 2: FailureReason.CORRUPT}
        self.planner.complete(TransferDone(job_id=job_id, ok=ok, failed=lost))
        if not ok or request.status == "aborted":
            self._recompute(request.name)
            return
        self.held.verify_hit(request)
        self.loads_verified += 1
        request.status = "loaded"
