"""Run model families under real vLLM with tierstore, and write the table of results.

    scripts/families.py [--families llama gemma3 ...] [--results FOLDER] [--write]

Each family is a tiny model with random weights (tests/vllm/support/family_configs.py). Engines run
one after the other:

    without tierstore: cold, then hitting vLLM's own cache
    with tierstore: cold, then with vLLM's own cache emptied
    a new process on the same disk; there, requests are also aborted after 0, 1, 2, ... steps while
        loads are slow, and the prompts are sent again
    a new process on a damaged copy of the disk
    a cache so small that requests are preempted, without tierstore and with it

A cell is `yes` if all answers equal those of the engine without tierstore that computed as much,
and hits equal those of vLLM's own cache for the same prompts. A row is valid only if every engine
could be reset at its end, which fails if a block leaked. Answers are compared up to a near tie; the
row gives the number of compared tokens. Results are kept per family as JSON, so that a run can be
continued. `--write` puts the table of all results in the folder into adapters/vllm/README.md.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "vllm" / "support"))

from engine import EngineResult, Round, run_engine  # noqa: E402 - the tests' harness
from family_configs import CONFIGS, ENGINE_ARGUMENTS  # noqa: E402
from scenario import Scenario, assert_same_answers, tier_config  # noqa: E402
from tiny_models import DTYPES, build_model  # noqa: E402

COLUMNS = ("cold", "memory", "disk", "preempted", "aborted", "failed load")
STAGES = ("waiting", "loading", "decoding")
"""Requests of each must be among the aborted ones."""
ABORTED_COUNT = 4
"""Prompts of a batch that is aborted: the longest ones."""
NOISE = {"float32": 1e-3, "bfloat16": 0.05}
"""By how much logprobs of two runs without tierstore differ, as their batches differ."""
PREEMPTED_NOISE = {"float32": 1e-3, "bfloat16": 0.1}
"""The same of two runs whose caches have different sizes, so that other requests are preempted."""
SMALL_CACHE_BLOCKS = (24, 40, 64, 104, 160)
TOO_SMALL = "To serve at least one request"
SHORTEST = 129
DAMAGE_EVERY_BYTES = 64 << 10
README = ROOT / "adapters" / "vllm" / "README.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


class Family:
    """One model and what its engines answered."""

    def __init__(self, name: str, folder: Path) -> None:
        self._noise = NOISE[DTYPES[name]]
        self._preempted_noise = PREEMPTED_NOISE[DTYPES[name]]
        self._arguments = ENGINE_ARGUMENTS.get(name, {})
        self._folder = folder
        self._scenario = Scenario(build_model(name, folder), DTYPES[name], alignment_tokens=1)
        prompts = [prompt for prompt in self._scenario.first if len(prompt) >= SHORTEST]
        cold = Round(prompts=prompts, max_tokens=16, one_by_one=True)
        longest = sorted(prompts, key=len)[-ABORTED_COUNT:]
        self._rounds = {
            "cold": cold,
            "again": replace(cold, reset=False),
            "memory": cold,
            "aborted": Round(prompts=longest, max_tokens=16, aborts=True),
            "after": cold,
            "crowd": Round(prompts=_crowd(prompts), max_tokens=64),
        }
        self._config = tier_config("file", folder / "tier")
        self._compared_count = self._answered_count = 0

    def run(self) -> dict[str, str]:
        """Run all engines; return a cell per column, and two counts of compared tokens."""
        reference = self._engine("cold", "again", config=None)
        expected = _cached(reference, "again")
        if not any(expected):
            return {"note": "vLLM's own prefix cache hits nothing on this platform"}
        first = self._engine("cold", "memory", config=self._config)
        cells = {
            # Some prompts begin like one before them.
            "cold": self._cell(first, "cold", reference, "cold", _cached(reference, "cold")),
            "memory": self._cell(first, "memory", reference, "again", expected),
        }
        shutil.copytree(self._folder / "tier", self._folder / "damaged")
        disk = self._engine(
            "memory", "aborted", "after", config=self._config, connector="slow.SlowConnector"
        )
        cells["disk"] = self._cell(disk, "memory", reference, "again", expected)
        cells["aborted"] = self._cell(disk, "after", reference, "again", expected)
        for stage in STAGES:
            if not disk.metrics.get(f"aborted{{{stage}}}"):
                cells["aborted"] = f"NO: none was {stage}"
        _damage(self._folder / "damaged")
        lost = self._engine("memory", config=tier_config("file", self._folder / "damaged"))
        cells["failed load"] = self._cell(lost, "memory", reference, "cold", None)
        if not lost.metrics.get("tierstore_failed_loads"):
            cells["failed load"] = "no load failed"
        cells["preempted"] = self._preempted()
        return {
            "cached tokens": f"{sum(expected):,}",
            "compared tokens": f"{self._compared_count:,} of {self._answered_count:,}",
            **cells,
        }

    def _preempted(self) -> str:
        """Run the crowd in the smallest of some caches in which vLLM takes the longest request."""
        memory_only = {"version": 1, "primary": {"capacity": "96MiB"}}
        cause = ""
        for block_count in SMALL_CACHE_BLOCKS:
            small = {"num_gpu_blocks_override": block_count, "max_model_len": 512}
            try:
                reference = self._engine("crowd", config=None, engine=small)
            except RuntimeError as error:
                cause = _cause(error)
                if TOO_SMALL not in cause:
                    return f"NO: {cause}"
                continue
            result = self._engine("crowd", config=memory_only, engine=small)
            cell = self._cell(result, "crowd", reference, "crowd", None)
            return cell if result.metrics.get("num_preemptions") else f"{cell} (none was)"
        return f"not run ({cause[:60]})"

    def _engine(
        self, *names: str, engine: Mapping[str, object] | None = None, **changes: object
    ) -> EngineResult:
        rounds = {name: self._rounds[name] for name in names}
        # Only a reset, which an engine that leaked a block refuses.
        rounds["leaks"] = Round(prompts=[], one_by_one=True)
        changes |= {"engine": {**self._arguments, **(engine or {})}}
        job = self._scenario.job(rounds, workarounds=True, separate_process=False, **changes)
        return run_engine(job, self._folder)

    def _cell(
        self,
        result: EngineResult,
        name: str,
        reference: EngineResult,
        reference_name: str,
        cached: list[int] | None,
    ) -> str:
        """Compare a round with one of an engine without tierstore that had the same hits."""
        answers = reference.rounds[reference_name]
        self._answered_count += sum(len(answer.tokens) for answer in answers)
        noise = self._preempted_noise if name == "crowd" else self._noise
        try:
            compared = assert_same_answers(result, name, reference, reference_name, noise)
        except AssertionError as error:
            return f"NO: {str(error).splitlines()[0]}"
        self._compared_count += compared
        found = _cached(result, name)
        if cached is not None and found != cached:
            return f"NO: {sum(found):,} of {sum(cached):,} tokens cached"
        return "yes"


def _cached(result: EngineResult, name: str) -> list[int]:
    return [answer.cached for answer in result.rounds[name]]


def _crowd(prompts: list[list[int]]) -> list[list[int]]:
    """Cut two requests out of each prompt, so that some outgrow their blocks, however large."""
    return [
        prompt[start : start + 200 + 24 * number]
        for start in (0, 7)
        for number, prompt in enumerate(prompts)
    ]


def _cause(error: Exception) -> str:
    """Return the first line of an engine's log that names an error: the others come of it."""
    lines = str(error).splitlines()
    line = next((line for line in lines if "Error: " in line), lines[-1])
    return line.split("] ")[-1].strip()


