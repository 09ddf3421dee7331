import json
import os
import subprocess
import sys

from source_tree import ROOT


def test_the_copy_benchmark_runs_without_a_gpu_and_says_so(tmp_path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "bench_dma.py", "--device", "cpu"]
    tiny = ["--pages", "4", "--mib", "1", "--repeats", "1", "--layouts", "hnd", "padded", "blocks"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *tiny, "--json", report],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert "no GPU" in done.stdout
    found = json.loads(report.read_text())
    assert found["machine"]["commit"]
    cases = {(row["layout"], row["direction"]) for row in found["copies"]}
    layouts, directions = ("hnd", "padded", "blocks"), ("offload", "load", "both")
    assert cases == {(layout, direction) for layout in layouts for direction in directions}
    assert all(row["gb_per_s"] > 0 and row["large_copy_gb_per_s"] > 0 for row in found["copies"])
