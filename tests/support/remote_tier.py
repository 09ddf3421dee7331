"""A tier elsewhere: no catalog, existence asked asynchronously, eviction by the store.

`RemoteStore` is what would run on another machine: bytes by place, in an order of its own.
`RemoteTier` is the control half and `RemoteBackend` the data half; they share nothing but the
store, and a place is the name that the tier has given.
"""

import threading
import time
from collections import OrderedDict, deque
from contextlib import contextmanager, suppress

from tierstore.catalog.messages import take_all
from tierstore.errors import ClosedError
from tierstore.io_pool import Mailbox
from tierstore.policy.use import UNKNOWN_USE
from tierstore.tier.reservation import ChunkState
from tierstore.tier_events import Committed, Placed, Refused, SecondaryStats
from tierstore.transfer import FailureReason, Place

__all__ = ["RemoteBackend", "RemoteOpener", "RemoteStore", "RemoteTier"]

HOLD_SECONDS_MAX = 300
LOCATE_SECONDS = 0.2
KEPT_POLLS = 4


class RemoteStore:
    """Bytes by name; the least recently used go first. Thread-safe."""

    def __init__(self, capacity_count):
        self.capacity_count = capacity_count
        self.lock = threading.Lock()
        self.written = {}
        """Bytes, published or not."""
        self.published = OrderedDict()
        """Payload bytes by place, the oldest use first."""
        self.evicted_count = 0
        self.backends = []
        """Open ones, of any rank."""
        self.may_answer = threading.Event()
        self.may_answer.set()

    @contextmanager
    def held(self):
        self.may_answer.clear()
        try:
            yield
        finally:
            self.may_answer.set()

    def publish(self, places, payload_bytes):
        with self.lock:
            for place in places:
                self.published[place] = payload_bytes
                self.published.move_to_end(place)
            while len(self.published) > self.capacity_count:
                place, _ = self.published.popitem(last=False)
                self.written.pop(place, None)
                self.evicted_count += 1

    def touch(self, places):
        with self.lock:
            for place in places:
                if place in self.published:
                    self.published.move_to_end(place)

    def drop(self, places):
        with self.lock:
            for place in places:
                self.published.pop(place, None)
                self.written.pop(place, None)

    def have(self, places):
        with self.lock:
            return [place in self.published for place in places]


