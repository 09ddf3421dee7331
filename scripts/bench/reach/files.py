"""A file tier of ours, those of a peer, and the raw device, taking turns."""

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.device import Clock, RawBench, Threads
from bench.peers import FileTier, Load, TierstoreFiles, VllmFiles
from bench.peers_lmcache import lmcache_tiers

__all__ = ["bench_bursts", "bench_files", "drop_page_cache", "ratios_of"]


def vllm_tiers(directory: Path, load: Load) -> Iterator[FileTier]:
    """Open vLLM's file tier twice: on its pool and on one like ours."""
    yield VllmFiles(directory / "vllm", load, huge_pages=False)
    yield VllmFiles(directory / "vllm-huge", load, huge_pages=True)


TIERS = {"vllm": vllm_tiers, "lmcache": lmcache_tiers}
RAW = {"store": ["raw write", "raw overwrite"], "load": ["raw read"]}


def bench_files(
    peer: str, directory: Path, load: Load, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Let our file tier and those of a peer take turns."""
    names, clock = _take_all_turns(TIERS[peer](directory, load), directory, load, arguments)
    ratios = {
        f"{what} / {other}": ratios_of(clock.rates[f"tierstore {what}"], clock.rates[other])
        for what, raw_names in RAW.items()
        for other in [*(f"{name} {what}" for name in names), *raw_names]
    }
    return _described(load, clock) | {"part": "files", "peer": peer, "ratios": ratios}


def bench_bursts(directory: Path, load: Load, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let our file tier and the raw device take turns; ratios are our share of raw."""
    _, clock = _take_all_turns((), directory, load, arguments)
    ratios = {
        f"{what} / {other}": ratios_of(clock.rates[f"tierstore {what}"], clock.rates[other])
        for what, others in RAW.items()
        for other in others
    }
    return _described(load, clock) | {"part": "bursts", "ratios": ratios}


def ratios_of(above: list[float], below: list[float]) -> list[float]:
    """Return the ratio within each pair."""
    return [a / b for a, b in zip(above, below, strict=True)]


def drop_page_cache(directory: Path) -> None:
    """Make every later read come from the device."""
    os.sync()
    for folder, _, names in os.walk(directory):
        for name in names:
            if "catalog" not in folder:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def _take_all_turns(
    others: Iterator[FileTier] | tuple[()],
    directory: Path,
    load: Load,
    arguments: argparse.Namespace,
) -> tuple[list[str], Clock]:
    """Return the names of the other tiers, and what was measured after one run of warming up."""
    with ExitStack() as opened:  # a failure must not wait for the threads of a peer
        threads = Threads(arguments.threads)
        opened.callback(threads.close)
        raw = RawBench(directory, load.size_bytes, arguments.pairs + 1, threads)
        opened.callback(raw.close)
        tiers: list[FileTier] = []
        ours = TierstoreFiles(directory / "tierstore", load, threads=arguments.threads)
        for tier in itertools.chain([ours], others):
            opened.callback(tier.close)
            tiers.append(tier)
        clock = Clock()
        for run in range(arguments.pairs + 1):
            first = run % len(tiers)
            raw.run(clock)
            _take_turns(clock, directory, load, run, tiers[first:] + tiers[:first])
            if run == 0:  # the first touch of everything
                clock = Clock()
        return [tier.name for tier in tiers[1:]], clock


def _take_turns(
    clock: Clock, directory: Path, load: Load, run: int, turns: Sequence[FileTier]
) -> None:
    """Let each tier store the chunks of a run, then each load them."""
    load.hashes(run)
    for tier in turns:
        clock.time(f"{tier.name} store", load.size_bytes, partial(tier.store, run))
        if tier.name.startswith("lmcache"):
            os.sync()  # by default its bytes are in the page cache, and their way out takes time
    drop_page_cache(directory)
    for tier in turns:
        tier.cool()
        clock.time(f"{tier.name} load", load.size_bytes, partial(tier.load, run))
        wrong = tier.wrong_chunks()
        if wrong:
            raise RuntimeError(f"{tier.name}: {wrong} chunks came back wrong")


def _described(load: Load, clock: Clock) -> dict[str, Any]:
    return {
        "chunk_bytes": load.chunk_bytes,
        "requests_at_once": len(load.requests),
        "bytes_per_run": load.size_bytes,
        "gigabytes_per_second": dict(clock.rates),
        "cpu_seconds_per_gigabyte": dict(clock.cpu),
    }
