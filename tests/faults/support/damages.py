"""Random damage to the files of a store, and what becomes of the store: chosen by a seed."""

import os
import random
import shutil
import time
import traceback
from collections import Counter
from pathlib import Path

from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.device.system import SYSTEM, SystemCalls
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError

PAGE = 4096
SECTOR = 512
CAPACITY_BYTES = 8 * MIB
OLD = range(96)
NEW = range(1000, 1024)
PATIENCE = Patience(put_seconds=2, flush_seconds=30, close_seconds=2)


class DamagedStores:
    """Copies of two stores of a backend, one closed in order and one killed, to be damaged."""

    def __init__(self, folder: Path, backend: str, *, system: SystemCalls = SYSTEM):
        """Store what will be damaged below `folder`, on a file system as `system` says."""
        self.folder = folder
        self.backend = backend
        self.system = system
        self.chunks = Chunks(12_000)
        self.templates = {}
        live = folder / "live"
        # Two generations and a reset, so that the files hold free pages and holes too.
        with self._opened(live) as store:
            self.chunks.put(store, range(200, 500))
            store.reset()
        with self._opened(live) as store:
            self.chunks.put(store, range(500, 600))
            self.chunks.put(store, OLD)
            store.flush()
            self.templates["killed"] = folder / "killed"
            shutil.copytree(live, folder / "killed")
        self.templates["closed"] = live.rename(folder / "closed")

    def run(self, seed: int) -> dict:
        """Damage a copy (seed 0: not at all) and use it; return what was done and came of it."""
        dice = random.Random(seed)
        state = dice.choice(["closed", "killed"])

        def damage(path):
            return [spoil(dice, path) for _ in range(dice.randint(1, 3))] if seed else []

        return {"seed": seed, **self.run_damaged(state, damage)}

    def run_damaged(self, state: str, damage) -> dict:
        """Use a copy in which `damage(path)` was done; return that and what came of it."""
        path = self.folder / "copy"
        shutil.copytree(self.templates[state], path)
        counts = Counter(tries=1)
        answer = {"damages": damage(path), "state": state, "problems": []}
        started = time.monotonic()
        try:
            self._use(path, counts, answer["problems"])
        except Exception:  # noqa: BLE001 - whatever leaks is an outcome
            counts["exceptions"] += 1
            answer["problems"].append(traceback.format_exc()[-1500:])
        shutil.rmtree(path)
        return answer | {"counts": counts, "stall_seconds": time.monotonic() - started}

    def _opened(self, path: Path):
        config = config_of(
            path, backend=self.backend, primary="1MiB", capacity="8MiB", io={"threads": 1}
        )
        return TierStore.open(
            config, self.chunks.manifest, patience=PATIENCE, open_system=lambda _: self.system
        )

    def _use(self, path: Path, counts: Counter, problems: list) -> None:
        for opening in range(2):
            try:
                store = self._opened(path)
            except TierStoreError as error:
                counts["refused"] += 1
                problems.append(f"opening {opening}: {type(error).__name__}: {error}")
                return
            with store:
                found = self._found(store, OLD, counts, problems)
                counts["recomputed"] += len(OLD) - len(found) if opening == 0 else 0
                self.chunks.put(store, NEW)
                try:
                    store.flush()
                except TierStoreError as error:
                    # What came to light in use is mended when it is opened next.
                    counts["retried"] += 1
                    if opening:
                        problems.append(f"flush: {error}")
                store.check()
            self._measure(path, counts, problems)
        with self._opened(path) as store:
            if len(self._found(store, NEW, counts, problems)) < len(NEW):
                counts["lost"] += 1
                problems.append("a tier is not in use again")
            unsound = store.check()
            if unsound:
                counts["unsound"] += 1
                problems.append(f"check: {unsound[:3]}")
            key = 'discarded_catalogs_total{tier="disk"}'
            counts["started empty late"] += int(key in store.stats().counters)
        self._measure(path, counts, problems)

    def _found(self, store, numbers, counts, problems):
        try:
            return self.chunks.found(store, numbers)
        except AssertionError as error:
            counts["wrong bytes"] += 1
            problems.append(str(error))
            return []

    def _measure(self, path, counts, problems):
        over = du(path) - CAPACITY_BYTES
        if over > 0:
            counts["over quota"] += over
            problems.append(f"{over} bytes over quota")


def spoil(dice: random.Random, path: Path) -> str:
    """Do one damage below a path; return what it was."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    databases = [file for file in files if file.name == "data.mdb"]
    if not files:
        return "nothing left"
    # Half of all damage goes to where databases keep their structure: small, and most of it.
    file = dice.choice(databases) if databases and dice.random() < 0.5 else dice.choice(files)
    damage = dice.choice([_flip, _flip, _zero, _garble, _spoil_metas, _cut, _grow, _swap, _copy])
    what = damage(dice, file, files)
    return f"{damage.__name__.strip('_')} {file.relative_to(path)} {what}"


def _flip(dice, file, _):
    page = dice.randrange(max(1, file.stat().st_size // PAGE))
    offset = min(file.stat().st_size - 1, page * PAGE + dice.randrange(dice.choice([24, 64, PAGE])))
    bit = dice.randrange(8)
    _overwrite(file, offset, bytes([_bytes_at(file, offset, 1)[0] ^ (1 << bit)]))
    return f"{offset}.{bit}"


def _zero(dice, file, _):
    offset = dice.randrange(-(-file.stat().st_size // SECTOR)) * SECTOR
    size = min(dice.choice([1, 8, 64]) * SECTOR, file.stat().st_size - offset)
    _overwrite(file, offset, bytes(size))
    return f"{offset}+{size}"


def _garble(dice, file, _):
    offset = dice.randrange(file.stat().st_size)
    size = min(dice.choice([1, 8, 64, PAGE]), file.stat().st_size - offset)
    _overwrite(file, offset, dice.randbytes(size))
    return f"{offset}+{size}"


def _spoil_metas(dice, file, _):
    """Spoil both meta pages of a database, or the beginning of another file."""
    for page in range(2):
        if file.stat().st_size >= (page + 1) * PAGE:
            offset = page * PAGE + dice.randrange(160)
            size = dice.choice([1, 4, 8, 128])
            _overwrite(file, offset, dice.choice([bytes(size), dice.randbytes(size)]))
    return "both"


def _cut(dice, file, _):
    size = dice.choice([0, 1, PAGE, dice.randrange(file.stat().st_size)])
    os.truncate(file, min(size, file.stat().st_size))
    return str(size)


def _grow(dice, file, _):
    size = file.stat().st_size + dice.choice([1, SECTOR, PAGE, 3 * PAGE])
    os.truncate(file, size)
    return str(size)


def _swap(dice, file, files):
    other = dice.choice(files)
    if other == file:
        file.unlink()
        return "removed"
    aside = file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)
    return f"with {other.name}"


def _copy(dice, file, files):
    """Give a file the content of another one, or of itself as far as some page: an older state."""
    other = dice.choice(files)
    content = other.read_bytes()
    if other == file:
        pages = len(content) // PAGE
        a, b = (dice.randrange(max(1, pages)) for _ in range(2))
        _overwrite(file, a * PAGE, _bytes_at(file, b * PAGE, PAGE))
        return f"page {b} to {a}"
    file.write_bytes(content)
    return f"of {other.name}"


def _bytes_at(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(size)


def _overwrite(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(content)
