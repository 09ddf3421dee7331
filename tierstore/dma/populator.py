"""Gives the pool its pages in the background, from its first slot upwards."""

from tierstore.dma.background import BackgroundTurns
from tierstore.dma.host_memory import prefault

__all__ = ["STEP_BYTES", "PoolPopulator", "prefault_in_steps"]

STEP_BYTES = 2 << 20
"""One huge page, or 512 small ones: what a transfer that begins now, and whoever maps memory, may
have to wait for (0.1 to 5 ms). Steps of 16 MiB made them wait several times as long."""


class PoolPopulator:
    """Populates a range of host memory that may be in use, step by step."""

    def __init__(self, address: int, size_bytes: int, turns: BackgroundTurns) -> None:
        """Do nothing yet; see `run`. The range is page-aligned; ending `turns` ends the run."""
        self._address = address
        self._end = address + size_bytes
        self._turns = turns

    def run(self) -> None:
        """Populate what is left, in a background thread; first comes what is used first.

        Pages that were touched meanwhile keep their bytes. Where the kernel cannot, it stops.
        """
        while self._address < self._end and self._turns.wait():
            size_bytes = min(STEP_BYTES, self._end - self._address)
            if not prefault(self._address, size_bytes):
                return
            self._address += size_bytes


def prefault_in_steps(address: int, size_bytes: int) -> None:
    """Give pages to a page-aligned range, without keeping others from mapping memory for long."""
    end = address + size_bytes
    while address < end and prefault(address, min(STEP_BYTES, end - address)):
        address += STEP_BYTES
