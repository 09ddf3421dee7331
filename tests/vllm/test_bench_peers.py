import json
import os
import subprocess
import sys

import pytest
from bench.peers_lmcache import why_not_measured
from source_tree import ROOT


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    # The script itself compares every chunk that came back, and stops at a wrong one.
    folder = tmp_path_factory.mktemp("peers")
    report = folder / "report.json"
    command = [sys.executable, ROOT / "scripts" / "bench_peers.py", folder / "data"]
    tiny = ["--chunks", "64KiB", "--requests", "2", "--bytes", "1MiB", "--pairs", "1"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, *tiny, "--index-chunks", "10000", "--json", report],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    files = {row["peer"]: row["ratios"] for row in results if row["part"] == "files"}
    return done.stdout, files, [row for row in results if row["part"] == "index"]


def test_both_parties_of_the_comparison_return_what_they_stored(small_run) -> None:
    _, files, indices = small_run
    assert files["vllm"]["store / vllm fs store"][0] > 0
    assert files["vllm"]["load / vllm fs load"][0] > 0
    assert [(row["policy"], row["request"]) for row in indices] == [
        (policy, request) for policy in ("lru", "arc") for request in (1, 256)
    ]


def test_lmcache_returns_what_it_stored_or_is_named_as_not_measured(small_run) -> None:
    printed, files, _ = small_run
    if "lmcache" not in files:
        (line,) = [line for line in printed.splitlines() if "lmcache: not measured: " in line]
        pytest.skip(line)
    kinds = [f"{kind}{mode}" for mode in ("", " direct") for kind in ("disk", "fs", "fs_native")]
    for what in ("store", "load"):
        assert [name for name in files["lmcache"] if name.startswith(f"{what} / lmcache")] == [
            f"{what} / lmcache {kind} {what}" for kind in kinds
        ]
    assert all(ratio > 0 for ratios in files["lmcache"].values() for ratio in ratios)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ModuleNotFoundError('gone', name='lmcache')", "not installed"),
        ("ModuleNotFoundError('gone', name='aiofile')", "its module aiofile is not installed"),
        ("ImportError('no libcudart.so.13')", "cannot be imported: no libcudart.so.13"),
    ],
)
def test_a_peer_that_cannot_be_imported_is_named_with_its_reason(
    tmp_path, monkeypatch, error, reason
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmcache"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "lmcache.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "ERROR")
    assert why_not_measured() == reason
