import json
import subprocess
import sys

from python_paths import ROOT, environment


def run_script(name, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def test_the_store_benchmark_measures_every_cell_or_says_why_not(tmp_path) -> None:
    report = tmp_path / "report.json"
    tiny = ["--chunks", "64KiB", "--requests", "4", "64", "--bytes", "1MiB", "--runs", "1"]
    done = run_script("bench_store.py", tmp_path / "data", *tiny, "--json", report)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert [result["backend"] for result in results] == ["file", "lmdb"]
    for result in results:
        measured = result["gigabytes_per_second"]
        for kind in ("durable", "write", "read in order", "read random"):
            assert measured[f"store {kind}, 4"][0] > 0
        assert measured["raw write"][0] > 0
        assert any("requests of 64" in reason for reason in result["not_measured"])
        assert result["peak_memory_bytes"] > 1 << 20
    assert not list((tmp_path / "data").iterdir())
