"""Engines that share one path, started, reset, closed and killed at random.

    PYTHONPATH=.:tests/support python tests/faults/support/shared_path.py --seconds 600 --seed 1

With `--kills 500` it runs for longer, if need be, until so many engines were killed.
Every engine compares every byte that it gets. `du` of the path is taken all the time; if it is too
large, all engines are stopped and it is taken again, since files may have come and gone under it.
At the end each engine stores, finds what it stored, and has it found by another process.
"""

import argparse
import dataclasses
import json
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from python_paths import FAULT_PROGRAMS, environment
from store_kit import MIB, config_of, du

CAPACITY_BYTES = 48 * MIB
CHUNK_BYTES = {"small": 4096, "middle": 65_536, "large": 262_144}
"""By model: engines of one model share their chunks, those of others only the path."""
PAUSE_SECONDS_MAX = 0.5
SAMPLE_SECONDS = 0.002
EXACT_EVERY = 50
"""One sample of `du` in so many is taken while all engines stand still."""
ANSWER_SECONDS = 300.0
OWN_CHUNKS = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does; the seed decides everything but the scheduling of processes."""

    path: Path
    backend: str
    engine_count: int
    seconds: float
    seed: int
    models: tuple[str, ...] = tuple(CHUNK_BYTES)
    kill_count: int = 0
    """How many engines are killed at least."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, {self.backend}, {self.engine_count} engines of "
            f"{'/'.join(self.models)}, {self.seconds:.0f} s"
        )


class InvariantError(AssertionError):
    """One line: which invariant, which engine, which run."""


@dataclass
class Tally:
    """What a run did."""

    starts: int = 0
    kills: int = 0
    closes: int = 0
    samples: int = 0
    exact_samples: int = 0
    bytes_max: int = 0
    hits: int = 0
    found_by_others: int = 0


