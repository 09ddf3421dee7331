"""Stores as a kill or a power cut leaves them, at any write: built by a seed, and used."""

import random
import shutil
import time
import traceback
from collections import Counter
from pathlib import Path

from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStore
from tierstore.embedded.planes import Patience
from tierstore.errors import TierStoreError
from tierstore.testing.crash import CrashRecorder

CAPACITY_BYTES = 8 * MIB
BATCH = 16
FORGOTTEN = range(2 * BATCH)
KEPT = range(100, 100 + 2 * BATCH)
CROWD = range(200, 200 + 12 * BATCH)
NEW = range(1000, 1000 + BATCH)
PATIENCE = Patience(put_seconds=5, flush_seconds=60, close_seconds=5)
CHUNKS = Chunks(65_536)


class CrashedStores:
    """One recorded scenario of a backend: store, reset, restart, evict; and its images."""

    def __init__(self, folder: Path, backend: str, *, durable: bool = False):
        """Record the scenario below `folder`."""
        self.folder = folder
        self.backend = backend
        self.durable = durable
        self.recorder = CrashRecorder()
        path = folder / "recorded"
        with self._opened(path, self.recorder) as store:
            self._store(store, FORGOTTEN)
            self.recorder.mark(("resetting", []))
            store.reset()
            self._store(store, KEPT)
        self.recorder.look(path)
        with self._opened(path, self.recorder) as store:
            CHUNKS.found(store, KEPT)
            self._store(store, CROWD)
        self.recorder.look(path)
        shutil.rmtree(path)

    def run(self, seed: int) -> dict:
        """Build an image by a seed (odd: of a power cut) and use it."""
        dice = random.Random(seed)
        length = dice.randrange(self.recorder.length + 1)
        return self.use_image(length, dice if seed % 2 else None, seed=seed)

    def use_image(self, length: int, dice: random.Random | None, *, seed: int = 0) -> dict:
        """Build one image and use it; return what it is and came to."""
        path = self.folder / f"image-{seed}-{length}"
        self.recorder.build(path, length, dice=dice)
        counts = Counter(tries=1)
        what = f"{'power cut' if dice else 'killed'} after {length} of {self.recorder.length}"
        answer = {"seed": seed, "damages": [what], "problems": []}
        started = time.monotonic()
        try:
            self._use(path, length, is_cut=dice is not None, counts=counts, **answer)
        except Exception:  # noqa: BLE001 - whatever leaks is an outcome
            counts["exceptions"] += 1
            answer["problems"].append(traceback.format_exc()[-1500:])
        shutil.rmtree(path)
        return answer | {"counts": counts, "stall_seconds": time.monotonic() - started}

    def _opened(self, path: Path, recorder: CrashRecorder | None = None) -> TierStore:
        config = config_of(
            path,
            backend=self.backend,
            primary="2MiB",
            capacity="8MiB",
            io={"threads": 1, "durable": self.durable},
        )
        more = {} if recorder is None else {"open_system": recorder.open_system}
        return TierStore.open(config, CHUNKS.manifest, patience=PATIENCE, **more)

    def _store(self, store, numbers):
        for first in range(0, len(numbers), BATCH):
            batch = numbers[first : first + BATCH]
            assert CHUNKS.put(store, batch) == BATCH
            store.flush()
            self.recorder.mark(("flushed", list(batch)))

    def _use(self, path, length, *, is_cut, counts, problems, **_):
        marks = self.recorder.marks(length)
        is_reset = any(kind == "resetting" for kind, _ in marks)
        batches = [batch for kind, batch in marks if kind == "flushed"]
        # Two batches that were flushed last are the newest: nothing evicts them.
        promised = {number for batch in batches[-2:] for number in batch}
        if is_reset:
            promised -= set(FORGOTTEN)
        if is_cut and not self.durable:
            promised = set()
        try:
            store = self._opened(path)
        except TierStoreError as error:
            counts["refused"] += 1
            problems.append(f"{type(error).__name__}: {error}")
            return
        with store:
            self._measure(path, counts, problems)
            found = set()
            for numbers in (FORGOTTEN, KEPT, CROWD):
                found |= self._found(store, numbers, counts, problems)
            counts["recomputed"] += len(promised - found)
            if promised - found:
                counts["lost"] += len(promised - found)
                problems.append(f"flushed and lost: {sorted(promised - found)}")
            is_reset_known = is_reset and any(batch[0] >= KEPT[0] for batch in batches)
            if is_reset_known and not is_cut and found & set(FORGOTTEN):
                problems.append("found although it was reset")
            CHUNKS.put(store, NEW)
            store.flush()
            unsound = store.check()
            if unsound:
                counts["unsound"] += 1
                problems.append(f"check: {unsound[:3]}")
        self._measure(path, counts, problems)
        with self._opened(path) as store:
            if len(self._found(store, NEW, counts, problems)) < len(NEW):
                problems.append("a tier is not in use again")
        self._measure(path, counts, problems)

    def _found(self, store, numbers, counts, problems):
        try:
            return set(CHUNKS.found(store, numbers))
        except AssertionError as error:
            counts["wrong bytes"] += 1
            problems.append(str(error))
            return set()

    def _measure(self, path, counts, problems):
        over = du(path) - CAPACITY_BYTES
        if over > 0:
            counts["over quota"] += over
            problems.append(f"{over} bytes over quota")
