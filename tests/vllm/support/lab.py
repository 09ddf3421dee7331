"""One engine with everything in its process, to be disturbed.

A test calls `run_lab` with a script, whose process calls `main` with its phases. There `Lab`
drives the engine, reads vLLM's own counters, and looks into both halves of the connector.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import engine_environment, read_metrics
from groups import alignment_of
from leaks import find_leaks
from preloaded import run_preloaded

from tierstore.faults import ALLOW_FAULTS

__all__ = ["SEAMS", "Lab", "main", "read_job", "run_lab"]

_IDLE_STEPS_MAX = 4000
_TINY_PROMPT = [7]
"""Less than a block, so never stored; its answer carries the statistics of the steps before."""

# What may raise below each hook of the connector: an attribute path from the lab, and the hook.
SEAMS = {
    "half._planner.add_request": "on_new_request",
    "half._planner.match": "get_num_new_matched_tokens",
    "half._planner.begin_load": "update_state_after_alloc",
    "half._stack.reserve_load": "update_state_after_alloc, half done",
    "half._questions.get": "get_external_cache_hit_sources",
    "half._planner.plan_step": "build_connector_meta",
    "half._stack.commands": "build_connector_meta, half done",
    "half._stack.reserve_offload": "build_connector_meta, offloads half done",
    "half._planner.complete": "update_connector_output",
    "half._stack.finish_load": "update_connector_output, half done",
    "half._planner.finish_request": "request_finished_all_groups",
    "half._planner.has_work": "has_pending_push_work",
    "half._planner.reset": "reset_cache",
    "half._stats.take": "get_kv_connector_stats",
    "worker._executor.submit": "start_load_kv, wait_for_save",
    "worker._executor._engine.submit_offload": "wait_for_save, half done",
    "worker._executor._engine.submit_load": "start_load_kv, in an I/O thread",
    "worker._executor._tiers.0.backend.read": "start_load_kv, in an I/O thread",
    "worker._executor._tiers.0.backend.write": "start_load_kv, in an I/O thread",
    "worker._executor.poll": "get_transfer_results",
    "worker._executor._engine.poll": "get_transfer_results, half done",
    "worker._stats.take": "get_kv_connector_stats",
}


def run_lab(
    script: str, name: str, job: dict[str, Any], folder: Path, *, timeout_seconds: float = 900
) -> dict[str, Any]:
    """Run a script of this folder in a process of its own; return what its phases found.

    `name` begins the names of the run's files in `folder`.
    """
    files = {kind: folder / f"{name}.{kind}" for kind in ("job", "found", "log")}
    files["job"].write_text(json.dumps(job))
    code = run_preloaded(
        Path(__file__).with_name(script),
        [str(files["job"]), str(files["found"])],
        environment=engine_environment(separate_process=False) | {ALLOW_FAULTS: "1"},
        log=files["log"],
        timeout_seconds=timeout_seconds,
    )
    assert code == 0, files["log"].read_text()[-6000:]
    found: dict[str, Any] = json.loads(files["found"].read_text())
    return found


class Lab:
    """An engine whose prompts are asked one after the other, so that answers compare exactly."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.job = job
        self.prompts: list[list[int]] = job["prompts"]
        self.model: str = job["model"]
        self.tier_path = Path(job["config"]["secondary"][0]["path"])
        self.llm = LLM(
            job["model"],
            dtype=job["dtype"],
            enforce_eager=True,
            max_model_len=4096,
            block_size=32,
            seed=0,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enable_prefix_caching=True,
            **job.get("engine", {}),
            kv_transfer_config=KVTransferConfig(
                kv_connector="SlowConnector",
                kv_connector_module_path="slow",
                kv_role="kv_both",
                kv_load_failure_policy=job.get("load_failure_policy", "recompute"),
                kv_connector_extra_config={"tierstore.config": job["config"]},
            ),
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.worker_connector = get_kv_transfer_group()

    @property
    def half(self) -> Any:
        """The scheduler half."""
        return self.connector._scheduler

    @property
    def worker(self) -> Any:
        """The worker half."""
        return self.worker_connector._worker

    def ask(
        self,
        prompts: list[list[int]],
        *,
        salt: str | None = None,
        is_cached: bool = True,
        adapter: Any = None,
    ) -> dict[str, Any]:
        """Answer prompts one after the other; tierstore keeps out of it unless `is_cached`.

        `adapter` is vLLM's name of a LoRA adapter.
        """
        outputs = [
            self._generate(prompt, salt, is_cached=is_cached, adapter=adapter) for prompt in prompts
        ]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "reasons": [str(output.outputs[0].finish_reason) for output in outputs],
        }

    def _generate(
        self,
        prompt: list[int],
        salt: str | None = None,
        *,
        is_cached: bool = True,
        adapter: Any = None,
    ) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=6,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"tierstore.cache": is_cached}},
        )
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            asked["cache_salt"] = salt
        return self.llm.generate([asked], sampling, use_tqdm=False, lora_request=adapter)[0]

    def submit(self, name: str, prompt: list[int], *, adapter: Any = None) -> None:
        """Add a request without stepping."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
        asked = {"prompt_token_ids": prompt}
        self.engine.add_request(name, asked, sampling, lora_request=adapter)

    def finish(self) -> dict[str, list[int]]:
        """Step until every submitted request has ended; return the tokens by name."""
        tokens: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return tokens

    def idle(self) -> None:
        """Step until the connector has nothing to do."""
        for _ in range(_IDLE_STEPS_MAX):
            if not self.half.has_work():
                return
            self.engine.step()
            time.sleep(0.0005)
        raise RuntimeError("the connector does not come to rest")

    def forget_gpu(self) -> bool:
        """Empty the engine's own cache, at the first attempt: nothing holds a block."""
        self.idle()
        return bool(self.llm.reset_prefix_cache())

    def forget_memory(self) -> bool:
        """Empty the engine's cache and the primary tier: only the disk can hit."""
        fresh = self.forget_gpu()
        held = self.half._stack.primary.clear()
        return fresh and not held

    def check(self) -> list[str]:
        """Name what leaked."""
        self.idle()
        problems = find_leaks(self.half, self.worker)
        if not self.llm.reset_prefix_cache():
            problems.append("the engine's prefix cache cannot be reset: blocks leaked")
        return problems

    def metrics(self) -> dict[str, float]:
        """Return all counters, those of the last step included."""
        self._generate(_TINY_PROMPT)
        self._generate(_TINY_PROMPT)
        return read_metrics(self.llm)

    @contextmanager
    def counting(self, deltas: dict[str, float]) -> Iterator[None]:
        """Fill `deltas` with what the block adds to the counters."""
        before = self.metrics()
        yield
        after = self.metrics()
        deltas.update(
            {
                name: after[name] - before.get(name, 0)
                for name in after
                if after[name] != before.get(name, 0)
            }
        )

    def reopen(self) -> None:
        """Replace both halves by fresh ones, as when the engine started."""
        from tierstore_vllm.opening import Opening
        from tierstore_vllm.worker import WorkerHalf

        self.worker.close()
        self.half.close()
        old = self.worker_connector
        parts = (old._vllm_config, old._kv_cache_config, old._config)
        old._worker = WorkerHalf(*parts)
        old.register_kv_caches(old.kv_caches)
        self.connector._scheduler = None
        self.connector._opening = Opening(*parts)
        self.connector.set_xfer_handshake_metadata_pp_aware({})

    @property
    def files(self) -> Any:
        """The segment files as the tier's backend has them open."""
        backend = self.worker._executor._tiers[0].backend
        while not hasattr(backend, "_files"):
            backend = backend._backend
        return backend._files

    def segments(self) -> list[Path]:
        """Return the tier's segment files."""
        return sorted((self.tier_path / "rank0").glob("*.seg"))

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def read_job() -> dict[str, Any]:
    """Return the job that this process was started for."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def main(phases: dict[str, Callable[[Lab], dict[str, Any]]]) -> None:
    """Run the phases that the job names, in order, against one engine; write what they found.

    A job has `model`, `dtype`, `config`, `prompts`, `phases`, perhaps further arguments of
    `vllm.LLM` under `engine`, and another `load_failure_policy` than `recompute`.
    """
    job = read_job()
    began_at = time.monotonic()
    lab = Lab(job)
    found: dict[str, Any] = {"opened after": time.monotonic() - began_at}
    found["alignment_tokens"] = alignment_of(lab.llm)
    found["cold"] = lab.ask(lab.prompts)
    for name in job["phases"]:
        print(f"--- {name}", flush=True)
        found[name] = phases[name](lab)
        found[name]["problems"] = lab.check()
        Path(sys.argv[2]).write_text(json.dumps(found))
    lab.close()
