"""What the tier stack and the embedded store ask of a secondary tier: the control half of it.

    request_places -> Placed | Refused     the tier sets places aside
    commit         -> Committed            what was written there can be found from now on
    poll                                   all answers, and what the tier did by itself

The data half is a `backend.protocol.Backend`, which runs in other processes. The two halves meet in
`Place`: the tier gives places, the backend reads and writes there, and those who carry a place from
one to the other never look inside.

`tier.disk.tier.DiskTier` is the tier on this machine, with a catalog. The protocol demands none:

- Absence is normal. A record may go at any time, by another process or by the store. What was
  found may be gone when it is read: the read then answers `ABSENT`, and the stack calls `remove`.
- Existence may be asked asynchronously. `states` answers *arriving* until the tier knows; `locate`
  gives up after a bounded time.
- Eviction is the tier's business. `touch` and `pin` are advice that a tier may not be able to take.
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
"""`states` may wait for the answers about so few keys; of more it answers what it knows."""

STEP_SECONDS_MAX = 0.05
"""All calls of `states` between two of `poll` wait so long together."""

HiddenListener: TypeAlias = Callable[[Sequence[OffloadKey], FailureReason], None]
"""Called with keys that are said to be absent because they could not be looked up."""

LossListener: TypeAlias = Callable[[], None]
"""Called when the tier has lost all of its records."""


class SecondaryTier(Protocol):
    """Which keys have a record in one tier, and where.

    One thread at a time calls, the scheduler's or that of a call of an embedded store, unless a
    method says otherwise. Calls that say nothing of waiting return at once, whatever hangs. A tier
    never raises for its device: what it cannot answer is absent, refused, or a `complaint`.
    """

    # Life

    def begin(self) -> None:
        """Start threads and the first try to open the tier; returns at once.

        The caller calls `close` in the end, also after an error.
        """

    def wait_open(self, seconds: float) -> None:
        """Wait for the end of the first try, for so long at most; later tries go on by themselves.

        Raises:
            TierStoreError: the user has to change something; nothing is tried any more.
        """

    def close(self, timeout_seconds: float | None = None) -> None:
        """Finish what is queued and stop the threads; idempotent, for a thread that may wait.

        Returns after about `timeout_seconds` (None: a bound of the tier's own), whatever hangs.
        """

    @property
    def is_open(self) -> bool:
        """Whether the tier is in reach; otherwise nothing is found and requests are refused.

        Any thread may ask.
        """

    @property
    def is_stuck(self) -> bool:
        """Whether a lookup hangs: nothing is found until it has ended."""

    @property
    def complaint(self) -> str:
        """Why the tier is not open, or did not do what it was last told; empty: all is well."""

    @property
    def change_count(self) -> int:
        """How often the tier was opened or lost; changes in `wait_open`, `poll` and `wait` only.

        While it stays the same, what was committed is still the tier's.
        """

    @property
    def owner(self) -> int:
        """The owner of the places in `Placed`: `Demote.owner`.

        A data plane writes nothing for an owner that it knows to be dead. 0: nobody else can be
        given the same places. Changes as `change_count` does.
        """

    # Questions

    def states(self, keys: Sequence[OffloadKey]) -> list[ChunkState]:
        """Return of each key whether it is recorded, absent, or (arriving) being looked up.

        For the scheduler's thread, once or twice per step: waits `STEP_SECONDS_MAX` in all and for
        up to `ASKED_AT_ONCE_MAX` keys only, or not at all. *Arriving*: ask again in a later step,
        after `poll`; the tier looks the key up meanwhile. A tier that cannot tell answers absent,
        and tells its `HiddenListener`.
        """

    def locate(self, keys: Sequence[OffloadKey]) -> list[Place | None]:
        """Return the place of each recorded key; None where there is none, or it is not known.

        Waits for a bounded time, in the scheduler's thread no longer than `STEP_SECONDS_MAX`. What
        `states` has called recorded is usually answered without.
        """

    def look_ahead(self, keys: Sequence[OffloadKey]) -> Callable[[], None] | None:
        """Begin to look up what `locate` is asked for next.

        Return what waits for that, for a bounded time; any thread may call it. None: there is
        nothing to wait for.
        """

    def tell_of_hidden(self, listener: HiddenListener) -> None:
        """Call `listener` in `states` and `locate`, in their thread; it replaces the one before."""

    # Records

    def request_places(
        self,
        ticket: int,
        keys: Sequence[OffloadKey],
        payload_bytes: int,
        use: UseContext = UNKNOWN_USE,
    ) -> None:
        """Ask for one place per key, of `payload_bytes` each; `Placed` or `Refused` answers once.

        Tickets are the caller's and never repeated. The keys are of one prefix, tail first; what is
        recorded first is evicted first. Keys that the tier knows to be recorded or being written
        are left out, in order. A `Placed` without keys needs no `commit`, every other one does.
        The use is that of all chunks that go down together; of those that are asked for again, or
        because they leave memory, it is unknown.
        """

    def commit(self, ticket: int, failed: Collection[int] = ()) -> None:
        """Publish the records of a `Placed`, but for those that could not be written (by index).

        Answered by `Committed`. After that, and not before `commit`, they can be found.
        """

    def touch(self, keys: Sequence[OffloadKey], *, use: UseContext = UNKNOWN_USE) -> None:
        """Take note of one use of each key, tail first; advice, which a tier may drop."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget records that are corrupt or gone; a tier that is busy may drop this, too."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keep records where they are while they are read (counted); advice, as `touch`."""

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Undo one `pin` per key."""

    def make_way(self, chunk_count: int, payload_bytes: int) -> None:
        """Evict as much as so many chunks take, although there is room for them.

        For a data plane that found none in one piece (`FailureReason.CROWDED`).
        """

    def released(self, release_id: int) -> None:
        """Confirm a `Freed`: every rank has given the bytes back, and they may be used again."""

    def reset(self, manifest: Manifest) -> None:
        """Make every record of this tier's manifest unreachable, at once and forever.

        Requests that wait are refused or placed; what was placed before is not found even if it is
        committed. Later records are those of `manifest`: the same one, or its next epoch.
        """

    # Answers

    def poll(self) -> list[SecondaryEvent]:
        """Return the events since the last call, in the order in which they happened; never blocks.

        Called once per step: it ends what `states` may wait for, and lets the tier work on.
        """

    def is_settled(self) -> bool:
        """Return whether the tier has done all that is queued, and `poll` has nothing."""

    def has_messages(self) -> bool:
        """Return whether `poll` has something to return, or will have without being asked."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the tier has done all that is queued and can be done.

        False: time is up, or the tier is not open, or lost.
        """

    # Flushes and losses

    def sync(self, find_lost: LostFinder | None = None) -> None:
        """Make what was committed durable, as far as the tier itself can; for a thread that waits.

        Any thread, side by side with other calls. What `find_lost` (`Backend.lost_segments`) finds
        gone is left for `take_lost`.

        Raises:
            BackendError: something that was committed may not be durable, or a reset is not.
        """

    def take_lost(self) -> bool:
        """Return whether `sync` has found payload gone, once.

        Keys recorded there until now are given places again when they are asked for.
        """

    @property
    def is_lost(self) -> bool:
        """Whether `sync` has found the tier's path lost, and the tier has not given it up yet."""

    def tell_of_loss(self, listener: LossListener) -> None:
        """Call `listener` in `poll` and `wait`, in their thread; it replaces the one before."""

    # Inspection, by threads that may wait; side by side with other calls.

    def stats(self) -> SecondaryStats:
        """Count records and bytes, as far as the tier knows; may take as long as the device does.

        Raises:
            BackendError, CatalogError: the tier cannot be counted.
        """

    def check(self) -> list[str]:
        """Verify the tier's invariants; return the violations in words (empty: sound).

        A tier that cannot be verified is a violation.
        """
