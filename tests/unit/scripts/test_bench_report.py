"""What the table of `bench_peers.py` says of rows that were measured elsewhere."""

import itertools

from bench.reach.report import cell_lines, other_lines


def cell(ours: float, theirs: float, **others) -> dict:
    """A cell with these GB/s."""
    parties = {
        name: {
            "gigabytes_per_second": [rate] * 3,
            "cpu_seconds_per_gigabyte": [0.3] * 3,
            "lost_seconds_per_gigabyte": [lost] * 3,
        }
        for name, rate, lost in (
            ("tierstore", ours, others.pop("our_loss", 0.1)),
            ("vllm fs", theirs, others.pop("their_loss", 0.2)),
        )
    }
    row = {"part": "cells", "device": "tmpfs", "chunk_bytes": 64 << 10, "requests": 1}
    row |= {"what": "store", "beside": "alone", "bytes_per_run": 1 << 20}
    return row | {"parties": parties, "ratios": [ours / theirs] * 3} | others


def place(lines: list[str], text: str) -> int:
    (number,) = [number for number, line in enumerate(lines) if text in line]
    return number


def test_cells_that_we_lose_come_first_and_the_worst_before_all() -> None:
    ratios = {"4 KiB": 1.6, "8 KiB": 0.9, "16 KiB": 0.5, "32 KiB": 1.0}
    rows = [cell(ratio, 1.0, chunk_bytes=int(kib[:-4]) << 10) for kib, ratio in ratios.items()]
    lines = list(cell_lines(rows))
    places = [place(lines, f"tmpfs, {kib},") for kib in ("16 KiB", "8 KiB", "32 KiB", "4 KiB")]
    assert places == sorted(places)
    assert places[1] < place(lines, "the other cells") < places[2]
    assert "2 of 4" in lines[place(lines, "cells that we lose")]


def test_shares_count_the_cells_that_reach_them() -> None:
    rows = [
        cell(ratio, 1.0, device=device)
        for device, ratio in (("disk", 0.9), ("disk", 1.0), ("tmpfs", 1.5), ("tmpfs", 3.0))
    ]
    lines = [" ".join(line.split()) for line in cell_lines(rows)]
    assert "all >= 1.0: 3 of 4 ( 75%) >= 1.5: 2 of 4 ( 50%)" in lines
    assert "disk >= 1.0: 1 of 2 ( 50%) >= 1.5: 0 of 2 ( 0%)" in lines
    assert "tmpfs >= 1.0: 2 of 2 (100%) >= 1.5: 2 of 2 (100%)" in lines


def test_losses_of_the_interpreter_are_compared_with_the_peer_and_with_the_target() -> None:
    beside = "beside a busy thread"
    rows = [
        cell(1, 1, beside=beside, our_loss=0.3, their_loss=0.2, chunk_bytes=1 << 20),
        cell(1, 1, beside=beside, our_loss=0.1, their_loss=0.2, chunk_bytes=1 << 20, what="load"),
        cell(1, 1, beside=beside, our_loss=0.9, their_loss=0.1),
    ]
    lines = list(cell_lines(rows))
    first = place(lines, "interpreter time that a busy thread loses")
    assert "in 2 of 3 cells" in lines[first]
    assert "64 KiB" in lines[first + 1]
    assert "1024 KiB" in lines[first + 2]
    met = [line.endswith("target <= 0.15") for line in lines[first + 3 : first + 5]]
    assert met == [False, True]
    assert lines[first + 3].endswith("target <= 0.15, missed")


def test_processor_time_is_held_against_the_target_at_64_kib() -> None:
    lines = list(cell_lines([cell(1, 1), cell(1, 1, what="load"), cell(1, 1, chunk_bytes=4096)]))
    below = lines[place(lines, "CPU seconds per GB") + 1 :]
    assert [line.partition("target")[2] for line in below] == [
        " <= 0.25, missed",
        " <= 0.2, missed",
    ]


def test_bursts_are_held_against_their_share_of_raw() -> None:
    for (mib, target), share in itertools.product(((512, "0.95"), (128, "0.9")), (0.94, 0.96)):
        row = {"part": "bursts", "bytes_per_run": mib << 20, "chunk_bytes": 1 << 20}
        row |= {"requests_at_once": 1, "gigabytes_per_second": {}, "cpu_seconds_per_gigabyte": {}}
        (line,) = [
            line
            for line in other_lines(row | {"ratios": {"store / raw write": [share]}})
            if "target" in line
        ]
        assert f"target >= {target}" in line
        assert line.endswith("missed") == (share < float(target))
