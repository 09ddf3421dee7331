"""A request's use goes from the planner through real tiers to policy, admissions and tiers.

Goal: each call that a request causes is told that request. Method: a policy, admissions and tiers
that write down what they are told, over a planner; the answers of the data plane are the test's.
"""

from contextlib import contextmanager

import pytest
from waiting import within_seconds
from written_plug_in import write_plug_in

from tierstore import Manifest, load_config, make_offload_keys
from tierstore.clock import MonotonicClock
from tierstore.layout import PAGE_BYTES
from tierstore.metrics import Counters
from tierstore.planner import EngineStep, FullTable, LoadTarget, OffloadPlanner, Progress
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.testing.spread import spread_hashes
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.opening import open_stack
from tierstore.transfer import Demote, FailureReason, Load, Offload, TransferDone

SLOT_COUNT = 4
MANIFEST = Manifest.simple("m", chunk_bytes=PAGE_BYTES)

POLICY = """
from tierstore.policy.lru import LruPolicy

heard = []

class Recorder(LruPolicy):
    needs_use = {needs_use}

    def insert(self, keys, slots, use):
        heard.append(("insert", list(keys), use))
        super().insert(keys, slots, use)

    def touch(self, keys, use):
        heard.append(("touch", list(keys), use))
        super().touch(keys, use)

    def evict(self, plan):
        heard.append(("evict", list(plan.incoming), plan.use))
        return super().evict(plan)

def make(capacity_chunks):
    return Recorder()
"""

ADMISSION = """
from tierstore.tier.admission.write_through import WriteThrough

heard = []

class make(WriteThrough):
    needs_use = {needs_use}

    def __init__(self, *, tier):
        self._tier = tier

    def on_resident(self, keys, use):
        heard.append((self._tier, "resident", list(keys), use))
        return keys

    def on_touched(self, keys, use):
        heard.append((self._tier, "touched", list(keys), use))
        return ()

    def on_promoted(self, keys, use):
        heard.append((self._tier, "promoted", list(keys), use))
"""


def hashes(name, count):
    return spread_hashes((name, number) for number in range(count))


def keys(name, *numbers):
    named = hashes(name, 1 + max(numbers))
    return make_offload_keys(MANIFEST.namespace, 0, [named[number] for number in numbers])


def tail_first(name, *numbers):
    return keys(name, *numbers)[::-1]


def use(request_id, depth=0, **fields):
    return UseContext.of(request_id, depth=depth, **fields)


class ToldTier(DiskTier):
    """A tier on disk that writes down for whom records are placed and touched."""

    def __init__(self, *given, heard, tier_idx, **named):
        super().__init__(*given, tier_idx=tier_idx, **named)
        self._heard, self._tier_idx = heard, tier_idx

    def request_places(self, ticket, keys, payload_bytes, use=UNKNOWN_USE):
        self._heard.append((self._tier_idx, "places", list(keys), use))
        super().request_places(ticket, keys, payload_bytes, use)

    def touch(self, keys, *, use=UNKNOWN_USE):
        self._heard.append((self._tier_idx, "touch", list(keys), use))
        super().touch(keys, use=use)


