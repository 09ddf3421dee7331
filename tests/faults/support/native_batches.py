"""Batches that no planner makes, for the native path and the interpreted one: the same comes of it.

Each scenario makes up places, keys and slots, hands them to a backend of each path in directories
of their own, and compares all that anybody can see: verdicts, memory in and beside the slots,
files. Nothing here depends on time, so a seed tells a scenario for good.
"""

import mmap
import os
import random
import resource
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from native_library import compiled, interpreted

from tierstore.backend.protocol import RecordIo
from tierstore.backend.record_batch import RecordBatch
from tierstore.backend.segments.backend import FileBackend
from tierstore.codec.record import PLACE_DTYPE
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.native.library import load_library
from tierstore.testing.spread import spread_hash
from tierstore.transfer import Place

__all__ = ["CHECKS", "HostileBatches"]

CHECKS = {
    "plain": (),
    "undefined": ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
    "address": ("-fsanitize=address", "-g"),
}
"""Flags of a library that looks after itself; `address` wants its runtime loaded first."""

_EDGES = [0, 1, 2, 31, 32, 33, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_PAYLOADS = [0, 1, 120, 4095, 4096, 4097, 8192, 2**31, 2**32 - 1]
_SEGMENT_PAGES = [0, 1, 2, 40, 128, 2**20, 2**31, 2**32 - 1]
_SHORT_FILE_PAGES = 300
_STALE_READS = 3
_FILE_BYTES_MAX = 1 << 26
"""A segment of a million pages would be made, else."""


class HostileBatches:
    """Scenarios of one process, each on both paths."""

    def __init__(self, place: Path, *flags: str) -> None:
        """Work below `place`; the library is compiled with `flags`, too."""
        self._place = place
        self._libraries = {"native": lambda: load_library(compiled(*flags)), "python": interpreted}

    def run(self, seed: int) -> dict:
        """Carry out one scenario; return what it came to, as campaigns want it."""
        seen = {path: self._live(path, seed) for path in self._libraries}
        problems = [
            f"{name}: {_difference(ours, theirs)}"
            for (name, ours), (_, theirs) in zip(*seen.values(), strict=True)
            if ours != theirs
        ]
        counts = Counter(tries=1)
        for name, answer in seen["native"]:
            if name == "verdicts" and isinstance(answer, dict):
                counts.update(reason.value for reason in answer.values())
            elif name == "verdicts":
                counts["raised"] += 1
            elif name == "records":
                counts["records"] += answer
        return {"seed": seed, "counts": counts, "problems": problems}

    def _live(self, path: str, seed: int) -> list[tuple[str, object]]:
        """Write and read one batch again and again; return what was seen, by what it is."""
        rng = random.Random(seed)
        folder = self._place / f"{seed}-{path}"
        mode = rng.choice(["direct", "buffered"])
        backend = FileBackend(folder, rank=seed % 3, mode=mode, library=self._libraries[path])
        backend.open()
        if backend.is_native != (path == "native"):
            return [("path", path)]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES_MAX, limits[1]))
        try:
            return _seen(backend, folder, rng)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            backend.close()
            shutil.rmtree(folder)


def _difference(ours: object, theirs: object) -> str:
    if isinstance(ours, bytes) and isinstance(theirs, bytes):
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        return f"first at {at // PAGE_BYTES} * {PAGE_BYTES} + {at % PAGE_BYTES} of {len(ours)}"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        return str([(name, ours.get(name), theirs.get(name)) for name in names[:5]])
    return f"native {ours!r:.300}, interpreted {theirs!r:.300}"


def _seen(backend: FileBackend, folder: Path, rng: random.Random) -> list[tuple[str, object]]:
    count = rng.choice([1, 2, 5, 33, 70, 200]) if rng.random() < 0.99 else 3000
    places = _places(rng, count)
    keys = _keys(rng, count)
    seen: list[tuple[str, object]] = []
    for turn in range(1 + _STALE_READS):
        memory, slots = _slots(rng, places)
        chosen = list(range(count))
        if turn:
            rng.shuffle(chosen)
            chosen = (chosen + chosen[: rng.randrange(3)])[: rng.randint(1, count)]
        encoded = [Place(_mistaken(rng, places[i].tobytes())) for i in chosen]
        records = _batch(
            rng, [keys[i] for i in chosen], encoded, memory, [slots[i] for i in chosen]
        )
        try:
            answer: object = dict(
                sorted((backend.read if turn else backend.write)(records).items())
            )
        except Exception as error:  # noqa: BLE001  any is an answer, which the other path gives, too
            answer = repr(error)
        seen += [("verdicts", answer), ("memory", bytes(memory)), ("files", _files(folder))]
        seen.append(("records", len(records)))
        if turn and rng.random() < 0.5:
            _disturb(rng, folder)
    return seen


