"""Run real vLLM over the same conversations without tierstore and with it, and compare.

Three processes run four passes over the same prompts:

    reference      no connector: every turn computed in full; then again with vLLM's own cache
    cold, memory   with tierstore: empty at first; then with the GPU's prefix cache emptied
    disk           a new process: only chunks on disk are left

Ends with status 1 if a token differs or an expected hit is missing.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo"
CONVERSATIONS, TURNS = 3, 3
OPENING_TOKENS, ADDITION_TOKENS, ANSWER_TOKENS = 3000, 400, 32
WORDS = (
    "cache",
    "prefix",
    "token",
    "block",
    "layer",
    "memory",
    "disk",
    "tier",
    "the",
    "of",
    "keeps",
)

ROWS = {
    "recomputed": "no tierstore",
    "cold": "1 cold",
    "memory": "2 GPU emptied",
    "disk": "3 new process",
}
REFERENCE = {"recomputed": "recomputed", "cold": "plain", "memory": "again", "disk": "again"}
"""Which run without tierstore had the same hits: the same shapes are computed, so that even half
precision must give the same tokens."""

Passes = dict[str, list[dict[str, Any]]]


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description="Real vLLM without and with tierstore.")
    parser.add_argument("--model", help="model to use instead of the small random one")
    model = parser.parse_args().model
    console = Console()
    console.width = max(console.width, 130)
    shutil.rmtree(FOLDER / "cache", ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    engine = engine_of(model, console)
    passes, block_tokens = run_all(engine, console, is_real=model is not None)
    problems = [*different_tokens(passes), *missing_hits(passes, block_tokens)]
    console.print(table_of(passes, problems))
    save_plot(passes, FOLDER / "demo.png")
    console.print(f"plot: {FOLDER / 'demo.png'}")
    for problem in problems:
        console.print(f"[bold red]failed:[/] {problem}")
    return 1 if problems else 0


def engine_of(model: str | None, console: Console) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    max_model_len = OPENING_TOKENS + TURNS * (ADDITION_TOKENS + ANSWER_TOKENS)
    if model:
        return {"model": model, "max_model_len": max_model_len}
    from tiny_llama import make_tiny_llama

    folder = FOLDER / "model"
    if not (folder / "model.safetensors").exists():
        console.print("making a small model with random weights")
        make_tiny_llama(folder)
    return {
        "model": str(folder),
        "max_model_len": max_model_len,
        "dtype": "float32",
        "block_size": 32,
        "enforce_eager": True,
    }


def run_all(engine: dict[str, Any], console: Console, *, is_real: bool) -> tuple[Passes, int]:
    """Run the three processes; return what every pass saw, and the tokens per block."""
    every_turn = list(range(TURNS))
    job = {
        "engine": engine,
        "tierstore_config": None,
        "answers": None,
        **prompts_of(engine["model"]),
    }
    job["answer_tokens"] = ANSWER_TOKENS
    job["passes"] = [
        {"name": "plain", "emptied": [0]},
        {"name": "again", "emptied": []},
        {"name": "recomputed", "emptied": every_turn},
    ]
    reference = run_engine("reference", job, console)
    job["answers"] = reference["answers"]
    job["tierstore_config"] = str(write_config(is_real=is_real))
    job["passes"] = [{"name": name, "emptied": every_turn} for name in ("cold", "memory")]
    first = run_engine("cold, then GPU emptied", job, console)
    job["passes"] = [{"name": "disk", "emptied": every_turn}]
    second = run_engine("new process", job, console)
    passes = {**reference["passes"], **first["passes"], **second["passes"]}
    return passes, reference["block_tokens"]


def prompts_of(model: str) -> dict[str, Any]:
    """Return the conversations as token ids: a long opening each, and what each turn adds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = random.Random(1)  # noqa: S311 - the same prompts every time

    def text_of(token_count: int) -> list[int]:
        words = " ".join(source.choices(WORDS, k=2 * token_count))
        return list(tokenizer.encode(words, add_special_tokens=False)[:token_count])

    return {
        "openings": [text_of(OPENING_TOKENS) for _ in range(CONVERSATIONS)],
        "additions": [
            [text_of(ADDITION_TOKENS) for _ in range(CONVERSATIONS)] for _ in range(TURNS - 1)
        ],
    }


def write_config(*, is_real: bool) -> Path:
    """Write the tierstore configuration of the demo."""
    memory, disk = ("8GiB", "16GiB") if is_real else ("1GiB", "2GiB")
    path = FOLDER / "tierstore.yaml"
    path.write_text(
        f"version: 1\nprimary: {{capacity: {memory}, eviction: arc}}\n"
        f"secondary:\n  - {{name: disk, backend: file, path: cache, capacity: {disk}}}\n"
    )
    return path