class Engine:
    """A planner over tiers, and the steps and answers of an engine."""

    def __init__(self, stack, *heard):
        self.stack = stack
        self._heard = heard
        self.planner = OffloadPlanner(
            MANIFEST.group_specs(),
            MANIFEST.namespace,
            stack,
            hash_tokens=1,
            counters=Counters(),
            clock=MonotonicClock(),
        )

    def step(self, kind, **changes):
        """Plan a step; return its commands of one kind, and answer the others."""
        wanted = []
        for command in self.planner.plan_step(EngineStep(**changes)).plan.commands:
            if isinstance(command, kind):
                wanted.append(command)
            else:
                self.answer(command)
        return wanted

    def answer(self, command, **failed):
        self.planner.complete(TransferDone(job_id=command.job_id, ok=not failed, **failed))

    def compute(self, **ready):
        """Let new requests compute so many chunks in one step; return their offloads."""
        tables, progress = [], []
        for name, (computed, count) in ready.items():
            tables.append(FullTable(name, [list(range(1, count + 1))], computed))
            progress.append(Progress(name, computed, count))
        return self.step(Offload, full_tables=tables, progress=progress)

    def store(self, name, count):
        """Let an unknown request store chunks, and let them go down."""
        self.planner.add_request(name, hashes(name, count))
        for offload in self.compute(**{name: (0, count)}):
            self.answer(offload)
        self.planner.finish_request(name)
        self.settle()
        self.take()

    def settle(self):
        def is_idle():
            for demote in self.step(Demote):
                self.answer(demote)
            return not self.stack.has_work()

        assert within_seconds(is_idle)

    def load(self, name, count, local=0):
        """Promise a hit and begin its load."""
        # The engine computes one token at least.
        assert self.planner.match(name, local, count + 1).token_count == count - local
        target = LoadTarget(local, count, {0: list(range(local + 1, count + 1))})
        assert self.planner.begin_load(name, target) is not None
        (load,) = self.step(Load)
        return load

    def take(self):
        """Return what policy, admissions and tiers were told since the last call."""
        taken = tuple(heard[:] for heard in self._heard)
        for heard in self._heard:
            heard.clear()
        return taken


@pytest.fixture
def opened(tmp_path, monkeypatch):
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(group, kind, source, *, needs_use):
        name = f"{kind}_{tmp_path.name}"
        source = source.format(needs_use=needs_use)
        value = write_plug_in(folder, group, name, source, attribute="make")
        return name, __import__(value.partition(":")[0]).heard

    @contextmanager
    def opened(tier_count=1, *, needs_use=True):
        eviction, told_policy = install("tierstore.policies", "policy", POLICY, needs_use=needs_use)
        cascade, told_admissions = install(
            "tierstore.admissions", "admission", ADMISSION, needs_use=needs_use
        )
        told_tiers = []
        disks = [
            {"name": f"d{i}", "backend": "file", "path": str(tmp_path / f"d{i}")}
            | {"capacity": "16MiB", "cascade": cascade, "cascade_options": {"tier": i}}
            for i in range(tier_count)
        ]
        memory = {"capacity": f"{SLOT_COUNT * PAGE_BYTES}B", "eviction": eviction}
        stack = open_stack(
            load_config({"primary": memory, "secondary": disks}),
            MANIFEST,
            rank_count=1,
            counters=Counters(),
            make_tier=lambda *given, **named: ToldTier(*given, heard=told_tiers, **named),
        )
        engine = Engine(stack, told_policy, told_admissions, told_tiers)
        yield engine
        assert engine.planner.check() == []
        assert stack.check() == []
        stack.close()

    return opened


def test_two_requests_that_store_in_one_step_are_told_apart(opened):
    with opened() as engine:
        a, b = use("a", priority=3), use("b", priority=-1, hints=(("kind", "agent"),))
        engine.planner.add_request("a", hashes("x", 2), UseContext(priority=3))
        engine.planner.add_request("b", hashes("y", 1), b)
        first, second = engine.compute(a=(0, 2), b=(0, 1))
        x, y = keys("x", 0, 1), keys("y", 0)
        assert engine.take() == ([("evict", x[::-1], a), ("evict", y, b)], [], [])
        engine.answer(second)
        engine.answer(first)
        policy, admission, tier = engine.take()
        assert policy == [("insert", y, b), ("insert", x[::-1], a)]
        assert admission == [(0, "resident", y, b), (0, "resident", x, a)]
        assert tier[0] == (0, "places", y, b)
        engine.settle()


def test_chunks_go_down_for_the_request_that_stored_them(opened):
    with opened(2) as engine:
        a = use("a", priority=3)
        engine.planner.add_request("a", hashes("x", 2), a)
        for offload in engine.compute(a=(0, 2)):
            engine.answer(offload)
        engine.settle()
        placed = {(tier, tuple(told), by) for tier, _, told, by in engine.take()[2]}
        # The write queue of each tier holds one chunk of so small a memory.
        assert placed == {(0, tuple(keys("x", 0)), a), (1, tuple(keys("x", 0)), a)}


