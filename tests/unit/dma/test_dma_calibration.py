"""Thresholds follow what a device's methods really cost, and nothing of the measuring is left."""

import pytest

from tierstore.dma.gpu.calibration import measure_thresholds
from tierstore.dma.gpu.cuda_api import DirectedRuns
from tierstore.dma.gpu.methods import CopyDirection, Thresholds
from tierstore.testing.fake_cuda import FakeCuda

NANO = 1e-9


class CostlyCuda(FakeCuda):
    """Every method costs what a test says, in nanoseconds: per call, per run and per KiB."""

    def __init__(self, costs, **features) -> None:
        super().__init__(**features)
        self.use_device()
        self.costs = costs
        self.now = 0.0
        self.pending = 0.0

    def seconds(self) -> float:
        return self.now

    def synchronize(self, stream) -> None:
        """Let the time of what was enqueued pass."""
        super().synchronize(stream)
        self.now += self.pending
        self.pending = 0.0

    def copy_each(self, runs, stream) -> None:
        self._charge("plain", len(runs), int(runs.sizes_bytes.sum()))

    def copy_pitched(self, rectangles, stream) -> None:
        size = int((rectangles.widths_bytes * rectangles.row_counts).sum())
        self._charge("pitched", int(rectangles.row_counts.sum()), size)

    def copy_batch(self, runs, stream, *, early_reads) -> None:
        # Reads of slots may be early, reads of blocks never.
        assert early_reads == (runs.sources[0] in self._registered.ranges)
        self._charge("batch", len(runs), int(runs.sizes_bytes.sum()))

    def copy_by_kernel(self, table, run_count, stream) -> None:
        runs = DirectedRuns(*table[:run_count].T)
        self._charge("kernel", run_count, int(runs.sizes_bytes.sum()))

    def _charge(self, method: str, run_count: int, size_bytes: int) -> None:
        per_call, per_run, per_kib = self.costs[method]
        self.pending += NANO * (per_call + per_run * run_count + per_kib * size_bytes / 1024)


# A bus of 50 GB/s takes 20 ns per KiB.
PLAIN = (0, 2000, 20)
BATCH = (3000, 500, 20)
SLOW = (10**6, 10**6, 1000)


@pytest.mark.parametrize(
    ("costs", "features", "expected"),
    [
        # The kernel loses a third of the bus: worth it while a run's overhead is more than that.
        (
            {"plain": PLAIN, "batch": BATCH, "pitched": SLOW, "kernel": (8000, 10, 30)},
            {},
            Thresholds(kernel_below_bytes=48 << 10, kernel_runs_min=16, pitched_from_bytes=None),
        ),
        # Without batches it is worth it for larger runs and fewer of them.
        (
            {"plain": PLAIN, "pitched": SLOW, "kernel": (8000, 10, 30)},
            {"has_batch": False},
            Thresholds(kernel_below_bytes=192 << 10, kernel_runs_min=16, pitched_from_bytes=None),
        ),
        # Wide rows go at full speed as rectangles, narrow ones do not.
        (
            {"plain": PLAIN, "batch": BATCH, "pitched": (2000, 0, 40), "kernel": SLOW},
            {},
            Thresholds(kernel_below_bytes=0, kernel_runs_min=128, pitched_from_bytes=None),
        ),
        (
            {"plain": PLAIN, "batch": BATCH, "pitched": (2000, 0, 20)},
            {"has_kernel": False},
            Thresholds(kernel_below_bytes=0, kernel_runs_min=128, pitched_from_bytes=2 << 10),
        ),
    ],
)
def test_thresholds_follow_the_costs(costs, features, expected) -> None:
    api = CostlyCuda(costs, **features)
    assert measure_thresholds(api, api) == dict.fromkeys(CopyDirection, expected)
    assert api.resource_count == 0


def test_a_cliff_between_two_page_sizes_is_found() -> None:
    """Batches of 4 to 24 KiB moved 4 to 7 GB/s, those of 28 to 64 KiB 28 to 52, on one card."""

    class Cliff(CostlyCuda):
        def copy_batch(self, runs, stream, *, early_reads) -> None:
            super().copy_batch(runs, stream, early_reads=early_reads)
            self.pending += NANO * 3000 * int((runs.sizes_bytes < 28 << 10).sum())

    api = Cliff({"plain": SLOW, "batch": BATCH, "pitched": SLOW, "kernel": (8000, 10, 60)})
    for thresholds in measure_thresholds(api, api).values():
        assert 16 << 10 < thresholds.kernel_below_bytes <= 32 << 10
