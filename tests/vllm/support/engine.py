"""Runs one vLLM engine in a process of its own, as a test's job says.

    job (JSON file) -> python engine.py job result -> result (JSON file)

A job has rounds; each round may empty the engine's own prefix cache first, then generates for all
its prompts as one batch. The result has, per round and prompt, tokens, their logprobs, and how many
prompt tokens came from a cache.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from groups import alignment_of, held_blocks
from preloaded import run_preloaded

__all__ = [
    "Answer",
    "EngineJob",
    "EngineResult",
    "Round",
    "adapter_request",
    "engine_environment",
    "read_metrics",
    "run_engine",
]

_VLLM_METRICS = (
    "vllm:num_preemptions",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_draft_tokens",
)
_QUIET_ANSWERS = 40
_ADAPTERS: dict[str, int] = {}
_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One batch of prompts."""

    prompts: list[list[int]]
    continues: str | None = None
    """An earlier round: its prompts and answers stand before the prompts of this one."""
    max_tokens: int = 8
    ends_before_block: int = 0
    """Cut each prompt so that this many tokens are missing to whole blocks of every group; 0: none.

    A longer answer then needs further blocks, however large they are.
    """
    measures: bool = False
    """Count the blocks that the first prompt's request holds; in the engine's own process only."""
    reset: bool = True
    """Empty the engine's own prefix cache first: only tierstore can hit then."""
    adapter: tuple[str, str] | None = None
    """Name and path of the LoRA adapter that answers."""
    one_by_one: bool = False
    """Generate for each prompt alone, after the one before."""
    aborts: bool = False
    """Abort the batch after 0, 1, 2, ... steps instead, with slow loads; a leak ends the engine.

    Both halves must be in the engine's own process, and the connector a `slow.SlowConnector`.
    """
    waits_for: str | None = None
    """A file: the round begins when it is there (another engine has done its part)."""
    announces: str | None = None
    """A file that is made when the round is over and tierstore has written what it stored."""


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """One life of an engine."""

    model: str
    dtype: str
    rounds: dict[str, Round]
    config: dict[str, Any] | None = None
    """tierstore's configuration; None: no connector."""
    connector: str = "tierstore_vllm.TierStoreConnector"
    transfer: dict[str, Any] | None = None
    """All arguments of `KVTransferConfig`, instead of `config` and `connector`."""
    load_failure_policy: str = "recompute"
    separate_process: bool = True
    ends: str = "shutdown"
    """`shutdown`, `sigterm` for the engine's process, or `exit` as a script that just ends."""
    workarounds: bool = False
    """Patch vLLM as some families need it on a CPU; works in the engine's own process only."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


@dataclass(frozen=True)
class Answer:
    """What came out for one prompt."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]
    """By how much each token was likelier than the next best one."""
    cached: int
    finish_reason: str


@dataclass(frozen=True)
class EngineResult:
    """What came out of one job."""

    rounds: dict[str, list[Answer]]
    metrics: dict[str, float]
    """tierstore's Prometheus counters and some of vLLM's, by name and by `name{label}`.

    `aborted{stage}` is how many requests were aborted while waiting, loading, or decoding.
    """
    alignment_tokens: int
    """Hits end at multiples of this: the engine says how large blocks are."""
    held_blocks: dict[str, int]
    """Of each round that measures."""
    log: str


def run_engine(job: EngineJob, folder: Path, *, timeout_seconds: float = 600) -> EngineResult:
    """Run a job in a fresh process; raise with the end of its log if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("job-*.json")))
    job_file = folder / f"job-{number}.json"
    result_file = folder / f"result-{number}.json"
    log_file = folder / f"log-{number}.txt"
    job_file.write_text(json.dumps(asdict(job)))
    environment = engine_environment(separate_process=job.separate_process)
    files = [str(job_file), str(result_file)]
    if job.ends != "exit":
        code = run_preloaded(
            Path(__file__),
            files,
            environment=environment,
            log=log_file,
            timeout_seconds=timeout_seconds,
        )
    else:
        with log_file.open("wb") as log:
            code = subprocess.run(
                [sys.executable, __file__, *files],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_seconds,
                check=False,
            ).returncode
    text = log_file.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"engine ended with {code}:\n{text[-6000:]}")
    result = json.loads(result_file.read_text())
    rounds = {
        name: [Answer(**answer) for answer in answers] for name, answers in result["rounds"].items()
    }
    return EngineResult(
        rounds, result["metrics"], result["alignment_tokens"], result["held_blocks"], text
    )


def engine_environment(*, separate_process: bool) -> dict[str, str]:
    """Return the environment of a process that runs an engine."""
    paths = [_REPOSITORY, _REPOSITORY / "adapters" / "vllm", Path(__file__).parent]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate_process else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Two threads that wait for each other by spinning crawl beside anything else on two cores.
        "OMP_NUM_THREADS": "1",
    }


def _run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = _open(job)
    alignment_tokens = alignment_of(llm)
    held: dict[str, int] = {}
    prompts: dict[str, list[list[int]]] = {}
    rounds: dict[str, list[dict[str, Any]]] = {}
    aborted: Counter[str] = Counter()
    for name, batch in job["rounds"].items():
        if batch["waits_for"]:
            _wait_for(Path(batch["waits_for"]))
        if batch["reset"]:
            _reset(llm)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=batch["max_tokens"],
            logprobs=2,
            detokenize=False,
            ignore_eos=True,
        )
        prompts[name] = _prompts(batch, prompts, rounds, alignment_tokens)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts[name]]
        if batch["aborts"]:
            aborted += _abort(llm, inputs, sampling)
            rounds[name] = []
            continue
        adapter = adapter_request(*batch["adapter"]) if batch["adapter"] else None
        batches = [[one] for one in inputs] if batch["one_by_one"] else [inputs]
        rounds[name] = [
            _answer(output)
            for some in batches
            for output in llm.generate(some, sampling, use_tqdm=False, lora_request=adapter)
        ]
        if batch["measures"]:
            _reset(llm)
            held[name] = held_blocks(llm, prompts[name][0], sampling)
        if batch["announces"]:
            _announce(llm, Path(batch["announces"]))
    metrics = read_metrics(llm) | {f"aborted{{{stage}}}": n for stage, n in aborted.items()}
    if job["ends"] == "sigterm":
        _terminate(llm)
    if job["ends"] == "exit":
        globals()["kept"] = llm  # until the interpreter ends, as the globals of a script are
    else:
        llm.llm_engine.engine_core.shutdown()
    return {
        "rounds": rounds,
        "metrics": metrics,
        "alignment_tokens": alignment_tokens,
        "held_blocks": held,
    }


def adapter_request(name: str, path: str, **changes: Any) -> Any:
    """Name a LoRA adapter as vLLM's server does: every name has a number of its own."""
    from vllm.lora.request import LoRARequest

    number = _ADAPTERS.setdefault(name, len(_ADAPTERS) + 1)
    return LoRARequest(name, number, path, **changes)