def test_the_second_turn_of_a_conversation_is_told_as_such(opened):
    with opened() as engine:
        engine.store("x", 2)
        second = use("second", parent_id="first", turn=1)
        engine.planner.add_request("second", hashes("x", 3), second)
        load = engine.load("second", 2)
        assert engine.take() == ([], [], []), "nothing is used before it was loaded"
        engine.answer(load)
        old = keys("x", 0, 1)
        assert engine.take() == (
            [("touch", old[::-1], second)],
            [(0, "touched", old, second)],
            [(0, "touch", old[::-1], second)],
        )
        for offload in engine.compute(second=(2, 3)):
            engine.answer(offload)
        later = use("second", 2, parent_id="first", turn=1)
        policy, admission, tier = engine.take()
        assert policy == [("evict", keys("x", 2), later), ("insert", keys("x", 2), later)]
        assert admission == [(0, "resident", keys("x", 2), later)]
        assert tier == [(0, "places", keys("x", 2), later)]
        engine.settle()


def test_chunks_that_a_request_computed_behind_others_are_told_with_their_own_depth(opened):
    with opened() as engine:
        engine.store("x", 2)
        a = use("a", priority=3)
        engine.planner.add_request("a", hashes("x", 3), a)
        (offload,) = engine.compute(a=(0, 3))
        engine.answer(offload)
        deeper = use("a", 2, priority=3)
        policy, admission, _ = engine.take()
        assert policy == [
            ("touch", tail_first("x", 0, 1), a),
            ("evict", keys("x", 2), deeper),
            ("insert", keys("x", 2), deeper),
        ]
        assert admission == [
            (0, "touched", keys("x", 0, 1), a),
            (0, "resident", keys("x", 2), deeper),
        ]
        engine.settle()


def fill_memory(engine):
    for name in ("v", "w"):
        engine.store(name, SLOT_COUNT // 2)


def test_a_promote_is_told_with_the_request_that_waits_for_it(opened):
    with opened(2) as engine:
        engine.store("x", 1)
        fill_memory(engine)
        a = use("a", priority=3)
        engine.planner.add_request("a", hashes("x", 1), a)
        load = engine.load("a", 1)
        x = keys("x", 0)
        policy, admission, tier = engine.take()
        assert (policy, admission) == ([("evict", x, a)], [])
        engine.planner.finish_request("a")  # an abort changes nothing of what was begun for it
        engine.answer(load)
        policy, admission, tier = engine.take()
        assert policy == [("insert", x, a)]
        assert admission == [(0, "promoted", x, a), (1, "resident", x, a)]
        assert tier == [(1, "places", x, a), (0, "touch", x, a)]
        engine.settle()


def test_a_load_that_is_tried_again_is_told_with_the_same_request(opened):
    with opened(2) as engine:
        engine.store("x", 1)
        fill_memory(engine)
        a = use("a", priority=3)
        engine.planner.add_request("a", hashes("x", 1), a)
        engine.answer(engine.load("a", 1), failed={0: FailureReason.IO_ERROR})
        x = keys("x", 0)
        policy, admission, _ = engine.take()
        assert (policy, admission) == ([("evict", x, a)], [])
        engine.answer(engine.load("a", 1))
        policy, admission, tier = engine.take()
        assert policy == [("evict", x, a), ("insert", x, a)]
        assert admission == [(0, "resident", x, a), (1, "promoted", x, a)]
        assert (1, "touch", x, a) in tier
        engine.settle()


def test_where_neither_goes_by_uses_none_is_told(opened):
    with opened(needs_use=False) as engine:
        assert not engine.planner.needs_use
        for name, content in (("a", "x"), ("b", "y")):
            engine.planner.add_request(name, hashes(content, 2), use(name, priority=3))
        (offload,) = engine.compute(a=(0, 2), b=(0, 2))
        engine.answer(offload)
        engine.settle()
        engine.planner.add_request("c", hashes("x", 2), use("c"))
        engine.answer(engine.load("c", 2))
        told = engine.take()
        assert all(told)
        assert {call[-1] for heard in told for call in heard} == {UNKNOWN_USE}
        engine.settle()
