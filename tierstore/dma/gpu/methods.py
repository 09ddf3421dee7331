"""Which way a copy goes: by kernel, as a rectangle, in a batch, or one call per run.

    runs --cut at borders--> not pinned ------------------------------> PLAIN
                             small and many --------------------------> KERNEL
                             equally spaced rows ---------------------> PITCHED
                             all others, CUDA >= 12.8 on both sides --> BATCH, else PLAIN

What is small is measured per device and direction (`calibration`) or configured.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np
import numpy.typing as npt

from tierstore.dma.gpu.cuda_api import DirectedRuns, Rectangles
from tierstore.dma.gpu.rectangles import split_rectangles
from tierstore.dma.runs import CopyRuns
from tierstore.transfer import IntArray

__all__ = [
    "TABLE_ROWS",
    "CopyCalls",
    "CopyDirection",
    "CopyMethod",
    "MethodSelector",
    "RegionBorders",
    "Thresholds",
]

BoolArray = npt.NDArray[np.bool_]

TABLE_ROWS = 4096
"""Most runs per kernel launch or batch."""

_PLAIN_RUNS_MAX = 250
"""Most separate copies that are enqueued between two looks at the queue's length."""

_BATCH_RUNS_PER_ENTRY = 32
"""A driver submits a batch in one go, but not without limit: 24,576 runs fill a stream. Each run as
one entry lost: 768 per step of the engine, while a call with 8,192 copies of 8 KiB is known to
return with half of them waiting (H100, vLLM 48434)."""

_ROWS_MIN = 4
"""A rectangle with fewer rows saves too few calls to be worth the search."""


_END = np.iinfo(np.int64).max
"""The border behind all others: above every address."""


class CopyDirection(Enum):
    """Which way the bytes go."""

    OFFLOAD = "offload"
    LOAD = "load"


