"""Answers of the tier stack: where chunks are, and what is reserved for a transfer."""

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.transfer import IntArray, JobId, Promote

__all__ = ["NONE_TRIED", "ChunkState", "LoadReservation", "OffloadReservation", "untried"]

NONE_TRIED: Mapping[OffloadKey, int] = MappingProxyType({})
"""No tier has failed to load any chunk."""


class ChunkState(IntEnum):
    """Where a chunk is."""

    ABSENT = 0
    ARRIVING = 1
    """Reserved in the primary tier, bytes on the way: ask again later."""
    RECORDED = 2
    """Only in a secondary tier; can be loaded."""
    RESIDENT = 3
    """In a primary slot; can be loaded."""


# Named tuples, since each call of the index creates one: frozen dataclasses take 0.4 us longer.


class OffloadReservation(NamedTuple):
    """Slots for the keys that were neither resident nor arriving nor refused."""

    group_idx: int
    indices: Sequence[int]
    """Positions in the requested keys, ascending."""
    keys: tuple[OffloadKey, ...]
    slots: IntArray
    use: UseContext = UNKNOWN_USE
    """On whose behalf they are stored."""


class LoadReservation(NamedTuple):
    """Pinned or arriving slots for keys, and the promotes that fill the latter."""

    job_id: JobId
    keys: tuple[tuple[OffloadKey, ...], ...]
    """Per requested group, in order: all of its keys, or those that can be loaded."""
    slots: tuple[IntArray, ...]
    """The slots of `keys`."""
    promotes: tuple[Promote, ...]
    pinned: tuple[OffloadKey, ...]
    """The chunks that were resident already, head first."""
    use: UseContext = UNKNOWN_USE
    """On whose behalf they are loaded."""

    @classmethod
    def of(
        cls,
        job_id: JobId,
        groups: Sequence[tuple[Sequence[OffloadKey], Sequence[int | None]]],
        promotes: Sequence[Promote],
        pinned: tuple[OffloadKey, ...],
        use: UseContext = UNKNOWN_USE,
    ) -> Self:
        """Merge the slots of resident keys (`groups`) with those of the promotes."""
        all_keys = tuple(tuple(keys) for keys, _ in groups)
        if len(promotes) == 1 and all_keys == (promotes[0].keys,):
            all_slots: Sequence[IntArray] = (promotes[0].slots,)  # all of a request, of one tier
        elif promotes:
            given: dict[OffloadKey, int] = {}
            for promote in promotes:
                given.update(zip(promote.keys, promote.slots.tolist(), strict=True))
            all_slots = [
                np.array(
                    [given[k] if s is None else s for k, s in zip(keys, had, strict=True)], np.int64
                )
                for keys, had in groups
            ]
        else:
            all_slots = [np.array(had, np.int64) for _, had in groups]
        return cls(job_id, all_keys, tuple(all_slots), tuple(promotes), pinned, use)

    def failed_tiers(self, failed: Collection[int]) -> dict[OffloadKey, int]:
        """Return the chunks that did not arrive (`TransferDone.failed`), each with its tier."""
        promoted = [(key, promote.tier_idx) for promote in self.promotes for key in promote.keys]
        return dict(promoted[i] for i in failed)


def untried(
    keys: Sequence[OffloadKey], tried: Mapping[OffloadKey, int], tier_idx: int
) -> Sequence[OffloadKey]:
    """Return the chunks that neither this tier nor a later one has been asked for."""
    return [key for key in keys if tried.get(key, -1) < tier_idx] if tried else keys
