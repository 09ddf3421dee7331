"""Reports of `bench_dma`: a table of the figures that have targets, and a plot."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_LARGE_RUN_BYTES = 64 << 10
_MANY_RUNS = 256


def summary(machine: Row, rows: list[Row], beside: list[Row]) -> str:
    """Return the table: target, median case and worst case of every figure."""
    chosen = [row for row in rows if row["method"] == "chosen" and row["layout"] != "single"]
    large = [row for row in chosen if _run_bytes(row) >= _LARGE_RUN_BYTES]
    many = [row for row in chosen if row["run_count"] >= _MANY_RUNS]
    few = [row for row in chosen if row["run_count"] < _MANY_RUNS]
    one_way = ("offload", "load")
    lines = [
        _conditions(machine),
        "",
        "| figure | target | median | worst |",
        "|---|---|---|---|",
        *(_shares(f"{way}, runs from 64 KiB on", ">= 95 %", _of(large, way)) for way in one_way),
        *(
            _shares(f"{way}, pages of 16 KiB", ">= 80 %", _pages(chosen, way, 16))
            for way in one_way
        ),
        *(_shares(f"{way}, pages of 4 KiB", ">= 50 %", _pages(chosen, way, 4)) for way in one_way),
        _shares("both at once, runs from 64 KiB on", ">= 85 %", _of(large, "both")),
        _cpu(f"CPU per run, {_MANY_RUNS} runs and more", many),
        _cpu("CPU per run, fewer", few),
        _slowdown([row for row in beside if row["method"] == "chosen"]),
        "",
        "Shares are of large copies of the same bytes, two of them for both at once; pages as HND.",
    ]
    return "\n".join(lines)


def plot(path: Path, rows: list[Row]) -> None:
    """Draw the share of a large copy, one panel per layout.

    Over the page size with the largest chunks; over the number of runs with the smallest pages.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    layouts = sorted({row["layout"] for row in rows})
    figure, axes = plt.subplots(1, len(layouts), figsize=(5 * len(layouts), 4), squeeze=False)
    for axis, layout in zip(axes[0], layouts, strict=True):
        over, label = ("page_bytes", "bytes per page")
        drawn = [row for row in rows if row["layout"] == layout]
        if layout == "single":
            over, label = ("run_count", "runs of the smallest page")
            smallest = min(row["page_bytes"] for row in drawn)
            drawn = [row for row in drawn if row["page_bytes"] == smallest]
        for method in sorted({row["method"] for row in drawn}):
            for direction, style in (("offload", "-"), ("load", "--")):
                wanted = (method, direction)
                points = {
                    row[over]: row["share"]
                    for row in sorted(drawn, key=lambda row: row["chunk_bytes"])
                    if (row["method"], row["direction"]) == wanted
                }
                axis.plot(
                    *zip(*sorted(points.items()), strict=True),
                    style,
                    marker=".",
                    label=" ".join(wanted),
                )
        axis.set(xscale="log", title=layout, xlabel=label, ylabel="share of a large copy")
        axis.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def _run_bytes(row: Row) -> float:
    return float(row["chunk_bytes"] * row["chunk_count"] / row["run_count"])


def _of(rows: Iterable[Row], direction: str) -> list[Row]:
    return [row for row in rows if row["direction"] == direction]


def _pages(rows: Iterable[Row], direction: str, page_kib: int) -> list[Row]:
    pages = [row for row in rows if row["page_bytes"] == page_kib << 10 and row["layout"] == "hnd"]
    return _of(pages, direction)


def _shares(name: str, target: str, rows: list[Row]) -> str:
    def text(row: Row) -> str:
        return (
            f"{row['share']:.0%} ({row['gb_per_s']:.1f} of {row['large_copy_gb_per_s']:.1f} GB/s)"
        )

    return _line(name, target, rows, lambda row: -row["share"], text)


def _cpu(name: str, rows: list[Row]) -> str:
    def text(row: Row) -> str:
        return f"{row['cpu_us_per_run']:.2f} us ({row['run_count']} runs)"

    return _line(name, "<= 0.2 us", rows, lambda row: row["cpu_us_per_run"], text)


def _slowdown(rows: list[Row]) -> str:
    def text(row: Row) -> str:
        return f"{row['slowdown']:.1%} ({row['direction']} at {row['gb_per_s']:.1f} GB/s)"

    name = "a compute kernel beside copies takes longer by"
    return _line(name, "< 3 %", rows, lambda row: row["slowdown"], text)


def _line(
    name: str,
    target: str,
    rows: list[Row],
    badness: Callable[[Row], float],
    text: Callable[[Row], str],
) -> str:
    if not rows:
        return f"| {name} | {target} | not measured | |"
    middle = statistics.median_low([badness(row) for row in rows])
    median = next(row for row in rows if badness(row) == middle)
    worst = max(rows, key=badness)
    where = f"pages of {worst['page_bytes'] >> 10} KiB"
    if "layout" in worst:
        where += f", {worst['layout']}, chunks of {worst['chunk_bytes'] >> 10} KiB"
    return f"| {name} | {target} | {text(median)} | {text(worst)}, {where} |"


def _conditions(machine: Row) -> str:
    names = ("card", "driver", "driver_cuda", "runtime_cuda", "cupy", "numpy", "python", "commit")
    facts = [f"{name} {machine[name]}" for name in names if name in machine]
    return f"`scripts/bench_dma.py`, {', '.join(facts)}; medians of {machine['repeats']} runs"
