import copy
import itertools
import json
import subprocess
import sys

import bench_dma
import pytest
from bench import dma_devices, dma_shapes
from bench.dma_devices import CpuDevice, CudaDevice
from bench.dma_report import summary
from python_paths import ROOT, environment

from tierstore.testing.fake_cuda import FakeCuda


def test_the_copy_benchmark_runs_without_a_gpu_and_says_so(tmp_path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "bench_dma.py", "--device", "cpu"]
    tiny = ["--pages", "4", "64", "--chunks", "64", "--mib", "1", "--repeats", "1"]
    done = subprocess.run(
        [*command, *tiny, "--json", report],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "no GPU" in done.stdout
    found = json.loads(report.read_text())
    assert found["machine"]["commit"]
    cases = {(row["layout"], row["page_bytes"], row["direction"]) for row in found["copies"]}
    layouts, directions = ("hnd", "padded", "blocks", "single"), ("offload", "load", "both")
    assert cases == set(itertools.product(layouts, (4 << 10, 64 << 10), directions))
    single = [row for row in found["copies"] if row["layout"] == "single"]
    assert {row["chunk_count"] for row in single} == {1, 10, 100}  # more are more than 1 MiB
    assert all(row["gb_per_s"] > 0 and row["large_copy_gb_per_s"] > 0 for row in found["copies"])


SIZES_KIB = [
    (page, chunk)
    for page, chunk in itertools.product(bench_dma.PAGES_KIB, bench_dma.CHUNKS_KIB)
    if page <= chunk
]


@pytest.mark.parametrize("layout", bench_dma.LAYOUTS)
@pytest.mark.parametrize(("page_kib", "chunk_kib"), SIZES_KIB)
def test_chunks_have_the_size_and_the_runs_that_were_asked_for(layout, page_kib, chunk_kib) -> None:
    shape = bench_dma.chunk_shape(layout, page_kib << 10, chunk_kib << 10, 16 << 20)
    assert shape.chunk_bytes == chunk_kib << 10
    assert shape.layer_count <= dma_shapes.LAYER_COUNT
    assert shape.chunk_count * shape.chunk_bytes <= 16 << 20
    setup = bench_dma.Setup(CpuDevice(), shape)
    runs_per_chunk = shape.blocks_per_chunk * (1 if layout == "blocks" else shape.layer_count)
    assert setup.run_count in range(shape.chunk_count * runs_per_chunk // 2, 10_001)
    setup.close()


def gpu_over_fake(monkeypatch) -> CudaDevice:
    """The GPU of the benchmark over a fake CUDA, which several engines share."""
    fake = FakeCuda()
    monkeypatch.setattr(dma_devices, "CupyApi", lambda *_, **__: copy.copy(fake))
    fake.use_device()
    return CudaDevice("cuda:0")


def test_every_method_is_forced_on_a_gpu_and_every_copy_arrives(monkeypatch) -> None:
    device = gpu_over_fake(monkeypatch)
    tiny = ["--pages", "4", "--chunks", "64", "--runs", "1", "3", "--mib", "1", "--repeats", "1"]
    found = list(bench_dma.run_cases(device, bench_dma.parse_options(tiny)))
    methods = {"chosen", "plain", "batch", "pitched", "kernel"}
    assert {case.method for case, _ in found} == methods
    assert {case.run_count for case, _ in found if case.layout == "single"} == {1, 3}
    assert all(figures.share > 0 and figures.cpu_us_per_run > 0 for _, figures in found)


def test_the_kernels_loss_beside_copies_is_told(monkeypatch) -> None:
    device = gpu_over_fake(monkeypatch)

    def compute(beside) -> float:
        before = len(device._api.calls)
        beside()
        return 3.0 if len(device._api.calls) > before else 2.0

    monkeypatch.setattr(device, "compute", compute)
    tiny = ["--pages", "4", "--chunks", "64", "--mib", "1", "--repeats", "1"]
    found = list(bench_dma.run_beside_compute(device, bench_dma.parse_options(tiny)))
    assert {row.direction for row in found} == set(bench_dma.DIRECTIONS)
    assert {row.slowdown for row in found} == {0.5}
    assert all(row.gb_per_s > 0 for row in found)


MACHINE = {"card": "H200", "driver": "570.86.15", "commit": "abc1234", "repeats": 5}
COPY = {"layout": "hnd", "method": "chosen", "chunk_count": 32, "gb_per_s": 45.0}
COPY |= {"large_copy_gb_per_s": 50.0, "cpu_us_per_run": 0.1, "run_count": 512}


def copied(direction: str, page_kib: int, share: float, **others) -> dict:
    page_bytes = page_kib << 10
    sizes = {"page_bytes": page_bytes, "chunk_bytes": 16 * page_bytes}
    return COPY | sizes | {"direction": direction, "share": share} | others


def test_the_table_names_the_median_and_the_worst_case_of_every_figure() -> None:
    rows = [
        *(copied("load", 64, share) for share in (0.97, 0.96, 0.91)),
        copied("load", 64, 0.2, method="plain"),
        copied("load", 64, 0.3, layout="single"),
        copied("load", 16, 0.85),
        copied("load", 16, 0.1, layout="padded"),
        copied("offload", 4, 0.55, cpu_us_per_run=0.3),
        copied("offload", 4, 0.98, layout="blocks", chunk_count=512, cpu_us_per_run=0.25),
        copied("both", 1024, 0.86, chunk_count=2, run_count=32, cpu_us_per_run=4.0),
    ]
    beside = [
        {"page_bytes": 4096, "direction": way, "method": method, "gb_per_s": 40.0, "slowdown": lost}
        for way, method, lost in [
            ("load", "chosen", 0.01),
            ("both", "chosen", 0.02),
            ("load", "plain", 0.5),
        ]
    ]
    lines = summary(MACHINE, rows, beside).splitlines()
    assert lines[0].endswith("card H200, driver 570.86.15, commit abc1234; medians of 5 runs")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:-2]]
    figures = {name: (target, *found) for name, target, *found in cells}
    assert figures["load, runs from 64 KiB on"] == (
        ">= 95 %",
        "96% (45.0 of 50.0 GB/s)",
        "91% (45.0 of 50.0 GB/s), pages of 64 KiB, hnd, chunks of 1024 KiB",
    )
    assert figures["offload, runs from 64 KiB on"][1].startswith("98%")  # coalesced pages
    assert figures["load, pages of 16 KiB"][2].startswith("85%")
    assert figures["offload, pages of 4 KiB"][2].startswith("55%")
    assert figures["load, pages of 4 KiB"][1] == "not measured"
    assert figures["both at once, runs from 64 KiB on"][2].startswith("86%")
    assert figures["CPU per run, 256 runs and more"][2].startswith("0.30 us (512 runs)")
    assert figures["CPU per run, fewer"][2].startswith("4.00 us (32 runs)")
    assert figures["a compute kernel beside copies takes longer by"][1:] == (
        "1.0% (load at 40.0 GB/s)",
        "2.0% (both at 40.0 GB/s), pages of 4 KiB",
    )