def _open(job: dict[str, Any]) -> Any:
    if job["workarounds"]:
        import workarounds

        workarounds.apply()
    from vllm import LLM, envs
    from vllm.config import KVTransferConfig

    if job["ends"] != "exit":
        # On a CPU vLLM spawns its engine and its workers, and each imports it once more.
        envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    arguments = {
        "enforce_eager": True,
        "max_model_len": 4096,
        "block_size": 32,
        "seed": 0,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    } | job["engine"]
    if job["transfer"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**job["transfer"])
    elif job["config"] is not None:
        module, _, name = job["connector"].rpartition(".")
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector=name,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy=job["load_failure_policy"],
            kv_connector_extra_config={"tierstore.config": job["config"]},
        )
    return LLM(job["model"], dtype=job["dtype"], **arguments)


def read_metrics(llm: Any) -> dict[str, float]:
    """Return the sums of the counters that tests ask for, over all labels and by label."""
    metrics: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "tierstore" in metric.name or metric.name in _VLLM_METRICS:
            name = metric.name.removeprefix("vllm:")
            metrics[name] = metrics.get(name, 0) + metric.value
            for label in ("reason", "source", "tier"):
                if label in metric.labels:
                    key = f"{name}{{{metric.labels[label]}}}"
                    metrics[key] = metrics.get(key, 0) + metric.value
    return metrics


def _terminate(llm: Any) -> None:
    """End the engine's process as a service manager does, and wait until it is gone."""
    processes = llm.llm_engine.engine_core.resources.engine_manager.processes
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    left = {process.sentinel for process in processes}
    while left:
        ended = wait(left, timeout=180)
        if not ended:
            raise RuntimeError("the engine's process goes on after SIGTERM")
        left.difference_update(ended)


def _prompts(
    batch: dict[str, Any],
    prompts: dict[str, list[list[int]]],
    rounds: dict[str, Any],
    alignment_tokens: int,
) -> list[list[int]]:
    earlier = batch["continues"]
    if batch["ends_before_block"]:
        ends = [
            len(prompt) // alignment_tokens * alignment_tokens - batch["ends_before_block"]
            for prompt in batch["prompts"]
        ]
        return [prompt[:end] for prompt, end in zip(batch["prompts"], ends, strict=True)]
    if earlier is None:
        given: list[list[int]] = batch["prompts"]
        return given
    turns = zip(prompts[earlier], rounds[earlier], batch["prompts"], strict=True)
    return [prompt + answer["tokens"] + more for prompt, answer, more in turns]


def _abort(llm: Any, inputs: list[Any], sampling: Any) -> Counter[str]:
    from aborting import ABORT_STEPS_MAX, abort_after

    stages: Counter[str] = Counter()
    for step_count in range(ABORT_STEPS_MAX):
        stages += abort_after(step_count, llm, inputs, sampling)
        _reset(llm)
    return stages


def _wait_for(file: Path) -> None:
    for _ in range(12000):
        if file.exists():
            return
        time.sleep(0.05)
    raise RuntimeError(f"{file} does not appear")


def _announce(llm: Any, file: Path) -> None:
    from vllm import SamplingParams

    written, quiet_count = 0.0, 0
    for _ in range(400):
        now = read_metrics(llm).get("tierstore_demoted_chunks", 0)
        # What another engine has recorded is not written again, so the sum to come is not known.
        quiet_count = quiet_count + 1 if now == written else 0
        written = now
        if written and quiet_count == _QUIET_ANSWERS:
            file.touch()
            return
        # Counters come with the answers to requests; this one is too short to be stored.
        tiny = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
        llm.generate([{"prompt_token_ids": [7]}], tiny, use_tqdm=False)
    raise RuntimeError("tierstore does not finish its writes")


def _reset(llm: Any) -> None:
    for _ in range(100):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.05)
    raise RuntimeError("the engine's prefix cache cannot be reset: blocks leaked")


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return asdict(
        Answer(
            tokens=list(completion.token_ids),
            logprobs=[
                step[token].logprob
                for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ],
            margins=[_margin(step) for step in completion.logprobs],
            cached=output.num_cached_tokens or 0,
            finish_reason=str(completion.finish_reason),
        )
    )


def _margin(step: dict[int, Any]) -> float:
    best, second = sorted((float(entry.logprob) for entry in step.values()), reverse=True)[:2]
    return best - second


if __name__ == "__main__":
    result = _run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
