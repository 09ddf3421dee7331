"""Campaigns of seeded scenarios, many in one process, each attributed when that process ends.

    PYTHONPATH=.:tests/support python tests/faults/support/campaign.py damage-file --count 2500
    PYTHONPATH=.:tests/support python tests/faults/support/campaign.py calls-lmdb --count 200

Prints one JSON object: how many scenarios there were, what they came to, the longest stall, and the
first seeds that went wrong, with words. `damage-*`: random damage to the files of closed and killed
stores (`damages`). `calls-*`: random faults of a device while a store lives (`lives`).
`crash-*`: what a kill or a power cut leaves (`crashes`); `cut-*`: the same of a tier with
`io.durable`, which promises more. `batches-*`: batches that no planner makes, on the native path
and the interpreted one (`native_batches`); the library as it is, or compiled so that it ends the
process at what C does not define, or at a use of memory that is not its own.
"""

import argparse
import faulthandler
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from python_paths import environment

SECONDS_MAX = 600
"""A scenario that takes longer is a hang; each flush of a tier that cannot open takes seconds."""

PROBLEMS_KEPT = 20
KINDS = [
    f"{kind}-{backend}"
    for kind in ("damage", "calls", "crash", "cut")
    for backend in ("file", "lmdb")
] + ["batches-plain", "batches-undefined", "batches-address"]


@dataclass
class Campaign:
    """What many scenarios came to."""

    counts: Counter = field(default_factory=Counter)
    stall_seconds: float = 0.0
    failures: list[dict] = field(default_factory=list)
    """Of the scenarios that went wrong: seed, what was done, what was wrong."""

    def add(self, answer: dict) -> None:
        """Count one scenario."""
        self.counts.update(answer["counts"])
        self.stall_seconds = max(self.stall_seconds, answer.get("stall_seconds", 0.0))
        if answer["problems"]:
            self.counts["failed"] += 1
            self.failures.append(answer)


def run_campaign(
    kind: str,
    seeds: range,
    *,
    jobs: int = 1,
    folder: Path | None = None,
    seconds_max: float = SECONDS_MAX,
) -> Campaign:
    """Run the scenarios of some seeds in `jobs` processes, started again after each that dies.

    Of kind `mishap`, seed 3 crashes and seed 5 hangs: to see that it is noticed.
    """
    campaign = Campaign()
    answers: queue.Queue[dict | None] = queue.Queue()
    parts = [seeds[job::jobs] for job in range(jobs)]

    def work(part: range) -> None:
        for answer in _answers(kind, part, folder, seconds_max):
            answers.put(answer)
        answers.put(None)

    for part in parts:
        threading.Thread(target=work, args=(part,), daemon=True).start()
    for _ in parts:
        while (answer := answers.get()) is not None:
            campaign.add(answer)
    return campaign


def _answers(kind: str, seeds: range, folder: Path | None, seconds_max: float) -> Iterator[dict]:
    while seeds:
        answered, end = 0, ""
        with (
            tempfile.TemporaryDirectory(dir=folder) as place,
            tempfile.TemporaryFile("w+") as words,
        ):
            for answer in _one_process(kind, seeds, Path(place), words, seconds_max):
                if "ended" in answer:
                    end = answer["ended"]
                    break
                yield answer
                answered += 1
            words.seek(0)
            said = words.read()[-3000:]
        if answered < len(seeds):
            yield {"seed": seeds[answered], "counts": {end: 1, "tries": 1}, "problems": [said]}
            answered += 1
        seeds = seeds[answered:]


def _one_process(kind: str, seeds: range, place: Path, words, seconds_max: float) -> Iterator[dict]:
    lines: queue.Queue[str] = queue.Queue()
    numbers = [str(number) for number in (seeds.start, seeds.stop, seeds.step)]
    checks = {}
    if kind == "batches-address":
        checks = {"LD_PRELOAD": compiler_file("libasan.so"), "ASAN_OPTIONS": "detect_leaks=0"}
    with subprocess.Popen(
        [sys.executable, __file__, "--worker", kind, str(place), *numbers],
        env=environment(**checks),
        stdout=subprocess.PIPE,
        stderr=words,
        text=True,
    ) as process:
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        while True:
            try:
                line = lines.get(timeout=seconds_max)
            except queue.Empty:
                process.send_signal(signal.SIGABRT)  # faulthandler tells where it hangs
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                yield {"ended": "hangs"}
                return
            if not line:
                yield {"ended": "crashes"}
                return
            yield json.loads(line)


def compiler_file(name: str) -> str:
    """Return the path of a file that the compiler brings."""
    command = ["cc", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def _worker(kind: str, place: Path, seeds: range) -> None:
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    run = _runner(kind, place)
    for seed in seeds:
        print(json.dumps(run(seed)), flush=True)


def _runner(kind: str, place: Path) -> Callable[[int], dict]:
    what, _, backend = kind.partition("-")
    if what == "batches":
        from native_batches import CHECKS, HostileBatches

        return HostileBatches(place, *CHECKS[backend]).run
    if what == "damage":
        from damages import DamagedStores

        return DamagedStores(place, backend).run
    if what in {"crash", "cut"}:
        from crashes import CrashedStores

        return CrashedStores(place, backend, durable=what == "cut").run
    if what == "mishap":
        return _mishap
    return lambda seed: _live(place / str(seed), seed, backend)


def _mishap(seed: int) -> dict:
    if seed == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 5:
        threading.Event().wait()
    return {"seed": seed, "counts": {"tries": 1}, "problems": []}


def _live(path: Path, seed: int, backend: str) -> dict:
    from lives import live_under, random_rules

    from tierstore.testing.faults import FaultPlan

    plan = FaultPlan(*random_rules(seed), seed=seed)
    outcome = live_under(path, plan, backend=backend, is_crowded=seed % 2 == 1)
    shutil.rmtree(path)
    return {
        "seed": seed,
        "damages": [str(one) for one in plan.trace[:5]],
        "counts": outcome.counts + Counter(tries=1),
        "problems": outcome.problems,
        "stall_seconds": outcome.stall_seconds,
    }


def main() -> None:
    """Run as a script."""
    if sys.argv[1] == "--worker":
        kind, place, *numbers = sys.argv[2:]
        _worker(kind, Path(place), range(*map(int, numbers)))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the stores lie")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.count)
    found = run_campaign(asked.kind, seeds, jobs=asked.jobs, folder=asked.folder)
    result = {
        "kind": asked.kind,
        "counts": dict(found.counts),
        "longest_stall_seconds": round(found.stall_seconds, 2),
        "failures": found.failures[:PROBLEMS_KEPT],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