class RemoteTier:
    """Knows nothing but answers, each for a few polls. See `SecondaryTier`."""

    is_open = True
    is_stuck = False
    is_lost = False
    complaint = ""
    change_count = 1
    owner = 0

    def __init__(self, store, name="remote"):
        self.store = store
        self._network = Mailbox(f"network-{name}", self._run)
        self._events = deque()
        self._epoch = 0
        self._placed = {}
        self._payload_bytes = {}
        self._answers = {}
        """By key: whether it is there, and the poll in which that was told."""
        self._asked = {}
        self._poll_count = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._on_hidden = lambda keys, reason: None

    def begin(self):
        self._network.open()

    def wait_open(self, seconds):
        pass

    def close(self, timeout_seconds=None):
        self._network.close(30 if timeout_seconds is None else timeout_seconds)

    def _run(self, calls):
        for call in calls:
            self.store.may_answer.wait(HOLD_SECONDS_MAX)
            call()

    def _send(self, call):
        with suppress(ClosedError):
            self._network.put(call)

    def _place(self, key, epoch=None):
        epoch = self._epoch if epoch is None else epoch
        return Place(epoch.to_bytes(8, "big") + key)

    # Questions

    def states(self, keys):
        self._ask(keys)
        names = {None: ChunkState.ARRIVING, True: ChunkState.RECORDED, False: ChunkState.ABSENT}
        with self._lock:
            return [names[self._answers.get(key, (None,))[0]] for key in keys]

    def locate(self, keys):
        self._ask(keys)
        self._wait_for(keys, LOCATE_SECONDS)
        with self._lock:
            unknown = [key for key in keys if key not in self._answers]
            there = [self._answers.get(key, (False,))[0] for key in keys]
        if unknown:
            self._on_hidden(unknown, FailureReason.STALLED)
        return [
            self._place(key) if is_there else None
            for key, is_there in zip(keys, there, strict=True)
        ]

    def look_ahead(self, keys):
        self._ask(keys)
        return lambda: self._wait_for(keys, LOCATE_SECONDS)

    def tell_of_hidden(self, listener):
        self._on_hidden = listener

    def tell_of_loss(self, listener):
        pass

    def _ask(self, keys):
        with self._lock:
            known = self._answers.keys() | self._asked.keys()
            unknown = [key for key in dict.fromkeys(keys) if key not in known]
            self._asked.update(dict.fromkeys(unknown, self._epoch))
        if unknown:
            epoch = self._epoch
            self._send(lambda: self._learn(unknown, epoch))

    def _learn(self, keys, epoch):
        there = self.store.have([self._place(key, epoch) for key in keys])
        with self._lock:
            for key, is_there in zip(keys, there, strict=True):
                if self._asked.get(key) == epoch:  # neither reset nor changed meanwhile
                    del self._asked[key]
                    self._answers[key] = is_there, self._poll_count
            self._changed.notify_all()

    def _wait_for(self, keys, seconds):
        until = time.monotonic() + seconds
        with self._lock:
            while any(key not in self._answers for key in keys) and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def _forget(self, keys):
        with self._lock:
            for key in keys:
                self._answers.pop(key, None)
                self._asked.pop(key, None)

    # Records

    def request_places(self, ticket, keys, payload_bytes, use=UNKNOWN_USE):
        keys = tuple(keys)
        places = tuple(map(self._place, keys))
        if len(keys) > self.store.capacity_count:
            answer = Refused(ticket, FailureReason.FULL)
        else:
            answer = Placed(ticket, keys, places)
            self._placed[ticket] = keys, places, payload_bytes
        self._send(lambda: self._events.append(answer))

    def commit(self, ticket, failed=()):
        keys, places, payload_bytes = self._placed.pop(ticket)
        kept = [place for i, place in enumerate(places) if i not in set(failed)]

        def publish():
            self.store.publish(kept, payload_bytes)
            self._forget(keys)
            self._events.append(Committed(ticket))

        self._send(publish)

    def touch(self, keys, *, use=UNKNOWN_USE):
        places = [self._place(key) for key in keys]
        self._send(lambda: self.store.touch(places))

    def remove(self, keys):
        places = [self._place(key) for key in keys]
        self._send(lambda: (self.store.drop(places), self._forget(keys)))

    def pin(self, keys):
        pass

    def unpin(self, keys):
        pass

    def make_way(self, chunk_count, payload_bytes):
        self._send(lambda: None)

    def released(self, release_id):
        raise AssertionError("nothing was freed")

    def reset(self, manifest):
        epoch, self._epoch = self._epoch, self._epoch + 1
        with self._lock:
            self._answers.clear()
            self._asked.clear()
        self._send(lambda: self._drop_epoch(epoch))

    def _drop_epoch(self, epoch):
        prefix = epoch.to_bytes(8, "big")
        with self.store.lock:
            places = [place for place in self.store.published if place.startswith(prefix)]
        self.store.drop(places)

    # Answers

    def poll(self):
        self._poll_count += 1
        with self._lock:
            for key, (_, told_at) in list(self._answers.items()):
                if self._poll_count - told_at > KEPT_POLLS:
                    del self._answers[key]
        return take_all(self._events)

    def is_settled(self):
        return self._network.wait_idle(0) and not self._events

    def has_messages(self):
        return not self.is_settled()

    def wait(self, timeout_seconds):
        return self._network.wait_idle(timeout_seconds)

    def sync(self, find_lost=None):
        if find_lost is not None:
            find_lost(frozenset())

    def take_lost(self):
        return False

    def stats(self):
        with self.store.lock:
            sizes = [s for p, s in self.store.published.items() if self._is_current(p)]
            return SecondaryStats(
                record_count=len(sizes),
                payload_bytes=sum(sizes),
                charged_bytes=sum(self.store.published.values()),
                capacity_bytes=self.store.capacity_count * max([1, *sizes]),
                evicted_count=self.store.evicted_count,
            )

    def _is_current(self, place):
        return place.startswith(self._epoch.to_bytes(8, "big"))

    def check(self):
        return []


class RemoteOpener:
    """Opens the data half of a tier, which registers the pool. See `PoolBackendOpener`."""

    def __init__(self, store):
        self.store = store

    def __call__(self, config, manifest, *, rank, rank_count, pool=None):
        assert pool is not None, "a remote store moves no bytes from memory that is not registered"
        backend = RemoteBackend(self.store, pool)
        self.store.backends.append(backend)
        return backend


class RemoteBackend:
    """The data half. See `Backend`."""

    def __init__(self, store, pool):
        self.store = store
        self.pool = pool

    def open(self):
        pass

    def write(self, records):
        with self.store.lock:
            for record in records:
                self.store.written[record.place] = bytes(record.slot)
        return {}

    def read(self, records):
        failed = {}
        with self.store.lock:
            for i, record in enumerate(records):
                found = self.store.written.get(record.place)
                if found is None:
                    failed[i] = FailureReason.ABSENT
                else:
                    record.slot[:] = found
        return failed

    def release(self, runs, empty_segments):
        return None

    def sync(self):
        pass

    def lost_segments(self, relied_on=frozenset()):
        return frozenset()

    def close(self):
        pass