class CopyMethod(Enum):
    """How the bytes go."""

    PLAIN = "plain"
    PITCHED = "pitched"
    BATCH = "batch"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When to choose which method, for one device and direction."""

    kernel_below_bytes: int
    """Runs smaller than this go by kernel; 0: none do."""
    kernel_runs_min: int
    """Fewer small runs than this are not worth a launch."""
    pitched_from_bytes: int | None
    """Rows of at least this size go as rectangles; None: none do."""


@dataclass(frozen=True, slots=True)
class CopyCalls:
    """Some runs that go the same way, small enough to be enqueued at once."""

    method: CopyMethod
    runs: DirectedRuns | Rectangles

    @property
    def entry_count(self) -> int:
        """How many entries of a stream's queue they count as."""
        match self.method:
            case CopyMethod.KERNEL:
                return 1
            case CopyMethod.BATCH:
                return -(-len(self.runs) // _BATCH_RUNS_PER_ENTRY)
        return len(self.runs)


class RegionBorders:
    """Addresses that no single copy may reach across.

    CUDA refuses a copy that touches two allocations or two registrations, though their addresses
    are adjacent; coalescing and rectangles know nothing of that.
    """

    def __init__(self, device_borders: list[int], pool_borders: list[int]) -> None:
        self._device = np.array([*sorted(set(device_borders)), _END], dtype=np.int64)
        self._pool = np.array([*sorted(set(pool_borders)), _END], dtype=np.int64)

    def cut(self, runs: CopyRuns) -> CopyRuns:
        """Cut the runs that cross a border. O(runs * log(borders)); crossings are rare."""
        while True:
            room = np.minimum(
                _room(self._device, runs.device_addresses), _room(self._pool, runs.pool_addresses)
            )
            crosses = room < runs.sizes_bytes
            if not crosses.any():
                return runs
            crossing = np.flatnonzero(crosses)
            heads = room[crossing]
            sizes = runs.sizes_bytes.copy()
            sizes[crossing] = heads
            device, pool = runs.device_addresses, runs.pool_addresses
            runs = CopyRuns(
                np.insert(device, crossing + 1, device[crossing] + heads),
                np.insert(pool, crossing + 1, pool[crossing] + heads),
                np.insert(sizes, crossing + 1, runs.sizes_bytes[crossing] - heads),
            )

    def hold(self, rectangles: Rectangles) -> BoolArray:
        """Return which rectangles cross no border, neither with targets nor with sources."""
        last_rows = rectangles.row_counts - 1
        held = np.ones(len(rectangles), bool)
        for borders in (self._device, self._pool):
            for starts, pitches in (
                (rectangles.targets, rectangles.target_pitches_bytes),
                (rectangles.sources, rectangles.source_pitches_bytes),
            ):
                spans = last_rows * pitches + rectangles.widths_bytes
                held &= _room(borders, starts) >= spans
        return held


def _room(borders: IntArray, addresses: IntArray) -> IntArray:
    """Return the bytes from each address to the next border."""
    room: IntArray = borders[borders.searchsorted(addresses, side="right")] - addresses
    return room


class MethodSelector:
    """Divides runs among the methods that a device has."""

    def __init__(
        self,
        thresholds: dict[CopyDirection, Thresholds],
        borders: RegionBorders,
        *,
        has_batch: bool,
        has_kernel: bool,
    ) -> None:
        self._thresholds = thresholds
        self._borders = borders
        self._has_batch = has_batch
        self._has_kernel = has_kernel

    def cut(self, runs: CopyRuns) -> CopyRuns:
        """Cut the runs so that every one lies within one allocation and one registration."""
        return self._borders.cut(runs)

    def select(
        self, runs: CopyRuns, pinned: BoolArray | None, direction: CopyDirection
    ) -> list[CopyCalls]:
        """Return the calls that make all copies of `runs`, which were cut.

        `pinned` says which runs lie in registered host memory; None: all do. O(runs) in numpy.
        """
        thresholds = self._thresholds[direction]
        rest = _directed(runs, direction)
        calls: list[list[CopyCalls]] = []
        if pinned is not None:
            rest, loose = _divided(rest, pinned)
            calls.append(_slices(CopyMethod.PLAIN, loose, _PLAIN_RUNS_MAX))
        if self._has_kernel:
            small = rest.sizes_bytes < thresholds.kernel_below_bytes
            if np.count_nonzero(small) >= thresholds.kernel_runs_min:
                by_kernel, rest = _divided(rest, small)
                calls.append(_slices(CopyMethod.KERNEL, by_kernel, TABLE_ROWS))
        pitched_from_bytes = thresholds.pitched_from_bytes
        if (
            pitched_from_bytes is not None
            and len(rest) >= _ROWS_MIN
            and int(rest.sizes_bytes.max()) >= pitched_from_bytes
        ):
            split = split_rectangles(
                rest, width_bytes_min=pitched_from_bytes, row_count_min=_ROWS_MIN
            )
            if len(split.rectangles) and bool(self._borders.hold(split.rectangles).all()):
                calls.append(_slices(CopyMethod.PITCHED, split.rectangles, _PLAIN_RUNS_MAX))
                rest = split.rest
        if self._has_batch and len(rest) > 1:
            calls.append(_slices(CopyMethod.BATCH, rest, TABLE_ROWS))
        else:
            calls.append(_slices(CopyMethod.PLAIN, rest, _PLAIN_RUNS_MAX))
        return list(chain.from_iterable(calls))


def _directed(runs: CopyRuns, direction: CopyDirection) -> DirectedRuns:
    if direction is CopyDirection.OFFLOAD:
        return DirectedRuns(runs.pool_addresses, runs.device_addresses, runs.sizes_bytes)
    return DirectedRuns(runs.device_addresses, runs.pool_addresses, runs.sizes_bytes)


def _divided(runs: DirectedRuns, chosen: BoolArray) -> tuple[DirectedRuns, DirectedRuns]:
    """Return the chosen runs and the others."""
    if chosen.all():
        return runs, runs[:0]
    return runs[np.flatnonzero(chosen)], runs[np.flatnonzero(~chosen)]


def _slices(method: CopyMethod, runs: DirectedRuns | Rectangles, count_max: int) -> list[CopyCalls]:
    return [
        CopyCalls(method, runs[slice(start, start + count_max)])
        for start in range(0, len(runs), count_max)
    ]
