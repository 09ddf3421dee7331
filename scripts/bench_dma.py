"""Measure copies between KV-cache blocks and slots, beside one large copy of the same bytes.

    scripts/bench_dma.py                      all sizes, on cuda:0 where there is CuPy, else cpu
    scripts/bench_dma.py --quick              a few small cases
    scripts/bench_dma.py --json f --plot f    keep the figures

Every figure is the median of `--repeats` runs (with the slowest and the fastest in the JSON), and
beside each stands the large copy, measured in alternation. CPU time is that of the submitting call;
what waits for room in a stream (plain copies, from 768 on) is submitted later and not counted. On a
GPU every method is forced in turn, `chosen` is what tierstore would do; then a compute kernel runs
beside the copies: what they reach then, and what the kernel loses; and at the end comes a table of
`chosen` that says how far the targets are met. Without a GPU only the host engine's memmove is
measured: the script works, and its figures say nothing about a bus.

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

import numpy as np
from bench.dma_devices import ComputeDevice, CpuDevice, CudaDevice, Device, facts, open_device
from bench.dma_plot import plot
from bench.dma_summary import summary

from tierstore.dma.protocol import CopyEngine, CopyId
from tierstore.dma.runs import GroupAddressing
from tierstore.layout import (
    PAGE_BYTES,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ChunkOrder,
    round_up,
)
from tierstore.memory import HostPool

PAGES_KIB = (4, 16, 64, 256, 1024)
CHUNKS_KIB = (64, 512, 8192)
RUN_COUNTS = (1, 10, 100, 1000, 10_000)
LAYOUTS = ("hnd", "padded", "blocks")
LAYER_COUNT = 32
GAP_BYTES = 512
DIRECTIONS = ("offload", "load", "both")


@dataclass(frozen=True)
class Shape:
    """What is copied at once."""

    layout: str
    page_bytes: int
    layer_count: int
    blocks_per_chunk: int
    chunk_count: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.page_bytes * self.layer_count * self.blocks_per_chunk


@dataclass(frozen=True)
class Case:
    """What is copied, and how."""

    layout: str
    page_bytes: int
    chunk_bytes: int
    chunk_count: int
    run_count: int
    direction: str
    method: str


@dataclass(frozen=True)
class Figures:
    """What came out: medians, and the range of the bandwidth."""

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


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    """Pages and chunks of all sizes in every layout, then single pages by their number."""
    total_bytes = options.mib << 20
    for layout in options.layouts:
        for page_kib in options.pages:
            for chunk_kib in options.chunks:
                if chunk_kib >= page_kib:
                    yield chunk_shape(layout, page_kib << 10, chunk_kib << 10, total_bytes)
    for page_kib in options.pages:
        for run_count in options.runs:
            if run_count * (page_kib << 10) <= total_bytes:
                yield Shape("single", page_kib << 10, 1, 1, run_count)


def chunk_shape(layout: str, page_bytes: int, chunk_bytes: int, total_bytes: int) -> Shape:
    """Fill chunks with pages, and as many bytes as asked for, but no more than 10,000 runs."""
    layers = min(LAYER_COUNT, chunk_bytes // page_bytes)
    blocks_per_chunk = chunk_bytes // (layers * page_bytes)
    runs_per_chunk = blocks_per_chunk * (1 if layout == "blocks" else layers)
    count = min(total_bytes // chunk_bytes, max(RUN_COUNTS) // runs_per_chunk)
    return Shape(layout, page_bytes, layers, blocks_per_chunk, max(1, count))


class Setup:
    """Registered caches and slots of one shape: half of each for offloads, half for loads."""

    def __init__(self, device: Device, shape: Shape) -> None:
        self.device = device
        self.shape = shape
        slot_pages = round_up(shape.chunk_bytes, PAGE_BYTES) // PAGE_BYTES
        self.block_count = 2 * shape.chunk_count * shape.blocks_per_chunk
        pool_bytes = 2 * shape.chunk_count * slot_pages * PAGE_BYTES
        self.pool = HostPool(pool_bytes, huge_pages=True)  # as a configuration has it
        gap = GAP_BYTES if shape.layout == "padded" else 0
        self._address = device.alloc(
            self.block_count * shape.layer_count * (shape.page_bytes + gap)
        )
        self.caches = self._caches(shape.layout, shape.page_bytes, gap, shape.layer_count)
        random = np.random.default_rng(0)
        halves = (2, shape.chunk_count, shape.blocks_per_chunk)
        self.blocks = random.permutation(self.block_count).reshape(halves)
        self.slots = random.permutation(2 * shape.chunk_count).reshape(2, -1) * slot_pages
        addressing = GroupAddressing(
            self.caches, 0, shape.blocks_per_chunk, self.pool.address, self.pool.size_bytes
        )
        self.run_count = len(addressing.runs(self.blocks[0], self.slots[0]))

    def _caches(self, layout: str, page_bytes: int, gap: int, layers: int) -> CanonicalKVCaches:
        layer_bytes = self.block_count * (page_bytes + gap)
        together = layout == "blocks"
        tensors = tuple(
            CanonicalKVCacheTensor(
                address=self._address + layer * (page_bytes if together else layer_bytes),
                block_count=self.block_count,
                block_stride_bytes=layers * page_bytes if together else page_bytes + gap,
                page_bytes=page_bytes,
                owner=self,
            )
            for layer in range(layers)
        )
        refs = tuple(CanonicalKVCacheRef(layer_name=str(i), tensor_idx=i) for i in range(layers))
        order = ChunkOrder.BLOCK_MAJOR if together else ChunkOrder.LAYER_MAJOR
        return CanonicalKVCaches(
            tensors=tensors, group_refs=(refs,), chunk_order=order, device=self.device.name
        )

    def engine(self, method: str) -> CopyEngine:
        """Return an engine that copies by one method, with the whole pool pinned."""
        engine = self.device.engine(method)
        engine.register(
            self.caches, self.shape.blocks_per_chunk, self.pool.address, self.pool.size_bytes
        )
        return engine

    def copied_bytes(self, direction: str) -> int:
        """Return the bytes of one run of a case."""
        half = self.shape.chunk_count * self.shape.chunk_bytes
        return half * (2 if direction == "both" else 1)

    def large_copy(self, direction: str) -> float:
        """Return the seconds of copying the same bytes at once."""
        half = self.shape.chunk_count * self.shape.chunk_bytes
        return self.device.large_copy(direction, self._address, self.pool.address, half)

    def close(self) -> None:
        """Give the memory back."""
        self.device.free(self._address)
        self.pool.close()


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
    """Poll until all have arrived."""
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
    """Let a compute kernel run beside copies of every page size, method and direction."""
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

    Returns the GB/s of the copies and the share of time that the kernel takes longer.
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
        print("no GPU: host engine (memmove) only; these figures say nothing about a bus")
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
