"""Streams and events of a fake device, which make progress only when they are stepped.

Each step takes the head of one stream, chosen by a seeded lottery. An event is complete when its
place in a stream's queue is reached; a wait holds its stream back.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tierstore.dma.gpu.cuda_api import Event, Stream

__all__ = ["FakeStreams"]


@dataclass(slots=True)
class _Work:
    """One entry of a stream's queue."""

    run: Callable[[], None] = lambda: None
    waits_for: tuple[Event, int] | None = None
    """An event and which of its recordings."""


@dataclass(slots=True)
class _EventState:
    recorded: int = 0
    completed: int = 0


class FakeStreams:
    """The streams and events of one device. The caller holds a lock."""

    def __init__(self, dice: random.Random) -> None:
        """Begin with the default stream; `dice` choose whose turn it is."""
        self.held: set[Stream] = set()
        """Streams that make no progress."""
        self.depth_max = 0
        """The longest that a stream's queue of copies has been."""
        self._dice = dice
        self._queues: dict[Stream, deque[_Work]] = {Stream(0): deque()}
        self._depths: dict[Stream, int] = {Stream(0): 0}
        self._events: dict[Event, _EventState] = {}
        self._handles = iter(range(1, 1 << 30))

    @property
    def handles(self) -> set[Stream]:
        """The streams that are not destroyed, the default stream included."""
        return set(self._queues)

    @property
    def event_count(self) -> int:
        """How many events are not destroyed."""
        return len(self._events)

    def step(self) -> bool:
        """Do the next piece of work of some stream; False: none can go on."""
        ready = [s for s, q in self._queues.items() if s not in self.held and self._goes(q)]
        if not ready:
            return False
        self._queues[self._dice.choice(ready)].popleft().run()
        return True

    def create_stream(self) -> Stream:
        """Create a stream without work."""
        stream = Stream(next(self._handles))
        self._queues[stream] = deque()
        self._depths[stream] = 0
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy an idle stream."""
        assert not self._queues.pop(stream), "the stream still has work"

    def is_idle(self, stream: Stream) -> bool:
        """Return whether a stream has no work left."""
        return not self._queues[stream]

    def launch(self, stream: Stream, run: Callable[[], None]) -> None:
        """Enqueue work that is no copy."""
        self._queues[stream].append(_Work(run))

    def enqueue(self, stream: Stream, copy: Callable[[], object]) -> None:
        """Enqueue a copy."""

        def run() -> None:
            copy()
            self._depths[stream] -= 1

        self._depths[stream] += 1
        self.depth_max = max(self.depth_max, self._depths[stream])
        self.launch(stream, run)

    def create_event(self) -> Event:
        """Create an event, complete."""
        event = Event(next(self._handles))
        self._events[event] = _EventState()
        return event

    def destroy_event(self, event: Event) -> None:
        """Destroy an event."""
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        """Complete this recording when the stream gets there."""
        state = self._events[event]
        state.recorded += 1
        recording = state.recorded

        def complete() -> None:
            state.completed = max(state.completed, recording)

        self.launch(stream, complete)

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold the stream back until the event's last recording is complete."""
        recording = (event, self._events[event].recorded)
        self._queues[stream].append(_Work(waits_for=recording))

    def is_complete(self, event: Event) -> bool:
        """Return whether the event's last recording is complete."""
        state = self._events[event]
        return state.completed == state.recorded

    def _goes(self, queue: deque[_Work]) -> bool:
        if not queue:
            return False
        waits_for = queue[0].waits_for
        return waits_for is None or self._events[waits_for[0]].completed >= waits_for[1]
