"""Measure copies between KV-cache blocks and slots, beside one large copy of the same bytes.

    scripts/bench_dma.py                      all sizes, on cuda:0 where there is CuPy, else cpu
    scripts/bench_dma.py --quick              a few small cases
    scripts/bench_dma.py --json f --plot f    keep the figures

Every figure is the median of `--repeats` runs (with the slowest and the fastest in the JSON), and
beside each stands the large copy, measured in alternation. On a GPU every method is forced in turn,
`chosen` is what tierstore would do; then a compute kernel runs beside the copies, and what it loses
is measured. Without a GPU only the host engine's memmove is measured: the script works, and its
figures say nothing about a bus.

    pages      4 KiB .. 1 MiB: bytes of one layer of one block
    layouts    hnd: layers apart, as vLLM's LBHNC;  padded: the same with gaps between pages;
               blocks: all layers of a block together, as BLHNC
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from dma_devices import CpuDevice, CudaDevice, Device, facts, open_device

from tierstore.dma.protocol import CopyEngine, CopyId
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
CHUNK_BYTES_MAX = 8 << 20
RUNS_MAX = 10_000
LAYER_COUNT = 32
GAP_BYTES = 512


@dataclass(frozen=True)
class Case:
    """What is copied, and how."""

    layout: str
    page_bytes: int
    chunk_count: int
    blocks_per_chunk: int
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
    cpu_us_per_page: float


class Setup:
    """Registered caches and slots of one layout and page size."""

    def __init__(self, device: Device, layout: str, page_bytes: int, total_bytes: int) -> None:
        self.device = device
        layers = min(LAYER_COUNT, max(1, CHUNK_BYTES_MAX // page_bytes))
        self.blocks_per_chunk = max(1, (64 << 10) // (layers * page_bytes))
        block_bytes = layers * page_bytes
        self.chunk_bytes = block_bytes * self.blocks_per_chunk
        by_bytes = total_bytes // self.chunk_bytes
        by_runs = RUNS_MAX // (1 if layout == "blocks" else layers) // self.blocks_per_chunk
        self.chunk_count = max(2, min(by_bytes, by_runs))
        self.page_count = self.chunk_count * self.blocks_per_chunk * layers
        self.slot_pages = round_up(self.chunk_bytes, PAGE_BYTES) // PAGE_BYTES
        self.block_count = 2 * self.chunk_count * self.blocks_per_chunk
        self.pool = HostPool(2 * self.chunk_count * self.slot_pages * PAGE_BYTES)
        gap = GAP_BYTES if layout == "padded" else 0
        self._address = device.alloc(self.block_count * layers * (page_bytes + gap))
        self.caches = self._caches(layout, page_bytes, gap, layers)
        random = np.random.default_rng(0)
        shape = (2, self.chunk_count, self.blocks_per_chunk)
        self.blocks = random.permutation(self.block_count).reshape(shape)
        self.slots = random.permutation(2 * self.chunk_count).reshape(2, -1) * self.slot_pages

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
        engine.register(self.caches, self.blocks_per_chunk, self.pool.address, self.pool.size_bytes)
        return engine

    def copied_bytes(self, direction: str) -> int:
        """Return the bytes of one run of a case."""
        return self.chunk_count * self.chunk_bytes * (2 if direction == "both" else 1)

    def large_copy(self, direction: str) -> float:
        """Return the seconds of copying the same bytes at once."""
        return self.device.large_copy(
            direction, self._address, self.pool.address, self.chunk_count * self.chunk_bytes
        )

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
        cpu_us_per_chunk=cpu_us / (setup.chunk_count * both),
        cpu_us_per_page=cpu_us / (setup.page_count * both),
    )


def run_cases(device: Device, options: argparse.Namespace) -> Iterator[tuple[Case, Figures]]:
    """Measure all layouts, pages, methods and directions."""
    for layout in options.layouts:
        for page_kib in options.pages:
            setup = Setup(device, layout, page_kib << 10, options.mib << 20)
            for method in device.methods():
                engine = setup.engine(method)
                for direction in ("offload", "load", "both"):
                    figures = measure(setup, engine, direction, options.repeats)
                    yield (
                        Case(
                            layout,
                            page_kib << 10,
                            setup.chunk_count,
                            setup.blocks_per_chunk,
                            direction,
                            method,
                        ),
                        figures,
                    )
                engine.close()
            setup.close()


def measure_interference(
    device: CudaDevice, options: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure what a compute kernel loses beside copies, per page size and method."""
    found: list[dict[str, object]] = []
    for page_kib in options.pages:
        setup = Setup(device, "hnd", page_kib << 10, options.mib << 20)
        for method in device.methods():
            engine = setup.engine(method)
            lost = slowdown(device, setup, engine, options.repeats)
            engine.close()
            found.append({"page_bytes": page_kib << 10, "method": method, "slowdown": lost})
            print(f"compute beside {method:8} {page_kib:5} KiB pages: {lost:+.1%}", flush=True)
        setup.close()
    return found


