"""Method selection: whatever is chosen, exactly the bytes that were asked for are copied."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.dma.gpu.cuda_api import DirectedRuns, Rectangles
from tierstore.dma.gpu.methods import (
    TABLE_ROWS,
    CopyDirection,
    CopyMethod,
    MethodSelector,
    RegionBorders,
    Thresholds,
)
from tierstore.dma.gpu.rectangles import split_rectangles
from tierstore.dma.runs import CopyRuns

DEVICE, POOL = 1 << 40, 1 << 30


def directed(steps, sizes) -> DirectedRuns:
    """Runs whose targets and sources are `steps` apart."""
    targets = DEVICE + np.concatenate(([0], np.cumsum([step for step, _ in steps], dtype=np.int64)))
    sources = POOL + np.concatenate(([0], np.cumsum([step for _, step in steps], dtype=np.int64)))
    return DirectedRuns(targets, sources, np.array(sizes))


def rows_of(runs: DirectedRuns | Rectangles) -> list[tuple[int, int, int]]:
    if isinstance(runs, DirectedRuns):
        parts = (runs.targets, runs.sources, runs.sizes_bytes)
        return list(zip(*(part.tolist() for part in parts), strict=True))
    return [
        (
            int(runs.targets[i] + row * runs.target_pitches_bytes[i]),
            int(runs.sources[i] + row * runs.source_pitches_bytes[i]),
            int(runs.widths_bytes[i]),
        )
        for i in range(len(runs))
        for row in range(int(runs.row_counts[i]))
    ]


STEPS = st.sampled_from([(100, 64), (100, 100), (200, 64), (-300, 64), (64, 64)])


@given(
    st.lists(STEPS, max_size=40),
    st.sampled_from([[64], [64, 32]]),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_rectangles_and_the_rest_are_the_runs(steps, sizes, row_count_min, random) -> None:
    runs = directed(steps, [random.choice(sizes) for _ in range(len(steps) + 1)])
    split = split_rectangles(runs, width_bytes_min=1, row_count_min=row_count_min)
    assert sorted(rows_of(split.rectangles) + rows_of(split.rest)) == sorted(rows_of(runs))
    assert (split.rectangles.row_counts >= row_count_min).all()
    assert (split.rectangles.target_pitches_bytes >= split.rectangles.widths_bytes).all()


def test_layers_at_equal_distances_become_one_rectangle_per_block() -> None:
    # Two blocks of a chunk without gaps in the slot, eight layers 1 MiB apart on the device.
    layers = np.arange(8) << 20
    targets = np.concatenate([DEVICE + layers, DEVICE + 4096 * 7 + layers])
    sources = POOL + np.arange(16) * 512
    split = split_rectangles(
        DirectedRuns(targets, sources, np.full(16, 512)), width_bytes_min=256, row_count_min=4
    )
    assert split.rectangles.row_counts.tolist() == [8, 8]
    assert split.rectangles.target_pitches_bytes.tolist() == [1 << 20, 1 << 20]
    assert len(split.rest) == 0


def test_rows_further_apart_than_any_device_allows_are_no_rectangle() -> None:
    for pitch, rectangle_count in (((1 << 31) - 1, 1), (1 << 31, 0)):
        runs = directed([(pitch, 64)] * 9, [64] * 10)
        split = split_rectangles(runs, width_bytes_min=1, row_count_min=4)
        assert len(split.rectangles) == rectangle_count


def test_narrow_rows_are_left_to_others() -> None:
    runs = directed([(100, 64)] * 9, [64] * 10)
    split = split_rectangles(runs, width_bytes_min=65, row_count_min=4)
    assert len(split.rectangles) == 0
    assert len(split.rest) == 10


def selector(*, has_batch=True, has_kernel=True, borders=None, **thresholds) -> MethodSelector:
    defaults = {"kernel_below_bytes": 0, "kernel_runs_min": 1, "pitched_from_bytes": None}
    return MethodSelector(
        dict.fromkeys(CopyDirection, Thresholds(**{**defaults, **thresholds})),
        borders or RegionBorders([], []),
        has_batch=has_batch,
        has_kernel=has_kernel,
    )


def copy_runs(sizes) -> CopyRuns:
    sizes = np.array(sizes, dtype=np.int64)
    offsets = np.arange(len(sizes)) * (1 << 21)
    scattered = DEVICE + offsets * ((np.arange(len(sizes)) % 3) + 1)
    return CopyRuns(scattered, POOL + offsets, sizes)


def methods_of(calls) -> dict[CopyMethod, int]:
    counts: dict[CopyMethod, int] = {}
    for call in calls:
        counts[call.method] = counts.get(call.method, 0) + len(call.runs)
    return counts


@given(
    st.lists(st.sampled_from([64, 4096, 65536]), max_size=30),
    st.fixed_dictionaries(
        {
            "has_batch": st.booleans(),
            "has_kernel": st.booleans(),
            "kernel_below_bytes": st.sampled_from([0, 4096, 65536]),
            "kernel_runs_min": st.integers(1, 8),
            "pitched_from_bytes": st.sampled_from([None, 64, 4096]),
        }
    ),
    st.sampled_from(CopyDirection),
    st.data(),
)
def test_every_run_is_copied_once_in_the_right_direction(sizes, options, direction, data) -> None:
    runs = copy_runs(sizes)
    flags = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    pinned = np.array(flags, bool) if data.draw(st.booleans()) else None
    calls = selector(**options).select(runs, pinned, direction)
    pairs = (runs.pool_addresses, runs.device_addresses)
    targets, sources = pairs if direction is CopyDirection.OFFLOAD else pairs[::-1]
    wanted = rows_of(DirectedRuns(targets, sources, runs.sizes_bytes))
    assert sorted(row for call in calls for row in rows_of(call.runs)) == sorted(wanted)
    methods = methods_of(calls)
    assert options["has_batch"] or CopyMethod.BATCH not in methods
    assert options["has_kernel"] or CopyMethod.KERNEL not in methods
    if pinned is not None:
        loose = {row for row, is_pinned in zip(wanted, flags, strict=True) if not is_pinned}
        for call in calls:
            if call.method is not CopyMethod.PLAIN:
                assert not loose.intersection(rows_of(call.runs))


def test_small_runs_go_by_kernel_and_large_ones_in_a_batch() -> None:
    calls = selector(kernel_below_bytes=4096, kernel_runs_min=3).select(
        copy_runs([64, 65536, 64, 4096, 64]), None, CopyDirection.LOAD
    )
    assert methods_of(calls) == {CopyMethod.KERNEL: 3, CopyMethod.BATCH: 2}


def test_too_few_small_runs_are_not_worth_a_kernel() -> None:
    calls = selector(kernel_below_bytes=4096, kernel_runs_min=4).select(
        copy_runs([64, 65536, 64, 4096, 64]), None, CopyDirection.LOAD
    )
    assert methods_of(calls) == {CopyMethod.BATCH: 5}


def test_one_run_needs_no_batch() -> None:
    calls = selector().select(copy_runs([65536]), None, CopyDirection.LOAD)
    assert methods_of(calls) == {CopyMethod.PLAIN: 1}


def test_many_runs_are_divided_into_calls_of_bounded_size() -> None:
    runs = copy_runs([64] * (TABLE_ROWS + 1))
    by_kernel = selector(kernel_below_bytes=4096).select(runs, None, CopyDirection.LOAD)
    assert [len(call.runs) for call in by_kernel] == [TABLE_ROWS, 1]
    assert [call.entry_count for call in by_kernel] == [1, 1]
    batches = selector().select(copy_runs([64] * (TABLE_ROWS + 33)), None, CopyDirection.LOAD)
    assert [call.entry_count for call in batches] == [128, 2]
    plain = selector(has_batch=False).select(runs, None, CopyDirection.LOAD)
    assert max(call.entry_count for call in plain) <= 250


@given(
    st.lists(st.integers(0, 4000), max_size=6),
    st.lists(st.integers(0, 4000), max_size=6),
    st.lists(st.integers(1, 900), min_size=1, max_size=8),
)
def test_cut_runs_copy_the_same_bytes_and_cross_no_border(device_at, pool_at, sizes) -> None:
    runs = CopyRuns(
        DEVICE + np.arange(len(sizes)) * 500, POOL + np.arange(len(sizes)) * 450, np.array(sizes)
    )
    borders = RegionBorders([DEVICE + at for at in device_at], [POOL + at for at in pool_at])
    cut = borders.cut(runs)

    def bytes_of(some: CopyRuns) -> list[tuple[int, int]]:
        return sorted(
            (int(device) + i, int(pool) + i)
            for device, pool, size in zip(
                some.device_addresses, some.pool_addresses, some.sizes_bytes, strict=True
            )
            for i in range(size)
        )

    assert bytes_of(cut) == bytes_of(runs)
    for starts, at in (
        (cut.device_addresses - DEVICE, device_at),
        (cut.pool_addresses - POOL, pool_at),
    ):
        for border in at:
            assert not ((starts < border) & (border < starts + cut.sizes_bytes)).any()


@pytest.mark.parametrize("border", [POOL + 64 * 5, DEVICE + 100 * 5])
def test_a_rectangle_across_a_border_is_not_made(border) -> None:
    runs = CopyRuns(DEVICE + np.arange(10) * 100, POOL + np.arange(10) * 64, np.full(10, 64))
    chosen = {"pitched_from_bytes": 1}
    free = selector(**chosen).select(runs, None, CopyDirection.LOAD)
    assert methods_of(free) == {CopyMethod.PITCHED: 1}
    held = selector(borders=RegionBorders([border], [border]), **chosen)
    assert methods_of(held.select(runs, None, CopyDirection.LOAD)) == {CopyMethod.BATCH: 10}
