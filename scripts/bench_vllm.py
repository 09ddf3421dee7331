"""Measure the gain and the cost of tierstore in real vLLM on this machine.

    scripts/bench_vllm.py [--models tiny larger] [--pairs 5] [--trace FILE] [--json FILE]

Models have random weights and are created by the script. Engines that are compared run at the same
time and take turns, so that a busy machine slows all of them. Per model:

    first token  one long prompt at a time: computed; with tierstore computed (and stored), loaded
                 from memory, loaded from disk by a new process; vLLM's ExampleConnector from disk.
                 `floor` is the time with everything still in vLLM's own cache (one step) plus
                 the loaded bytes over the bandwidth measured in the same run
    no hits      batches of new prompts: tokens per second with tierstore, which stores all of them
                 in memory, or in memory and on disk, over tokens per second without; the memory
                 was used before. A connector that does nothing shows vLLM's own cost of having one
    load         conversations whose turns share prefixes, more than vLLM's own cache holds: a
                 slice of a recorded trace (`--trace`, Mooncake format), or generated; left out
                 with `--requests 0`

Every figure is the median, with the smallest and the largest. Targets stand beside what was
measured, those missed first.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from bench.device import Clock, RawBench, Threads
from bench.reach.vllm_tables import load_table, table_of, target_table
from bench.reach.vllm_targets import reached
from bench.vllm_engine import Generated
from bench.vllm_prompts import (
    conversations,
    long_prompts,
    requests_of_trace,
    unseen_prompts,
)
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"tiny": (128, 2), "larger": (1024, 12)}
"""Hidden size and layers of the models."""
PROMPT_TOKENS, PROMPT_COUNT = 3000, 5
BATCH_PROMPTS, BATCH_TOKENS, ANSWER_TOKENS = 8, 512, 16
CACHE_BLOCKS, BLOCK_TOKENS = 384, 32
IO_THREADS = 4
SPIN_SECONDS = 0.3
"""OpenMP's threads wait that long on all cores for more work; the next engine must not see it."""
RAW_BYTES, RAW_RUNS = 512 << 20, 3

Samples = dict[str, list[float]]


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, log: Path) -> None:
        engine = {
            "model": str(model),
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": CACHE_BLOCKS,
        }
        paths = [ROOT, ROOT / "adapters" / "vllm", ROOT / "scripts"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # A process of its own for the scheduler spins on a core while it waits for the worker.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The C library keeps what it has. Else one engine gives its tensors' memory back to
            # the kernel in every step and its twin does not, and they differ by 8 %, not by 1.
            "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        }
        command = [sys.executable, str(ROOT / "scripts" / "bench" / "vllm_engine.py")]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps({"engine": engine, "transfer": transfer})],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._answer()

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, *, reset: bool = False
    ) -> Generated:
        """Generate for all prompts at once."""
        time.sleep(SPIN_SECONDS)
        request = {"prompts": list(prompts), "max_tokens": max_tokens, "reset": reset}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Generated(**self._answer())

    def close(self) -> None:
        """Let the engine write what it holds, and end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vLLM failed; its log ends with:\n{self._log.read_text()[-3000:]}")
        return dict(json.loads(line))


class Bench:
    """All measurements of one model."""

    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        from tiny_llama import make_tiny_llama

        hidden_size, layer_count = shape
        self._folder = folder
        self._model = make_tiny_llama(
            folder / "model", hidden_size=hidden_size, layer_count=layer_count
        )
        # K and V of `make_tiny_llama`: a head of 64 float32 per 128 of the hidden size.
        self._token_bytes = 2 * layer_count * max(1, hidden_size // 128) * 64 * 4
        self._log_count = 0

    @contextmanager
    def engine(self, transfer: dict[str, Any] | None) -> Iterator[Engine]:
        """Run an engine."""
        self._log_count += 1
        engine = Engine(self._model, transfer, self._folder / f"engine-{self._log_count}.log")
        try:
            yield engine
        finally:
            engine.close()

    def tierstore(self, name: str, pool_bytes: int = 1 << 30) -> dict[str, Any]:
        """Return the arguments that enable tierstore, with a tier on disk if it has a name."""
        config: dict[str, Any] = {"version": 1, "primary": {"capacity": f"{pool_bytes}B"}}
        if name:
            tier = {"name": "disk", "backend": "file", "path": str(self._folder / name)}
            config["secondary"] = [tier | {"capacity": "4GiB", "io": {"threads": IO_THREADS}}]
        return _transfer("TierStoreConnector", "tierstore_vllm", {"tierstore.config": config})

    def example(self) -> dict[str, Any]:
        """Return the arguments that enable vLLM's ExampleConnector."""
        path = str(self._folder / "example")
        return _transfer("ExampleConnector", None, {"shared_storage_path": path})

    def first_token(self) -> Samples:
        """Time the first token of long prompts, in milliseconds, by where their KV comes from."""
        prompts = long_prompts(PROMPT_COUNT, PROMPT_TOKENS)
        found: Samples = {}
        loaded_bytes: list[int] = []

        def ask(name: str, engine: Engine, prompt: list[int], *, reset: bool) -> None:
            answer = engine.generate([prompt], 1, reset=reset)
            found.setdefault(name, []).append(1e3 * answer.first_token_seconds[0])
            if answer.loaded_bytes:
                loaded_bytes.append(answer.loaded_bytes)

        with ExitStack() as stack:
            plain = stack.enter_context(self.engine(None))
            tiered = stack.enter_context(self.engine(self.tierstore("first")))
            example = stack.enter_context(self.engine(self.example()))
            for prompt in prompts:
                ask("computed", plain, prompt, reset=True)
                ask("vLLM's own cache", plain, prompt, reset=False)
                ask("tierstore: computed and stored", tiered, prompt, reset=True)
                ask("ExampleConnector: computed and stored", example, prompt, reset=True)
                ask("tierstore: from memory", tiered, prompt, reset=True)
                ask("ExampleConnector: from files", example, prompt, reset=True)
        with self.engine(self.tierstore("first")) as tiered:
            for prompt in prompts:
                ask("tierstore: from disk, new process", tiered, prompt, reset=True)
        rates = bandwidths(self._folder)
        step = statistics.median(found["vLLM's own cache"])
        size = statistics.median(loaded_bytes)
        for source, rate in rates.items():
            found[f"floor: one step + {size / 1e6:.0f} MB {source} at {rate:.1f} GB/s"] = [
                step + size / rate / 1e6
            ]
        return found

    def no_hits(self, pair_count: int) -> Samples:
        """Compare tokens per second without and with tierstore on new prompts."""
        tokens = BATCH_PROMPTS * (BATCH_TOKENS + ANSWER_TOKENS)
        batch_bytes = tokens * self._token_bytes
        pool_bytes = max(3 * batch_bytes, 64 << 20)
        rehearsals = pool_bytes // batch_bytes + 1
        transfers = {
            "no connector": None,
            "connector that does nothing": _transfer("NullConnector", "bench.vllm_null", {}),
            "memory": self.tierstore("", pool_bytes),
            "memory and disk": self.tierstore("unseen", pool_bytes),
        }
        found: Samples = {name: [] for name in transfers}
        with ExitStack() as stack:
            engines = [
                (name, stack.enter_context(self.engine(transfer)))
                for name, transfer in transfers.items()
            ]
            for batch in range(rehearsals + pair_count):
                prompts = unseen_prompts(batch, BATCH_PROMPTS, BATCH_TOKENS)
                turn = batch % len(engines)
                for name, engine in engines[turn:] + engines[:turn]:
                    seconds = engine.generate(prompts, ANSWER_TOKENS).seconds
                    if batch >= rehearsals:
                        found[name].append(tokens / seconds)
        for name in list(transfers)[1:]:
            pairs = zip(found[name], found["no connector"], strict=True)
            found[f"{name}, ratio"] = [ours / theirs for ours, theirs in pairs]
        return found

    def load(self, requests: Sequence[list[int]]) -> dict[str, dict[str, float]]:
        """Serve requests that share prefixes, as they come, in each way."""
        found = {}
        with self.engine(None) as plain:
            found["vLLM's own cache"] = _load(plain, requests)
        with self.engine(self.tierstore("load")) as tiered:
            found["tierstore, empty at first"] = _load(tiered, requests)
        with self.engine(self.tierstore("load")) as tiered:
            found["tierstore, new process"] = _load(tiered, requests)
        return found