def run_engine(name: str, job: dict[str, Any], console: Console) -> dict[str, Any]:
    """Run one engine in a process of its own and return its result."""
    stem = FOLDER / name.replace(" ", "-").replace(",", "")
    job_path, result_path = stem.with_suffix(".job.json"), stem.with_suffix(".result.json")
    log_path = stem.with_suffix(".log")
    result_path.unlink(missing_ok=True)
    job_path.write_text(json.dumps(job))
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    paths = [str(ROOT), str(ROOT / "adapters" / "vllm"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    files = [str(path) for path in (ROOT / "scripts" / "demo_engine.py", job_path, result_path)]
    command = [sys.executable, *files]
    with console.status(f"vLLM: {name} (log: {log_path})"), log_path.open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode or not result_path.exists():
        # The root cause stands first; what follows is other processes giving up because of it.
        causes = [line for line in log_path.read_text().splitlines() if "Error: " in line]
        sys.exit("\n".join([*causes[:5], f"vLLM failed: {name}; log: {log_path}"]))
    return dict(json.loads(result_path.read_text()))


def different_tokens(passes: Passes) -> list[str]:
    """List every answer that differs from vLLM's without tierstore."""
    return [
        f"{ROWS[name]}: answer {number} differs from the run without tierstore"
        for name in ("cold", "memory", "disk")
        for number, (ours, theirs) in enumerate(
            zip(passes[name], passes[REFERENCE[name]], strict=True)
        )
        if ours["token_ids"] != theirs["token_ids"]
    ]


def missing_hits(passes: Passes, block_tokens: int) -> list[str]:
    """List every prompt of which less was loaded than is stored.

    Whole blocks are stored; if a prompt is stored entirely, its last token is still computed.
    """
    problems = []
    for name in ("cold", "memory", "disk"):
        for number, answer in enumerate(passes[name]):
            known = answer["prompt_tokens"] - 1
            if name == "cold":
                earlier = number - CONVERSATIONS
                length = passes[name][earlier]["prompt_tokens"] + ANSWER_TOKENS - 1
                known = length if earlier >= 0 else 0
            expected = known // block_tokens * block_tokens
            loaded = answer["cached_tokens"]
            found = loaded["host"] + loaded["disk"] + loaded.get("external_unspecified", 0)
            if found < expected:
                problems.append(f"{ROWS[name]}: prompt {number}: {found} of {expected} loaded")
    if from_disk := sums_of(passes["memory"])["disk"]:
        problems.append(f"{ROWS['memory']}: {from_disk} tokens came from disk")
    if sums_of(passes["disk"])["disk"] == 0:
        problems.append(f"{ROWS['disk']}: nothing was loaded from disk")
    return problems


def sums_of(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Add up the prompt tokens of a pass by where their KV came from."""
    sums = {"prompt": sum(answer["prompt_tokens"] for answer in answers)}
    for source in ("device", "host", "disk"):
        sums[source] = sum(answer["cached_tokens"][source] for answer in answers)
    sums["computed"] = sums["prompt"] - sum(
        sum(answer["cached_tokens"].values()) for answer in answers
    )
    return sums


def first_token_ms(answers: list[dict[str, Any]]) -> float:
    """Return the median time to the first token."""
    seconds: list[float] = [answer["first_token_seconds"] for answer in answers]
    return 1000 * statistics.median(seconds)


def table_of(passes: Passes, problems: list[str]) -> Table:
    """Lay the passes out for a terminal."""
    table = Table(title=f"{CONVERSATIONS} conversations of {TURNS} turns, one request at a time")
    for heading in ("run", "prompt", "computed", "from GPU", "from memory", "from disk"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for heading in ("first token (median)", "speed-up", "tokens identical"):
        table.add_column(heading, justify="right")
    slow = first_token_ms(passes["recomputed"])
    for name, title in ROWS.items():
        sums, fast = sums_of(passes[name]), first_token_ms(passes[name])
        differs = any(problem.startswith(f"{title}: answer") for problem in problems)
        table.add_row(
            title,
            *(f"{sums[key]:,}" for key in ("prompt", "computed", "device", "host", "disk")),
            f"{fast:,.0f} ms",
            f"{slow / fast:.1f}x",
            "(reference)" if name == "recomputed" else "NO" if differs else "yes",
        )
    return table


def save_plot(passes: Passes, path: Path) -> None:
    """Plot the time to the first token by turn, and the tokens by where they came from."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    width = 0.8 / len(ROWS)
    for place, (name, title) in enumerate(ROWS.items()):
        times = [
            first_token_ms([one for one in passes[name] if one["turn"] == turn])
            for turn in range(TURNS)
        ]
        left.bar([turn + place * width for turn in range(TURNS)], times, width, label=title)
    left.set_xticks([turn + 0.3 for turn in range(TURNS)], [f"turn {t + 1}" for t in range(TURNS)])
    left.set(title="Time to first token (median of conversations)", ylabel="ms", yscale="log")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08), "ncols": 4, "frameon": False}
    left.legend(**below)
    sums = {title: sums_of(passes[name]) for name, title in ROWS.items()}
    bottom = [0] * len(ROWS)
    # A source has the color of the run that takes (nearly) all from there.
    colors = {"computed": "C0", "device": "C4", "host": "C2", "disk": "C3"}
    for source, color in colors.items():
        heights = [one[source] for one in sums.values()]
        label = {"device": "from GPU", "host": "from memory", "disk": "from disk"}.get(
            source, source
        )
        right.bar(list(sums), heights, bottom=bottom, label=label, color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set(title="Prompt tokens by where their KV came from", ylabel="tokens")
    right.legend(**below)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