def test_the_whole_benchmark_of_a_gpu_measures_every_figure(monkeypatch, tmp_path, capsys) -> None:
    device = gpu_over_fake(monkeypatch)
    monkeypatch.setattr(device, "compute", lambda beside: (beside(), 1.0)[1])
    monkeypatch.setattr(bench_dma, "open_device", lambda _: device)
    monkeypatch.setattr(bench_dma, "facts", lambda _: {"card": "none"})
    report = tmp_path / "report.json"
    tiny = ["--pages", "4", "16", "64", "--chunks", "64", "--runs", "1", "--layouts", "hnd"]
    more = ["--mib", "1", "--repeats", "1", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["bench_dma", *tiny, *more])
    bench_dma.main()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line for line in table if "not measured" in line] == []
    assert len(table) == 11
    assert json.loads(report.read_text())["compute"]


def test_shares_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from bench.dma_report import plot

    rows = [
        {
            "layout": layout,
            "page_bytes": page,
            "chunk_bytes": 8 * page,
            "run_count": page,
            "direction": direction,
            "method": "batch",
            "share": 0.5,
        }
        for layout in ("hnd", "single")
        for page in (4096, 8192)
        for direction in bench_dma.DIRECTIONS
    ]
    plot(tmp_path / "dma.png", rows)
    assert (tmp_path / "dma.png").stat().st_size > 0