def slowdown(device: CudaDevice, setup: Setup, engine: CopyEngine, repeats: int) -> float:
    """Time the compute kernel alone and beside copies in both directions, in alternation."""

    def copy() -> None:
        wait(engine, submit(engine, setup, "both"))

    alone, beside = [], []
    for _ in range(repeats):
        alone.append(device.compute(lambda: None))
        beside.append(device.compute(copy))
    return statistics.median(beside) / statistics.median(alone) - 1


def plot(path: Path, rows: list[dict[str, object]]) -> None:
    """Draw the share of a large copy over the page size, one panel per layout."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    layouts = sorted({str(row["layout"]) for row in rows})
    figure, axes = plt.subplots(1, len(layouts), figsize=(5 * len(layouts), 4), squeeze=False)
    for axis, layout in zip(axes[0], layouts, strict=True):
        for method in sorted({str(row["method"]) for row in rows}):
            for direction, style in (("offload", "-"), ("load", "--")):
                wanted = (layout, method, direction)
                points = sorted(
                    (row["page_bytes"], row["share"])
                    for row in rows
                    if (row["layout"], row["method"], row["direction"]) == wanted
                )
                axis.plot(*zip(*points, strict=True), style, marker=".", label=" ".join(wanted[1:]))
        axis.set(
            xscale="log", title=layout, xlabel="bytes per page", ylabel="share of a large copy"
        )
        axis.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="cpu or cuda:<index>")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="bytes per case and direction")
    parser.add_argument("--pages", type=int, nargs="+", default=list(PAGES_KIB), help="in KiB")
    parser.add_argument("--layouts", nargs="+", default=["hnd", "padded", "blocks"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.pages, options.mib, options.repeats = [4, 64], 8, 3
    return options


def main() -> None:
    """Print a table and keep it."""
    options = parse_options()
    device = open_device(options.device)
    machine = facts(device)
    print(json.dumps(machine))
    if isinstance(device, CpuDevice):
        print("no GPU: host engine (memmove) only; these figures say nothing about a bus")
    print("layout  page KiB  direction  method    GB/s  large  share  us/chunk  us/page")
    rows: list[dict[str, object]] = []
    for case, figures in run_cases(device, options):
        rows.append(asdict(case) | asdict(figures))
        print(
            f"{case.layout:7} {case.page_bytes >> 10:8}  {case.direction:9}  {case.method:8}"
            f"{figures.gb_per_s:6.2f} {figures.large_copy_gb_per_s:6.2f} {figures.share:6.0%}"
            f" {figures.cpu_us_per_chunk:9.2f} {figures.cpu_us_per_page:8.3f}",
            flush=True,
        )
    beside = measure_interference(device, options) if isinstance(device, CudaDevice) else []
    if options.json:
        report = {"machine": machine, "copies": rows, "compute": beside}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