def bandwidths(folder: Path) -> dict[str, float]:
    """Measure the GB/s of a copy in memory and of a cold read of this disk."""
    source = np.ones(256 << 20, np.uint8)
    target = np.zeros_like(source)
    copies = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        copies.append(source.nbytes / (time.perf_counter() - start) / 1e9)
    threads, clock = Threads(IO_THREADS), Clock()
    raw = RawBench(folder, RAW_BYTES, RAW_RUNS, threads)
    for _ in range(RAW_RUNS):
        raw.run(clock)
    raw.close()
    threads.close()
    return {
        "from memory": statistics.median(copies),
        "from disk": statistics.median(clock.rates["raw read"]),
    }


def _transfer(name: str, module: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _load(engine: Engine, requests: Sequence[list[int]]) -> dict[str, float]:
    answer = engine.generate(requests, ANSWER_TOKENS)
    prompt_tokens = sum(map(len, requests))
    return {
        "prompt tokens/s": prompt_tokens / answer.seconds,
        "requests/s": len(requests) / answer.seconds,
        **{
            f"% from {source}": 100 * tokens / prompt_tokens
            for source, tokens in answer.cached_tokens.items()
        },
    }


def main() -> None:
    """Run what the command line names and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=5, help="of batches without hits")
    parser.add_argument("--trace", type=Path, help="a recorded trace in Mooncake format")
    parser.add_argument("--requests", type=int, default=60, help="of the load")
    parser.add_argument("--path", type=Path, help="folder for tiers on disk (default: temporary)")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    console = Console(width=130)
    requests = (
        requests_of_trace(options.trace, options.requests)
        if options.trace
        else conversations(random.Random(3), options.requests)  # noqa: S311 - the same every time
    )
    report: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine()}
    for name in options.models:
        folder = Path(tempfile.mkdtemp(prefix="bench-vllm-", dir=options.path))
        try:
            bench = Bench(folder, SHAPES[name])
            first, unseen = bench.first_token(), bench.no_hits(options.pairs)
            load = bench.load(requests) if requests else {}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        targets = reached(name, first, unseen)
        report[name] = {"first token ms": first, "no hits tokens/s": unseen, "load": load}
        report[name]["targets"] = [asdict(one) for one in targets]
        console.print(table_of(f"{name}: first token of {PROMPT_TOKENS} tokens", first, "ms"))
        console.print(table_of(f"{name}: no hits", unseen, "tokens/s"))
        if load:
            title = f"{name}: {len(requests)} requests that share prefixes"
            console.print(load_table(title, load))
        console.print(target_table(f"{name}: targets", targets))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
