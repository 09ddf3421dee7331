"""Measure copies between KV-cache blocks and slots, against one large copy of the same bytes.

    scripts/bench_dma.py                      all sizes, on cuda:0 if CuPy is installed, else cpu
    scripts/bench_dma.py --quick              a few small cases
    scripts/bench_dma.py --json f --plot f    keep the figures

Every figure is the median of `--repeats` runs (with the slowest and the fastest in the JSON), next
to the large copy, which is measured in alternation. CPU time is that of the submitting call; copies
that wait for room in a stream (plain copies, from 768 on) are submitted later and not counted.

On a GPU every method is forced in turn; `chosen` is the method that tierstore would use. Then a
compute kernel runs beside the copies: the script measures their bandwidth, and how much the kernel
slows down. The last table compares `chosen` with the targets. Without a GPU only the host engine's
memmove is measured; these figures do not apply to a bus.

    pages      4 KiB .. 1 MiB: bytes of one layer of one block
    chunks     64 KiB .. 8 MiB, of one or more pages of up to 32 layers
    layouts    hnd: layers apart, as vLLM's LBHNC;  padded: the same with gaps between pages;
               blocks: all layers of a block together, as BLHNC
    runs       1 .. 10,000 scattered pages that are a chunk each, as layout `single`
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.dma_devices import ComputeDevice, CpuDevice, CudaDevice, Device, facts, open_device
from bench.dma_report import plot, summary
from bench.dma_shapes import (
    CHUNKS_KIB,
    LAYOUTS,
    PAGES_KIB,
    RUN_COUNTS,
    Setup,
    chunk_shape,
    shapes,
)

from tierstore.dma.protocol import CopyEngine, CopyId

DIRECTIONS = ("offload", "load", "both")


@dataclass(frozen=True)
class Case:
    """A case: the bytes, and the method."""

    layout: str
    page_bytes: int
    chunk_bytes: int
    chunk_count: int
    run_count: int
    direction: str
    method: str


@dataclass(frozen=True)
class Figures:
    """The results of a case: medians, and the range of the bandwidth."""

    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    large_copy_gb_per_s: float
    share: float
    cpu_us_per_chunk: float
    cpu_us_per_run: float


@dataclass(frozen=True)
class BesideCompute:
    """Copies and a compute kernel at once."""

    page_bytes: int
    direction: str
    method: str
    gb_per_s: float
    slowdown: float


def submit(engine: CopyEngine, setup: Setup, direction: str) -> set[CopyId]:
    """Submit one run of a case: offloads take half of the blocks and slots, loads the other."""
    submitted = set()
    if direction in {"offload", "both"}:
        engine.submit_offload(CopyId(1), 0, setup.blocks[0], setup.slots[0])
        submitted.add(CopyId(1))
    if direction in {"load", "both"}:
        engine.submit_load(CopyId(2), 0, setup.blocks[1], setup.slots[1])
        submitted.add(CopyId(2))
    return submitted


def wait(engine: CopyEngine, copy_ids: set[CopyId]) -> None:
    """Poll until all copies have arrived."""
    while copy_ids:
        copy_ids = copy_ids.difference(engine.poll())
        if engine.take_failed():
            sys.exit("a copy failed; see the log")


def measure(setup: Setup, engine: CopyEngine, direction: str, repeats: int) -> Figures:
    """Time one case and the large copy in alternation; the first round warms up."""
    rates, large_rates, cpu_seconds = [], [], []
    size = setup.copied_bytes(direction)
    for round_idx in range(repeats + 1):
        large_seconds = setup.large_copy(direction)
        started_at = perf_counter()
        copy_ids = submit(engine, setup, direction)
        submitted_at = perf_counter()
        wait(engine, copy_ids)
        seconds = perf_counter() - started_at
        if round_idx:
            rates.append(size / seconds / 1e9)
            large_rates.append(size / large_seconds / 1e9)
            cpu_seconds.append(submitted_at - started_at)
    both = 2 if direction == "both" else 1
    rate, large_rate = statistics.median(rates), statistics.median(large_rates)
    cpu_us = statistics.median(cpu_seconds) * 1e6
    return Figures(
        gb_per_s=rate,
        gb_per_s_min=min(rates),
        gb_per_s_max=max(rates),
        large_copy_gb_per_s=large_rate,
        share=rate / large_rate,
        cpu_us_per_chunk=cpu_us / (setup.shape.chunk_count * both),
        cpu_us_per_run=cpu_us / (setup.run_count * both),
    )


def run_cases(device: Device, options: argparse.Namespace) -> Iterator[tuple[Case, Figures]]:
    """Measure all shapes, methods and directions."""
    for shape in shapes(options):
        setup = Setup(device, shape)
        for method in device.methods():
            engine = setup.engine(method)
            for direction in DIRECTIONS:
                case = Case(
                    shape.layout,
                    shape.page_bytes,
                    shape.chunk_bytes,
                    shape.chunk_count,
                    setup.run_count,
                    direction,
                    method,
                )
                yield case, measure(setup, engine, direction, options.repeats)
            engine.close()
        setup.close()


def run_beside_compute(
    device: ComputeDevice, options: argparse.Namespace
) -> Iterator[BesideCompute]:
    """Run a compute kernel beside copies of every page size, method and direction."""
    for page_kib in options.pages:
        page_bytes = page_kib << 10
        chunk_bytes = max(page_kib, *options.chunks) << 10
        setup = Setup(device, chunk_shape("hnd", page_bytes, chunk_bytes, options.mib << 20))
        for method in device.methods():
            engine = setup.engine(method)
            for direction in DIRECTIONS:
                rate, slowdown = beside_compute(device, setup, engine, direction, options.repeats)
                yield BesideCompute(page_bytes, direction, method, rate, slowdown)
            engine.close()
        setup.close()


def beside_compute(
    device: ComputeDevice, setup: Setup, engine: CopyEngine, direction: str, repeats: int
) -> tuple[float, float]:
    """Time the compute kernel alone and beside copies, in alternation.

    Returns the GB/s of the copies, and the kernel's slowdown as a share of its time.
    """
    seconds: list[float] = []

    def copy() -> None:
        started_at = perf_counter()
        wait(engine, submit(engine, setup, direction))
        seconds.append(perf_counter() - started_at)

    alone, beside = [], []
    for _ in range(repeats):
        alone.append(device.compute(lambda: None))
        beside.append(device.compute(copy))
    rate = setup.copied_bytes(direction) / statistics.median(seconds) / 1e9
    return rate, statistics.median(beside) / statistics.median(alone) - 1


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or the arguments of a test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="cpu or cuda:<index>")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="bytes per case and direction")
    parser.add_argument("--pages", type=int, nargs="+", default=list(PAGES_KIB), help="in KiB")
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS_KIB), help="in KiB")
    parser.add_argument(
        "--runs", type=int, nargs="*", default=list(RUN_COUNTS), help="numbers of single pages"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.pages, options.chunks, options.runs = [4, 64], [512], [1, 100]
        options.mib, options.repeats = 8, 3
    return options


def main() -> None:
    """Print a table and keep it."""
    options = parse_options()
    device = open_device(options.device)
    machine = facts(device) | {"repeats": options.repeats}
    print(json.dumps(machine))
    if isinstance(device, CpuDevice):
        print("no GPU: host engine (memmove) only; these figures do not apply to a bus")
    print("layout  page KiB  chunk KiB    runs  direction  method    GB/s  large  share", end="")
    print("  us/chunk  us/run")
    rows: list[dict[str, Any]] = []
    for case, figures in run_cases(device, options):
        rows.append(asdict(case) | asdict(figures))
        print(
            f"{case.layout:7} {case.page_bytes >> 10:8} {case.chunk_bytes >> 10:10}"
            f" {case.run_count:7}  {case.direction:9}  {case.method:8}"
            f"{figures.gb_per_s:6.2f} {figures.large_copy_gb_per_s:6.2f} {figures.share:6.0%}"
            f" {figures.cpu_us_per_chunk:9.2f} {figures.cpu_us_per_run:7.3f}",
            flush=True,
        )
    beside: list[dict[str, Any]] = []
    if isinstance(device, CudaDevice):
        print("beside a compute kernel: page KiB  direction  method    GB/s  kernel slower by")
        for found in run_beside_compute(device, options):
            beside.append(asdict(found))
            print(
                f"{found.page_bytes >> 10:33}  {found.direction:9}  {found.method:8}"
                f"{found.gb_per_s:6.2f} {found.slowdown:+17.1%}",
                flush=True,
            )
        print(summary(machine, rows, beside))
    if options.json:
        report = {"machine": machine, "copies": rows, "compute": beside}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