class EngineProcess:
    """One engine, and what it says."""

    def __init__(self, plan: Plan, number: int, model: str, seed: int, log: Path) -> None:
        self.model = model
        self.name = f"engine {number} ({model})"
        self._plan = plan
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, FAULT_PROGRAMS / "sharing_process.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
            )
        self.is_open = False
        self._send(
            {
                "config": config_of(
                    plan.path,
                    backend=plan.backend,
                    primary="4MiB",
                    capacity=f"{CAPACITY_BYTES}B",
                ),
                "chunk_bytes": CHUNK_BYTES[model],
                "model": model,
                "seed": seed,
                "resets": 0.03,
            }
        )

    def fileno(self) -> int:
        """Name what it speaks through, for `select`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def look(self) -> None:
        """Notice that it is open; raise if it says that something is broken, or has ended."""
        self._read()

    def command(self, name: str, numbers: range = range(0)) -> dict[str, object]:
        """Have something done, and wait for it."""
        self._send({"do": name, "numbers": list(numbers)})
        while True:
            answer = self._wait(name)
            if answer["done"] == name:
                return answer

    def wait_until_open(self) -> None:
        while not self.is_open:
            self._wait("open")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def leave(self) -> None:
        """Take note that it ends by itself."""
        if code := self._process.wait():
            raise self._broken(f"an engine ends when it is closed: status {code}")
        self.end()

    def _send(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._read()

    def _wait(self, what: str) -> dict[str, object]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            self._process.send_signal(signal.SIGUSR1)  # its log shows where it is
            time.sleep(1)
            raise self._broken(f"no call hangs: no answer to {what!r} for {ANSWER_SECONDS:.0f} s")
        return self._read()

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise self._broken(f"no engine dies by itself: status {code}")
        answer: dict[str, object] = json.loads(line)
        if "broken" in answer:
            raise self._broken(str(answer["broken"]))
        self.is_open = True
        return answer

    def _broken(self, words: str) -> InvariantError:
        pid = self._process.pid
        return InvariantError(f"{words} | {self.name}, pid {pid} | {self._plan} | log {self._log}")


@dataclass
class Run:
    """All engines of one run."""

    plan: Plan
    tally: Tally = field(default_factory=Tally)
    _engines: list[EngineProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.plan.seed)
        self._logs = Path(tempfile.mkdtemp(prefix="shared-path-"))

    def go(self) -> Tally:
        """Run as planned; raise a `InvariantError` where an invariant does not hold."""
        try:
            self._disturb()
            self._examine()
        finally:
            for engine in self._engines:
                engine.end()
        return self.tally

    def _start(self, model: str | None = None) -> EngineProcess:
        self.tally.starts += 1
        engine = EngineProcess(
            self.plan,
            self.tally.starts,
            model or self._dice.choice(self.plan.models),
            self._dice.randrange(1 << 32),
            self._logs / f"engine-{self.tally.starts}.txt",
        )
        self._engines.append(engine)
        return engine

    def _disturb(self) -> None:
        """Start, kill and close engines at random until time is up, all of them open at least once.

        The clock starts when the first one is open.
        """
        ends_at, acts_at = float("inf"), 0.0
        while time.monotonic() < ends_at or self.tally.kills < self.plan.kill_count:
            self._sample()
            for engine in select.select(self._engines, [], [], SAMPLE_SECONDS)[0]:
                engine.look()
            now = time.monotonic()
            if ends_at == float("inf") and any(engine.is_open for engine in self._engines):
                ends_at = now + self.plan.seconds
            if now >= acts_at:
                self._act()
                acts_at = now + self._dice.uniform(0, PAUSE_SECONDS_MAX)

    def _act(self) -> None:
        if len(self._engines) < self.plan.engine_count:
            self._start()
            return
        engine = self._dice.choice(self._engines)
        choice = self._dice.random()
        if choice < 0.15:
            self._engines.remove(engine)
            engine.signal(signal.SIGKILL)
            engine.end()
            self.tally.kills += 1
        elif choice < 0.2 and engine.is_open:
            self._close(engine)

    def _close(self, engine: EngineProcess) -> None:
        self.tally.hits += int(str(engine.command("close")["hits"]))
        engine.leave()
        self._engines.remove(engine)
        self.tally.closes += 1

    def _sample(self) -> None:
        """Take `du`; if it is too much, and once in a while anyway, with all standing still."""
        self.tally.samples += 1
        used = du(self.plan.path)
        if used > CAPACITY_BYTES or self.tally.samples % EXACT_EVERY == 0:
            self.tally.exact_samples += 1
            for engine in self._engines:
                engine.signal(signal.SIGSTOP)
            used = du(self.plan.path)
            for engine in self._engines:
                engine.signal(signal.SIGCONT)
        self.tally.bytes_max = max(self.tally.bytes_max, used)
        if used > CAPACITY_BYTES:
            raise InvariantError(
                f"capacity is hard: du {used} of {CAPACITY_BYTES} bytes | {self.plan} | "
                f"log {self._logs}"
            )

    def _examine(self) -> None:
        """Have every engine that still runs show that it serves, one after the other."""
        while len(self._engines) < self.plan.engine_count:
            self._start()
        for engine in self._engines:
            engine.wait_until_open()
            engine.command("rest")
        for i, engine in enumerate(list(self._engines)):
            numbers = range(100_000 + i * OWN_CHUNKS, 100_000 + (i + 1) * OWN_CHUNKS)
            engine.command("serve", numbers)
            self._sample()
            others = [e for e in self._engines if e is not engine and e.model == engine.model]
            other = others[0] if others else self._start(engine.model)
            other.wait_until_open()
            other.command("find", numbers)
            self.tally.found_by_others += 1
        for engine in list(self._engines):
            engine.command("check")
            self._close(engine)
            self._sample()
        self._examine_afterwards()

    def _examine_afterwards(self) -> None:
        """Open the path once more: all that is below it is accounted for."""
        for model in self.plan.models:
            engine = self._start(model)
            engine.wait_until_open()
            engine.command("serve", range(200_000, 200_000 + OWN_CHUNKS))
            engine.command("check")
            self._close(engine)
            self._sample()


def run(plan: Plan) -> Tally:
    """Run as planned and print what was done."""
    print(plan, flush=True)
    tally = Run(plan).go()
    said = {"backend": plan.backend, "engines": plan.engine_count, "seed": plan.seed}
    print(json.dumps(said | dataclasses.asdict(tally)), flush=True)
    return tally


def main() -> None:
    """Run by hand: for as long as asked, with the seed that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="of all runs together")
    parser.add_argument("--kills", type=int, default=0, help="of all runs together, at least")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", default=list(CHUNK_BYTES), choices=CHUNK_BYTES)
    parser.add_argument("--backend", nargs="+", default=["file", "lmdb"])
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    cases = [(b, n) for b in arguments.backend for n in arguments.engines]
    for backend, engine_count in cases:
        with tempfile.TemporaryDirectory() as folder:
            run(
                Plan(
                    path=Path(folder) / "tier",
                    backend=backend,
                    engine_count=engine_count,
                    seconds=arguments.seconds / len(cases),
                    seed=seed,
                    models=tuple(arguments.models),
                    kill_count=-(-arguments.kills // len(cases)),
                )
            )


if __name__ == "__main__":
    main()
