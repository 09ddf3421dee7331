"""What the executor asks of a copy engine: GPU blocks <-> slots."""

from typing import NewType, Protocol

from tierstore.layout import CanonicalKVCaches
from tierstore.transfer import IntArray

__all__ = ["ComputeMark", "CopyEngine", "CopyId"]

CopyId = NewType("CopyId", int)
"""One submitted copy; the executor maps it to its job."""


class ComputeMark:
    """A point in the engine's own work, named by `CopyEngine.mark_compute`."""


class CopyEngine(Protocol):
    """Moves chunks between the engine's blocks and the primary pool's slots.

    `submit_*` enqueue and return; `poll` names the copies whose bytes have arrived. Loads may be
    submitted from any thread (an I/O thread that has just filled a slot), the rest is called from
    the worker's main thread, the one that launches the engine's work. Offloads finish in the order
    of their submission, and so do loads of one urgency.
    """

    def register(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, pool_address: int, pool_bytes: int
    ) -> None:
        """Learn the regions; may take milliseconds (thresholds are measured here).

        Raises:
            LayoutError: the regions cannot be addressed by this engine.
            DeviceError: the device refused a resource.
        """

    def submit_offload(
        self, copy_id: CopyId, group_idx: int, block_ids: IntArray, slots: IntArray
    ) -> None:
        """Copy blocks (chunks, blocks_per_chunk) to slots (chunks,).

        Reads the blocks after the work that the engine has launched so far.

        Raises:
            LayoutError: a block id or a slot lies outside its region; nothing was copied.
        """

    def submit_load(
        self,
        copy_id: CopyId,
        group_idx: int,
        block_ids: IntArray,
        slots: IntArray,
        *,
        after: ComputeMark | None = None,
        urgent: bool = False,
    ) -> None:
        """Copy slots (chunks,) to blocks (chunks, blocks_per_chunk); negative ids are skipped.

        Writes the blocks after the work that `after` names: their last owner may still compute.
        An urgent load does not queue behind the others.

        Raises:
            LayoutError: a block id or a slot lies outside its region; nothing was copied.
        """

    def mark_compute(self) -> ComputeMark:
        """Name the work that the engine has launched so far, fences included."""

    def poll(self) -> list[CopyId]:
        """Return the copies that are complete, each once. Never blocks."""

    def take_failed(self) -> list[CopyId]:
        """Return the copies that the device refused, each once, and never by `poll`.

        Their bytes are garbage, and nothing of them is under way any more.
        """

    def fence(self, copy_ids: tuple[CopyId, ...]) -> None:
        """Keep the engine's next step from writing before these copies have read their blocks.

        Call it before `mark_compute` for the loads of the same step: then they wait, too.
        """

    def close(self) -> None:
        """Wait for what is in flight and forget the regions; idempotent."""
