"""Finds equally spaced runs of equal size: each such group is one 2-D copy."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.dma.gpu.cuda_api import DirectedRuns, Rectangles
from tierstore.transfer import IntArray

__all__ = ["RectangleSplit", "split_rectangles"]

BoolArray = npt.NDArray[np.bool_]

_PITCH_BYTES_MAX = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far."""


@dataclass(frozen=True, slots=True)
class RectangleSplit:
    """The rectangles found, and the runs that belong to none."""

    rectangles: Rectangles
    rest: DirectedRuns


def split_rectangles(
    runs: DirectedRuns, *, width_bytes_min: int, row_count_min: int
) -> RectangleSplit:
    """Gather consecutive runs of one size with constant distances on both sides.

    O(runs), all of it in numpy. Links between neighbours form stretches of equal distances:

        run     0    1    2    3    4    5          rows 0-2 and rows 3-5 are rectangles;
        link      d    d    e    d    d             the link e is too short to be one

    A run where two long stretches meet belongs to the earlier one.
    """
    targets, sources, sizes = runs.targets, runs.sources, runs.sizes_bytes
    target_steps, source_steps = targets[1:] - targets[:-1], sources[1:] - sources[:-1]
    linked = (
        (sizes[1:] == sizes[:-1])
        & (sizes[:-1] >= width_bytes_min)
        & _is_pitch(target_steps, sizes[:-1])
        & _is_pitch(source_steps, sizes[:-1])
    )
    goes_on = (
        linked[1:]
        & linked[:-1]
        & (target_steps[1:] == target_steps[:-1])
        & (source_steps[1:] == source_steps[:-1])
    )
    if np.count_nonzero(goes_on) < row_count_min - 2:
        none = targets[:0]
        return RectangleSplit(Rectangles(none, none, none, none, none, none), runs)
    first_links = np.flatnonzero(np.concatenate(([True], ~goes_on))[: len(linked)])
    link_counts = np.diff(np.append(first_links, len(linked)))
    long = linked[first_links] & (link_counts + 1 >= row_count_min)
    firsts, counts = first_links[long], link_counts[long] + 1
    # Half-open runs [first, first + count) of neighbours share at most one run: the later yields.
    shared = np.concatenate(([False], firsts[1:] < (firsts + counts)[:-1]))[: len(firsts)]
    firsts, counts = firsts + shared, counts - shared
    enough = counts >= row_count_min
    firsts, counts = firsts[enough], counts[enough]
    covered = np.zeros(len(runs) + 1, np.int64)
    covered[firsts] += 1
    covered[firsts + counts] -= 1
    return RectangleSplit(
        Rectangles(
            targets[firsts],
            sources[firsts],
            sizes[firsts],
            counts,
            target_steps[firsts],
            source_steps[firsts],
        ),
        runs[np.flatnonzero(np.cumsum(covered[:-1]) == 0)],
    )


def _is_pitch(steps: IntArray, widths: IntArray) -> BoolArray:
    fits: BoolArray = (steps >= widths) & (steps <= _PITCH_BYTES_MAX)
    return fits
