import json
import os
import subprocess
import sys

import pytest
from bench.peers_lmcache import why_not_measured
from source_tree import ROOT


def run_script(*arguments):
    """The script itself compares every chunk that came back, and stops at a wrong one."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_peers.py", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TINY = ["--chunks", "64KiB", "--requests", "2", "--bytes", "1MiB", "--pairs", "1"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    report = folder / "report.json"
    parts = ["--parts", "files", "index", "--index-chunks", "10000"]
    printed = run_script(folder / "data", *TINY, *parts, "--json", report)
    results = json.loads(report.read_text())["results"]
    files = {row["peer"]: row["ratios"] for row in results if row["part"] == "files"}
    return printed, files, [row for row in results if row["part"] == "index"]


@pytest.fixture(scope="module")
def small_table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    report = folder / "report.json"
    bursts = ["--bursts", "2MiB", "--burst-chunks", "256KiB"]
    printed = run_script(folder / "data", *TINY, *bursts, "--json", report)
    return printed, json.loads(report.read_text()), folder / "data"


def test_every_cell_of_the_table_is_measured_with_both_parties(small_table) -> None:
    printed, found, _ = small_table
    rows = [row for row in found["results"] if row["part"] == "cells"]
    left_out = [
        name for name in ("disk", "tmpfs", "fast device") if f"{name}: not measured: " in printed
    ]
    cells = {(row["device"], row["what"], row["beside"]) for row in rows}
    assert cells == {
        (device, what, beside)
        for device in {"disk", "tmpfs", "fast device"} - set(left_out)
        for what in ("store", "load")
        for beside in ("alone", "beside a busy thread")
    }
    for row in rows:
        assert list(row["parties"]) == ["tierstore", "vllm fs"]
        assert row["bytes_per_run"] == 1 << 20
        for figures in row["parties"].values():
            assert figures["gigabytes_per_second"][0] > 0
            assert ("lost_seconds_per_gigabyte" in figures) == (row["beside"] != "alone")
    if left_out:
        pytest.skip(f"not measured here: {', '.join(left_out)}")


def test_the_peer_of_the_table_runs_its_c_extension(small_table) -> None:
    printed, found, _ = small_table
    assert found["conditions"]["vllm_c_extension"] is True
    assert "flatters" not in printed


def test_bursts_are_shares_of_the_raw_device(small_table) -> None:
    _, found, _ = small_table
    (row,) = [row for row in found["results"] if row["part"] == "bursts"]
    assert row["bytes_per_run"] == 2 << 20
    assert list(row["ratios"]) == ["store / raw write", "store / raw overwrite", "load / raw read"]


def test_the_table_leaves_nothing_behind(small_table) -> None:
    _, _, data = small_table
    assert list(data.iterdir()) == []


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