def _damage(tier: Path) -> None:
    """Flip a bit in every so many bytes of all segments."""
    for segment in tier.glob("rank*/*.seg"):
        with segment.open("r+b") as file:
            size = segment.stat().st_size
            for offset in range(4096 + 100, size, DAMAGE_EVERY_BYTES):
                file.seek(offset)
                value = file.read(1)
                file.seek(offset)
                file.write(bytes([value[0] ^ 1]))


def table_of(folder: Path) -> str:
    """Return all results as a Markdown table."""
    head = ("family", "cached tokens", "compared tokens", *COLUMNS)
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    notes = []
    for name in CONFIGS:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        if "note" in found:
            notes.append(f"`{name}`: {found['note']}")
            found = dict.fromkeys(COLUMNS, "not run")
        cells = [found.get(column, "not run") for column in head[1:]]
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    return "\n".join([*lines, "", *notes])


def main() -> int:
    """Run the families of the command line; status 1 if a cell is `NO`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--results", type=Path, default=ROOT / ".families")
    parser.add_argument("--write", action="store_true", help="into adapters/vllm/README.md")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.families:
        result = options.results / f"{name}.json"
        if result.exists():
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"family-{name}-"))
        try:
            found = Family(name, folder).run()
        except (RuntimeError, TimeoutError) as error:
            found = {"note": _cause(error)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result.write_text(json.dumps(found, indent=1))
        print(name, found, flush=True)
    table = table_of(options.results)
    print(table)
    if options.write:
        text = README.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 1 if "| NO" in table or "leaked" in table else 0


if __name__ == "__main__":
    sys.exit(main())
