"""Transfers between the engine's blocks and the tiers that were commanded and not yet answered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from tierstore.key import OffloadKey
from tierstore.tier.reservation import LoadReservation, OffloadReservation
from tierstore.transfer import JobId

__all__ = ["InFlight", "LoadJob", "OffloadJob"]


@dataclass(frozen=True, slots=True)
class OffloadJob:
    """Blocks on their way to slots."""

    reservation: OffloadReservation
    block_ids: tuple[int, ...]
    """What is read; they must not be overwritten before the job is done."""
    request_ids: frozenset[str]

    def blocks_by_key(self) -> Iterable[tuple[OffloadKey, tuple[int, ...]]]:
        """Name the blocks of each chunk."""
        keys = self.reservation.keys
        per_chunk = len(self.block_ids) // len(keys)
        for i, key in enumerate(keys):
            yield key, self.block_ids[i * per_chunk : (i + 1) * per_chunk]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Slots, and records through slots, on their way to a request's blocks."""

    reservation: LoadReservation
    request_id: str


class InFlight:
    """Jobs by id, and for each block the last offload that reads it.

    The last one is enough: copies of one direction finish in the order of their submission.
    """

    def __init__(self) -> None:
        self.offloads: dict[JobId, OffloadJob] = {}
        self.loads: dict[JobId, LoadJob] = {}
        self._readers: dict[int, JobId] = {}

    def add_offload(self, job_id: JobId, job: OffloadJob) -> None:
        """Remember which blocks the job reads."""
        self.offloads[job_id] = job
        self._readers.update(dict.fromkeys(job.block_ids, job_id))

    def pop_offload(self, job_id: JobId) -> OffloadJob | None:
        """Forget an offload that was answered; None: the job is not an offload."""
        job = self.offloads.pop(job_id, None)
        if job is not None:
            last = list(map(self._readers.pop, job.block_ids, repeat(job_id)))
            if last.count(job_id) < len(last):
                # A later job reads some of the blocks: its entries go back.
                entries = zip(job.block_ids, last, strict=True)
                self._readers.update(
                    (block, reader) for block, reader in entries if reader != job_id
                )
        return job

    def readers_of(self, block_ids: Iterable[int]) -> set[JobId]:
        """Name the offloads that still read any of these blocks."""
        if not self._readers:
            return set()
        readers = self._readers
        return {readers[block_id] for block_id in block_ids if block_id in readers}

    def keys_read_from(self, block_ids: Iterable[int]) -> list[OffloadKey]:
        """Name the chunks of which any offload, not only the last one, reads these blocks."""
        if not self._readers:
            return []
        written = self._readers.keys() & set(block_ids)
        return [
            key
            for job in self.offloads.values()
            if not written.isdisjoint(job.block_ids)
            for key, blocks in job.blocks_by_key()
            if not written.isdisjoint(blocks)
        ]

    def offloads_of(self, request_ids: Sequence[str]) -> set[JobId]:
        """Name the offloads that read blocks of any of these requests."""
        wanted = frozenset(request_ids)
        if not wanted:
            return set()
        return {
            job_id
            for job_id, job in self.offloads.items()
            if not wanted.isdisjoint(job.request_ids)
        }

    def check(self) -> list[str]:
        """Name blocks whose reader is not in flight."""
        return [
            f"block {block_id} is read by job {job_id}, which is not in flight"
            for block_id, job_id in self._readers.items()
            if job_id not in self.offloads
        ]