def _places(rng: random.Random, count: int) -> np.ndarray:
    """Return extents side by side, and some fields of some of them spoiled."""
    places = np.zeros(count, PLACE_DTYPE)
    stride, page, index, segment = rng.choice([1, 1, 2, 3]), 0, 0, rng.choice([0, 2**32 - 2])
    length = rng.choice([1, 3, 31, 32, 33])
    for i in range(count):
        if index == length or page + 1 + (index + 1) * stride > 128:
            page, index = page + 1 + index * stride, 0
            length = rng.choice([1, 3, 31, 32, 33])
        if page + 1 + length * stride > 128:
            page, index, segment = 0, 0, (segment + 1) % 2**32
        payload = rng.choice([1, 100, 4096, stride * 4096, stride * 4096 - 1])
        places[i] = segment, page, index, stride, min(payload, stride * 4096), 128
        index += 1
    for _ in range(rng.choice([0, 0, 1, 3, count])):
        place = places[rng.randrange(count)]
        name = rng.choice(PLACE_DTYPE.names)
        if name == "segment_pages":
            place[name] = rng.choice(_SEGMENT_PAGES)
        elif name == "payload_bytes":
            place[name] = rng.choice(_PAYLOADS)
        elif name == "segment":
            place[name] = rng.choice([0, 1, 2**32 - 1])
        else:
            place[name] = (int(place[name]) + rng.choice([*_EDGES, -1])) % 2**32
    if rng.random() < 0.3:
        rng.shuffle(order := list(range(count)))
        places = places[order]
    return places


def _keys(rng: random.Random, count: int) -> list[OffloadKey]:
    lengths = rng.choice([[32], [20, 76], [0, 1, 76, 77, 78, 255], range(256)])
    distinct = rng.choice([count, count, 1, 3])
    long = [spread_hash((rng.random(), i)) * 8 for i in range(distinct)]
    return [OffloadKey(long[i % distinct][: rng.choice(lengths)]) for i in range(count)]


def _slots(rng: random.Random, places: np.ndarray) -> tuple[memoryview, list[tuple[int, int]]]:
    """Return memory and slots in it: apart, of other lengths, on one another or not aligned."""
    sizes = [min(int(stride), 4) * PAGE_BYTES for stride in places["stride_pages"]]
    kind = rng.choice(["apart", "apart", "lengths", "aliased", "unaligned"])
    starts, end = [], PAGE_BYTES
    for i, size in enumerate(sizes):
        if kind == "lengths" and rng.random() < 0.2:
            sizes[i] = rng.choice([0, 1, 100, 4095, 4097, size + PAGE_BYTES])
        shift = rng.choice([1, 8, 512]) if kind == "unaligned" else 0
        starts.append(end + shift)
        end += sizes[i] + 2 * PAGE_BYTES - sizes[i] % PAGE_BYTES
    memory = memoryview(mmap.mmap(-1, end + 8 * PAGE_BYTES))
    memory[:] = rng.randbytes(PAGE_BYTES) * (len(memory) // PAGE_BYTES)
    for i, start in enumerate(starts):
        memory[start : start + 4] = i.to_bytes(4, "little")
    if kind == "aliased":
        starts = [rng.choice(starts[: 1 + i]) for i in range(len(starts))]
    return memory, list(zip(starts, sizes, strict=True))


def _mistaken(rng: random.Random, place: bytes) -> bytes:
    return rng.choice([b"", place[:-1], place + b"\0"]) if rng.random() < 0.002 else place


def _batch(rng, keys, places, memory, slots) -> RecordBatch | list[RecordIo]:
    """Return a batch, or records one by one; places at any address."""
    sizes = {size for _, size in slots}
    if len(sizes) == 1 and rng.random() < 0.7:
        if {len(place) for place in places} == {24} and rng.random() < 0.5:
            shift = rng.randrange(8)
            joined = bytes(shift) + b"".join(places)
            places = np.frombuffer(joined, "V24", offset=shift)
        offsets = np.array([start for start, _ in slots])
        return RecordBatch.in_pool(keys, places, memory, offsets, sizes.pop())
    views = [memory[start : start + size] for start, size in slots]
    return [RecordIo(*fields) for fields in zip(keys, places, views, strict=True)]


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, _sum(path)) for path in sorted(folder.iterdir())}


def _sum(path: Path) -> int:
    return hash(path.read_bytes()) if path.is_file() else 0


def _disturb(rng: random.Random, folder: Path) -> None:
    """Change a file behind the back of descriptors and header pages that are cached."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    if not paths:
        return
    path = rng.choice(paths)
    size = path.stat().st_size
    kind = rng.choice(["cut", "grow", "hole", "flip", "gone", "copy", "swap"])
    other = rng.choice(paths)
    if kind == "gone":
        path.unlink()
    elif kind == "copy":
        shutil.copy(path, folder / "copy")
        (folder / "copy").rename(path)
    elif kind == "swap":
        shutil.copy(other, folder / "copy")
        (folder / "copy").rename(path)
    elif kind in {"cut", "grow"}:
        os.truncate(path, rng.randrange(size + 1) if kind == "cut" else size + rng.randrange(9999))
    elif size:
        with path.open("r+b") as file:
            at = rng.randrange(min(size, _SHORT_FILE_PAGES * PAGE_BYTES))
            if kind == "hole":
                at -= at % PAGE_BYTES
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes(PAGE_BYTES) if kind == "hole" else bytes([old[0] ^ 0x40]))
