"""The protocol of a secondary tier's control half, for the tier stack and the embedded store.

    request_places -> Placed | Refused     the tier reserves places
    commit         -> Committed            records written there can be found from now on
    poll                                   all answers, and the tier's own events

The data half is a `backend.protocol.Backend`, which runs in other processes. The two halves share
`Place`: the tier hands out places, the backend reads and writes there, and the code between them
treats a place as opaque.

`tier.disk.tier.DiskTier` is the tier on this machine, with a catalog. The protocol requires none:

- Absence is normal. A record may disappear at any time, by another process or by the store. If it
  was found and is gone when it is read, the read answers `ABSENT`, and the stack calls `remove`.
- Lookups may be asynchronous. `states` answers *arriving* until the tier knows; `locate` gives up
  after a bounded time.
- The tier decides on eviction. `touch` and `pin` are advice that a tier may be unable to follow.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from tierstore.backend.protocol import LostFinder
from tierstore.key import OffloadKey
from tierstore.manifest import Manifest
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.reservation import ChunkState
from tierstore.tier_events import SecondaryEvent, SecondaryStats
from tierstore.transfer import FailureReason, Place

__all__ = [
    "ASKED_AT_ONCE_MAX",
    "STEP_SECONDS_MAX",
    "HiddenListener",
    "LossListener",
    "SecondaryTier",
]

ASKED_AT_ONCE_MAX = 16
"""`states` may wait for the answers about so few keys; for more, it answers what it knows."""

STEP_SECONDS_MAX = 0.05
"""How long all calls of `states` between two calls of `poll` may wait in total."""

HiddenListener: TypeAlias = Callable[[Sequence[OffloadKey], FailureReason], None]
"""Called with keys that are reported as absent because they could not be looked up."""

LossListener: TypeAlias = Callable[[], None]
"""Called when the tier has lost all of its records."""


class SecondaryTier(Protocol):
    """Which keys have a record in one tier, and where.

    Unless a method's docstring states otherwise, one thread at a time calls: the scheduler's, or
    that of a call of an embedded store. Methods return at once, whatever hangs, unless they are
    documented to wait. A tier never raises because of its device: it answers absent or refused, or
    sets its `complaint`.
    """

    # Life

    def begin(self) -> None:
        """Start threads and the first attempt to open the tier; returns at once.

        The caller must call `close` at the end, also after an error.
        """

    def wait_open(self, seconds: float) -> None:
        """Wait for the first attempt to end, for at most `seconds`; later attempts need no call.

        Raises:
            TierStoreError: the user has to change something; there are no further attempts.
        """

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish queued work and stop the threads; idempotent, for a thread that may wait.

        Returns after about `timeout_seconds` (None: a bound of the tier's own), whatever hangs.
        """

    @property
    def is_open(self) -> bool:
        """Whether the tier is open; otherwise nothing is found and requests are refused.

        Any thread may read it.
        """

    @property
    def is_stuck(self) -> bool:
        """Whether a lookup hangs: nothing is found until it has ended."""

    @property
    def complaint(self) -> str:
        """Why the tier is not open, or why its last operation failed; empty: all is well."""

    @property
    def change_count(self) -> int:
        """How often the tier was opened or lost; changes in `wait_open`, `poll` and `wait` only.

        While it stays the same, the tier still has the records that were committed.
        """

    @property
    def owner(self) -> int:
        """The owner of the places in `Placed`: `Demote.owner`.

        A data plane writes nothing for an owner that it knows to be dead. 0: no other process can
        be given the same places. Changes when `change_count` does.
        """

    # Questions

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return whether each key is recorded, absent, or still being looked up (arriving).

        For the scheduler's thread, once or twice per step: waits at most `STEP_SECONDS_MAX` in
        all, and only for up to `ASKED_AT_ONCE_MAX` keys. *Arriving*: ask again in a later step,
        after `poll`; the tier looks the key up meanwhile. A tier that cannot look keys up answers
        absent, and calls its `HiddenListener`.
        """

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each key; None if it is not recorded, or its place is not known.

        Waits for a bounded time, in the scheduler's thread no longer than `STEP_SECONDS_MAX`. Keys
        that `states` has reported as recorded are usually answered without waiting.
        """

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Callable[[], None] | None:
        """Start to look up keys that `locate` will be asked for next.

        Return a function that waits for that, for a bounded time; any thread may call it. None:
        there is nothing to wait for.
        """

    def tell_of_hidden(self, listener: HiddenListener) -> None:
        """Set the listener that `states` and `locate` call, in their thread; replaces the last."""

    # Records

    def request_places(
        self,
        ticket: int,
        keys: Sequence[OffloadKey],
        payload_bytes: int,
        use: UseContext = UNKNOWN_USE,
    ) -> None:
        """Ask for one place per key, of `payload_bytes` each; answered by a `Placed` or `Refused`.

        The caller chooses the ticket and never repeats it. The keys are of one prefix, tail first:
        the first record is evicted first. The answer omits keys that are already recorded or being
        written, and keeps the order of the others. Every `Placed` needs a `commit`, except one
        without keys. The use is that of all chunks that go down together; it is unknown for chunks
        that are asked for again, or that leave memory.
        """

    def commit(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Publish the records of a `Placed`, except `failed` ones (indices of failed writes).

        Answered by `Committed`. From then on the records can be found; before `commit` they cannot.
        """

    def touch(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Take note of one use of each key, tail first; advice, which a tier may drop."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove records that are corrupt or gone; a busy tier may drop this, too."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep records in place while they are read (pins are counted); advice, as `touch`."""

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""

    def make_way(self, chunk_count: int, payload_bytes: int) -> None:
        """Evict as many bytes as `chunk_count` chunks take, although there is room for them.

        For a data plane that found no contiguous space (`FailureReason.CROWDED`).
        """

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has freed the bytes, and they may be used again."""

    def reset(self, manifest: Manifest) -> None:
        """Make every record of this tier's manifest unreachable, at once and permanently.

        Waiting requests are refused or placed. Records placed before are not found, even if they
        are committed later. New records belong to `manifest`: the same one, or its next epoch.
        """

    # Answers

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call, in the order in which they happened; never blocks.

        Called once per step: it renews the time that `states` may wait, and lets the tier proceed.
        """

    def is_settled(self) -> bool:
        """Return whether all queued work is done, and `poll` has nothing to return."""

    def has_messages(self) -> bool:
        """Return whether `poll` has something to return, or will have without a further call."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all queued work that can be done is done.

        False: timeout, or the tier is not open, or lost.
        """

    # Flushes and losses

    def sync(self, find_lost: LostFinder | None = None) -> None:
        """Make committed records durable, as far as the tier itself can; may wait.

        Any thread, concurrently with other calls. `take_lost` reports losses that `find_lost`
        (`Backend.lost_segments`) finds.

        Raises:
            BackendError: a committed record or a reset may not be durable.
        """

    def take_lost(self) -> bool:
        """Return whether `sync` has found payload missing since the last call.

        Keys that were recorded there are given places again when they are requested.
        """

    @property
    def is_lost(self) -> bool:
        """Whether `sync` has found the tier's path lost, and the tier has not given it up yet."""

    def tell_of_loss(self, listener: LossListener) -> None:
        """Set the listener that `poll` and `wait` call, in their thread; replaces the last."""

    # Inspection, by threads that may wait; concurrently with other calls.

    def stats(self) -> SecondaryStats:
        """Count records and bytes, as far as the tier knows; may take as long as the device does.

        Raises:
            BackendError, CatalogError: the tier cannot be counted.
        """

    def check(self) -> list[str]:
        """Verify the tier's invariants; return the violations in words (empty: sound).

        A tier that cannot be verified is a violation.
        """
