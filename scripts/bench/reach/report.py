"""The rows of `bench_peers.py` in words: the cells that we lose first, then targets beside figures.

A row is what is written as JSON; nothing here measures.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from bench.reach.cells import BESIDE

__all__ = ["cell_lines", "other_lines", "spread"]

OURS, THEIRS = "tierstore", "vllm fs"
SHARES = (1.0, 1.5)
LOST_SECONDS_MAX, LOST_CHUNK_BYTES = 0.15, 1 << 20
CPU_SECONDS_MAX, CPU_CHUNK_BYTES = {"store": 0.25, "load": 0.2}, 64 << 10
RAW_SHARES_MIN = {512 << 20: 0.95, 128 << 20: 0.9}

Row = dict[str, Any]


def cell_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Describe the table: cells lost, the others, shares of cells, and the targets."""
    ordered = sorted(rows, key=_ratio)
    lost = [row for row in ordered if _ratio(row) < 1]
    heading = (
        f"  {'cell':58} {'tierstore GB/s':>19} {'vLLM GB/s':>19} {'ratio':>19}"
        f"  {'CPU s/GB':>11}  interpreter lost s/GB"
    )
    yield f"\ncells that we lose (ratio below 1): {len(lost)} of {len(ordered)}, the worst first"
    yield from [heading, *map(_cell_line, lost)] if lost else ["  none"]
    yield "\nthe other cells, the closest first"
    yield from [heading, *map(_cell_line, ordered[len(lost) :])]
    yield "\nshare of cells"
    yield _share_line("all", rows)
    for name in ("device", "beside", "what"):
        of_name = itemgetter(name)
        for value, group in groupby(sorted(rows, key=of_name), of_name):
            yield _share_line(value, list(group))
    yield from _lost_lines([row for row in rows if row["beside"] != BESIDE[0]])
    yield from _cpu_lines([row for row in rows if row["beside"] == BESIDE[0]])


def other_lines(row: Row) -> Iterator[str]:
    """Describe a row of one of the other parts."""
    if row["part"] == "index":
        yield f"\nindex, {row['policy']}, {row['request']} chunks per request"
        for name, values in row["microseconds_per_chunk"].items():
            yield f"  {name:24} {spread(values)} us per chunk"
    else:
        requests = f"{row['requests_at_once']} request(s) at once"
        size = row["bytes_per_run"]
        what = f"files beside {row['peer']}" if row["part"] == "files" else "bursts beside raw"
        yield f"\n{what}, {size >> 20} MiB in chunks of {row['chunk_bytes'] >> 10} KiB, {requests}"
        for name, values in row["gigabytes_per_second"].items():
            cpu = median(row["cpu_seconds_per_gigabyte"][name])
            yield f"  {name:32} {spread(values)} GB/s  {cpu:.2f} CPU s/GB"
    for what, values in row["ratios"].items():
        target = ""
        if row["part"] == "bursts" and "overwrite" not in what:
            share = RAW_SHARES_MIN.get(row["bytes_per_run"])
            target = _verdict(median(values), share, above=True) if share else ""
        yield f"  ratio {what:40} {spread(values)}{target}"


def spread(values: Sequence[float]) -> str:
    """Return median, lowest and highest in words."""
    between = "-" if min(values) >= 0 else " to "
    return f"{median(values):6.2f} ({min(values):.2f}{between}{max(values):.2f})"


def _ratio(row: Row) -> float:
    return float(median(row["ratios"]))


def _name(row: Row) -> str:
    chunk = f"{row['chunk_bytes'] >> 10} KiB"
    return f"{row['device']}, {chunk}, {row['requests']:2}, {row['what']}, {row['beside']}"


def _figures(row: Row, party: str, figure: str) -> list[float]:
    return list(row["parties"][party][f"{figure}_per_gigabyte"])


def _cell_line(row: Row) -> str:
    ours, theirs = (row["parties"][name]["gigabytes_per_second"] for name in (OURS, THEIRS))
    cpu, lost = (
        [median(_figures(row, name, figure)) for name in (OURS, THEIRS)]
        if figure == "cpu_seconds" or row["beside"] != BESIDE[0]
        else []
        for figure in ("cpu_seconds", "lost_seconds")
    )
    return (
        f"  {_name(row):58} {spread(ours):>19} {spread(theirs):>19} {spread(row['ratios']):>19}"
        f"  {cpu[0]:.2f} : {cpu[1]:.2f}  " + (f"{lost[0]:.2f} : {lost[1]:.2f}" if lost else "")
    ).rstrip()


def _share_line(name: str, rows: Sequence[Row]) -> str:
    counts = [sum(_ratio(row) >= share for row in rows) for share in SHARES]
    shares = "  ".join(
        f">= {share:.1f}: {count:3} of {len(rows):3} ({count / len(rows):4.0%})"
        for share, count in zip(SHARES, counts, strict=True)
    )
    return f"  {name:24} {shares}"


def _lost_lines(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    lost = {
        name: [median(_figures(row, name, "lost_seconds")) for row in rows]
        for name in (OURS, THEIRS)
    }
    more = [
        (ours - theirs, row, ours, theirs)
        for row, ours, theirs in zip(rows, lost[OURS], lost[THEIRS], strict=True)
        if ours > theirs
    ]
    yield (
        "\ninterpreter time that a busy thread loses, seconds per GB: more than beside vLLM's tier "
        f"in {len(more)} of {len(rows)} cells, the worst first"
    )
    for _, row, ours, theirs in sorted(more, key=lambda found: -found[0]):
        yield f"  {_name(row):58} {ours:6.2f}, vLLM {theirs:.2f}"
    yield from _limit_lines(rows, "lost_seconds", LOST_CHUNK_BYTES, lambda _: LOST_SECONDS_MAX)


def _cpu_lines(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "\nCPU seconds per GB"
    yield from _limit_lines(
        rows, "cpu_seconds", CPU_CHUNK_BYTES, lambda row: CPU_SECONDS_MAX[row["what"]]
    )


def _limit_lines(
    rows: Sequence[Row], figure: str, chunk_bytes: int, limit_of: Callable[[Row], float]
) -> Iterator[str]:
    for row in rows:
        if row["chunk_bytes"] == chunk_bytes:
            values = _figures(row, OURS, figure)
            verdict = _verdict(median(values), limit_of(row), above=False)
            yield f"  {_name(row):58} {spread(values)}{verdict}"


def _verdict(value: float, target: float, *, above: bool) -> str:
    met = value >= target if above else value <= target
    return f"  target {'>=' if above else '<='} {target:g}{'' if met else ', missed'}"
