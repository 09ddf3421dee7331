"""One store, many copies with flipped bits, each used in a process of its own.

A child that dies by a signal, or is still alive when its alarm rings, is an outcome like any other.
As a script: folder, backend, `closed` or `killed`, first seed, count; prints a trial per line.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from python_paths import environment
from store_kit import Chunks, config_of, misses

from tierstore.errors import TierStoreError

PAGE = 4096
PATIENCE_SECONDS = 60
OLD = range(120)
NEW = range(1000, 1030)


@dataclass(frozen=True)
class Trial:
    """What one child saw; `kind` is the class it falls into."""

    kind: str
    detail: str = ""
    found_count: int = 0
    flips: tuple[str, ...] = ()
    is_sound: bool = True


def trials(folder: Path, backend: str, state: str, seeds: range) -> Iterator[Trial]:
    """Run trials, forked from a small process without threads."""
    arguments = [folder, backend, state, str(seeds.start), str(len(seeds))]
    with subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            yield Trial(**json.loads(line))
    assert process.returncode == 0


class FlippedStore:
    """A stored path to be copied and spoilt."""

    def __init__(self, folder: Path, backend: str, *, closed: bool, chunk_bytes: int = 12_000):
        """`closed`: in order; otherwise the files are those of an engine that was killed."""
        self.folder = folder
        self.chunks = Chunks(chunk_bytes)
        self.backend = backend
        self.template = folder / "template"
        live = folder / "live"
        # Two generations and an eviction, so that the files hold free pages and holes too.
        with self.chunks.open(self._config(live)) as store:
            self.chunks.put(store, range(200, 800))
        with self.chunks.open(self._config(live)) as store:
            self.chunks.put(store, OLD)
            store.flush()
            if not closed:
                shutil.copytree(live, self.template)
        if closed:
            live.rename(self.template)

    def run(self, seed: int) -> Trial:
        """Flip bits in a copy, chosen by the seed (0: none), and use it."""
        dice = random.Random(seed)
        count = dice.randint(1, 8) if seed else 0
        path = self.folder / f"copy-{seed}"
        shutil.copytree(self.template, path)
        try:
            flips = tuple(_flip(dice, path) for _ in range(count))
            return self._use(path, flips)
        finally:
            shutil.rmtree(path)

    def _config(self, path: Path):
        return config_of(path, backend=self.backend, primary="1MiB", capacity="8MiB")

    def _use(self, path: Path, flips: tuple[str, ...]) -> Trial:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_SECONDS)
            with os.fdopen(sender, "w") as answer:
                json.dump(self._verdict(path), answer)
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as answer:
            text = answer.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            kind = "hang" if number == signal.SIGALRM else "crash"
            return Trial(kind, signal.Signals(number).name, flips=flips)
        return Trial(**json.loads(text), flips=flips)

    def _verdict(self, path: Path) -> dict[str, object]:
        try:
            return self._verdict_of_opened(path)
        except AssertionError as error:
            # The chunks compare every byte that is served.
            return {"kind": "wrong bytes", "detail": traceback.format_exc()[-1500:] + str(error)}
        except TierStoreError as error:
            return {"kind": "refused", "detail": f"{type(error).__name__}: {error}"}
        except Exception:  # noqa: BLE001 - whatever leaks is an outcome
            return {"kind": "exception", "detail": traceback.format_exc()[-1500:]}

    def _verdict_of_opened(self, path: Path) -> dict[str, object]:
        chunks, config = self.chunks, self._config(path)
        with chunks.open(config) as store:
            found = chunks.found(store, OLD)
            chunks.put(store, NEW)
            chunks.found(store, [*OLD, *NEW])
            store.check()
            counters = store.stats().counters
            lost = misses(store)
        # What was damaged and came to light is mended by now, at the price of what was new.
        with chunks.open(config) as store:
            kept = chunks.found(store, NEW)
            restarted = store.stats().counters
            chunks.found(store, OLD)
            chunks.put(store, OLD)
        with chunks.open(config) as store:
            again = chunks.found(store, OLD)
            problems = store.check()
        discarded = 'discarded_catalogs_total{tier="disk"}'
        if len(again) < len(OLD) * 0.9:
            kind = "dead tier"
        elif discarded in counters:
            kind = "started empty"
        elif discarded in restarted:
            kind = "started empty at the second opening"
        elif len(kept) < len(NEW):
            kind = "writes refused"
        elif len(found) < len(OLD):
            kind = "counted miss" if sum(lost.values()) else "missing"
        else:
            kind = "right"
        return {
            "kind": kind,
            "detail": f"kept {len(kept)}, again {len(again)}, {lost} {problems[:3]}",
            "found_count": len(found),
            "is_sound": not problems,
        }


def _flip(dice: random.Random, path: Path) -> str:
    """Flip one bit: anywhere, or where a database keeps its structure."""
    databases = sorted(path.rglob("data.mdb"))
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    target = dice.random()
    if target < 0.25:
        sizes = [file.stat().st_size for file in files]
        (file,) = dice.choices(files, sizes)
        offset = dice.randrange(file.stat().st_size)
    else:
        file = databases[0] if target < 0.75 else dice.choice(databases)
        page = dice.randrange(file.stat().st_size // PAGE)
        span = dice.choice([24, 64, PAGE])
        offset = page * PAGE + dice.randrange(span)
    bit = dice.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))
    return f"{file.relative_to(path)}:{offset // PAGE}+{offset % PAGE}.{bit}"


def main() -> None:
    """Run as a script."""
    folder, backend, state, first, count = sys.argv[1:]
    store = FlippedStore(Path(folder), backend, closed=state == "closed")
    for seed in range(int(first), int(first) + int(count)):
        print(json.dumps(dataclasses.asdict(store.run(seed))), flush=True)


if __name__ == "__main__":
    main()
