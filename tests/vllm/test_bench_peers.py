import json
import os
import subprocess
import sys

from source_tree import ROOT


def test_both_parties_of_the_comparison_return_what_they_stored(tmp_path) -> None:
    # The script itself compares every chunk that came back, and stops at a wrong one.
    report = tmp_path / "report.json"
    command = [sys.executable, ROOT / "scripts" / "bench_peers.py", tmp_path / "data"]
    tiny = ["--chunks", "64KiB", "--requests", "2", "--bytes", "1MiB", "--pairs", "1"]
    done = subprocess.run(
        [*command, *tiny, "--index-chunks", "10000", "--json", report],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lmcache: not measured" in done.stdout
    files, *indices = json.loads(report.read_text())["results"]
    assert files["ratios"]["store / vllm fs store"][0] > 0
    assert files["ratios"]["load / vllm fs load"][0] > 0
    assert [(row["policy"], row["request"]) for row in indices] == [
        (policy, request) for policy in ("lru", "arc") for request in (1, 256)
    ]
