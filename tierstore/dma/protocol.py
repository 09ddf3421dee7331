"""What the executor asks of a copy engine: GPU blocks <-> slots."""

from typing import Protocol

from tierstore.layout import CanonicalKVCaches
from tierstore.transfer import IntArray, JobId

__all__ = ["CopyEngine"]


class CopyEngine(Protocol):
    """Moves chunks between the engine's blocks and the primary pool's slots.

    `submit_*` enqueue and return; `poll` names the jobs whose bytes have arrived. Called from the
    worker's main thread only. Several submits may share a job id: the job is done when the last
    of them is. Copies of one direction finish in the order of their submission.
    """

    def register(self, caches: CanonicalKVCaches, pool_address: int, pool_bytes: int) -> None:
        """Learn the regions; may take milliseconds (thresholds are measured here).

        Raises:
            LayoutError: the regions cannot be addressed by this engine.
        """

    def submit_offload(
        self, job_id: JobId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks (chunks, blocks_per_chunk) to slots (chunks,), after the engine's step."""

    def submit_load(
        self, job_id: JobId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy slots (chunks,) to blocks (chunks, blocks_per_chunk); negative ids are skipped."""

    def poll(self) -> list[JobId]:
        """Return the jobs whose copies are complete, each once. Never blocks."""

    def fence(self, job_ids: tuple[JobId, ...]) -> None:
        """Keep the engine's next step from writing before these jobs have read their blocks."""

    def close(self) -> None:
        """Wait for what is in flight and forget the regions; idempotent."""
