"""The table of `bench_peers.py`: our file tier and vLLM's, taking turns in every round of a cell.

A cell is a device, a chunk size, a number of requests at once, a direction, and what runs beside.
"""

import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers import FileTier, Load, TierstoreFiles, VllmFiles
from bench.reach.fast_device import FastDevice
from bench.reach.files import drop_page_cache
from bench.reach.victim import Sample, take

__all__ = ["BESIDE", "FAST", "Device", "Plan", "bench_cells", "why_device_is_left_out"]

BESIDE = ("alone", "beside a busy thread")
FAST = "fast device"
SHARE_PASSED_MIN = 0.99

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where the parties keep their files."""

    name: str
    directory: Path
    gigabytes_per_second: float = 0.0
    """Of the stand-in for a fast device; 0: the bytes really move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    chunk_sizes: Sequence[int]
    requests: Sequence[int]
    size_bytes: int
    """Moved per measurement."""
    rounds: int
    """Measured; one more comes first, for the first touch of everything."""
    threads: int


def why_device_is_left_out(device: Device, plan: Plan) -> str:
    """Return why a device cannot be measured; empty if it can."""
    if device.gigabytes_per_second:
        return "" if FastDevice().is_loaded else "the stand-in is not loaded (is there a cc?)"
    needed = 2 * len(BESIDE) * (plan.rounds + 1) * plan.size_bytes + (4 << 30)
    free = shutil.disk_usage(device.directory).free
    if free < needed:
        return f"{free >> 20} MiB are free in {device.directory}, {needed >> 20} are needed"
    return ""


def bench_cells(devices: Sequence[Device], plan: Plan) -> Iterator[Rows]:
    """Measure all cells; the rows of one device, chunk size and number of requests at a time."""
    for chunk_bytes, requests, device in itertools.product(
        plan.chunk_sizes, plan.requests, devices
    ):
        count = max(requests, plan.size_bytes // chunk_bytes)
        load = Load(chunk_bytes, count, requests)
        with ExitStack() as opened:
            folder = opened.enter_context(
                tempfile.TemporaryDirectory(prefix="bench-peers-", dir=device.directory)
            )
            if FastDevice().is_loaded:  # off for the others
                opened.enter_context(FastDevice().switched_on(device.gigabytes_per_second))
            yield _rows_of(device, load, requests, _Turns(device, Path(folder), load, plan).all())
        print(".", end="", flush=True, file=sys.stderr)


class _Turns:
    """All rounds of both parties on one device with one load."""

    def __init__(self, device: Device, folder: Path, load: Load, plan: Plan) -> None:
        self._device = device
        self._folder = folder
        self._load = load
        self._plan = plan
        self._samples: dict[tuple[str, str, str], list[Sample]] = {}
        self._runs = itertools.count()

    def all(self) -> dict[tuple[str, str, str], list[Sample]]:
        """Return the samples by direction, what ran beside, and party."""
        with ExitStack() as opened:
            tiers: list[FileTier] = []
            for make in (
                partial(TierstoreFiles, threads=self._plan.threads),
                partial(VllmFiles, huge_pages=False),
            ):
                tier = make(self._folder / str(len(tiers)), self._load)
                opened.callback(tier.close)
                tiers.append(tier)
            for number in range(self._plan.rounds + 1):
                order = 1 if number % 2 else -1
                for beside in BESIDE[::order]:
                    self._round(beside, tiers[::order])
                if number == 0:
                    self._samples.clear()
        return self._samples

    def _round(self, beside: str, tiers: Sequence[FileTier]) -> None:
        run = next(self._runs)
        self._load.hashes(run)
        for tier in tiers:
            self._take("store", beside, tier, run)
        if self._device.name == "disk":
            drop_page_cache(self._folder)
        for tier in tiers:
            tier.cool()
            self._take("load", beside, tier, run)
            if wrong := tier.wrong_chunks():
                raise RuntimeError(f"{tier.name}: {wrong} chunks came back wrong")

    def _take(self, what: str, beside: str, tier: FileTier, run: int) -> None:
        device = FastDevice() if self._device.gigabytes_per_second else None
        before = device.moved_bytes if device else 0
        sample = take(
            partial(getattr(tier, what), run),
            self._load.size_bytes,
            beside_victim=beside != BESIDE[0],
        )
        if device:
            passed = (device.moved_bytes - before) / self._load.size_bytes
            if passed < SHARE_PASSED_MIN:
                raise RuntimeError(
                    f"{tier.name}: only {passed:.0%} of its bytes passed the stand-in "
                    f"(is O_DIRECT refused in {self._device.directory}?)"
                )
        self._samples.setdefault((what, beside, tier.name), []).append(sample)


def _rows_of(
    device: Device, load: Load, requests: int, samples: dict[tuple[str, str, str], list[Sample]]
) -> Rows:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (what, beside, party), taken in samples.items():
        row = rows.setdefault(
            (what, beside),
            {
                "part": "cells",
                "device": device.name,
                "chunk_bytes": load.chunk_bytes,
                "requests": requests,
                "bytes_per_run": load.size_bytes,
                "what": what,
                "beside": beside,
                "parties": {},
            },
        )
        figures = {
            "gigabytes_per_second": [sample.gigabytes_per_second for sample in taken],
            "cpu_seconds_per_gigabyte": [sample.cpu_seconds_per_gigabyte for sample in taken],
        }
        if beside != BESIDE[0]:
            figures["lost_seconds_per_gigabyte"] = [
                sample.lost_seconds_per_gigabyte or 0.0 for sample in taken
            ]
        row["parties"][party] = figures
    for row in rows.values():
        ours, theirs = (
            row["parties"][name]["gigabytes_per_second"] for name in ("tierstore", "vllm fs")
        )
        row["ratios"] = [a / b for a, b in zip(ours, theirs, strict=True)]
    return list(rows.values())
