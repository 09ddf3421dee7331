"""A prefix cache in 60 lines: compute the chunks of a prompt once, then load them.

python examples/embedded.py FOLDER     # the first run computes, the second one loads from disk
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from tierstore import BackendError, Manifest, OffloadKey, TierStore

TOKENS_PER_CHUNK, CHUNK_BYTES = 16, 64 * 1024
MANIFEST = Manifest.simple("example-model", CHUNK_BYTES)


def keys_of(tokens: list[int]) -> list[OffloadKey]:
    """Return a key per whole chunk; its hash also covers all tokens before the chunk."""
    hashes, running = [], hashlib.sha256()
    for end in range(TOKENS_PER_CHUNK, len(tokens) + 1, TOKENS_PER_CHUNK):
        running.update(np.array(tokens[end - TOKENS_PER_CHUNK : end], "<u4").tobytes())
        hashes.append(running.digest())
    return MANIFEST.keys(hashes)


def compute(key: OffloadKey) -> np.ndarray:
    """Stand in for the engine that prefills one chunk."""
    return np.resize(np.frombuffer(key, np.uint8), CHUNK_BYTES)


def prefill(store: TierStore, tokens: list[int]) -> tuple[np.ndarray, int]:
    """Return the KV bytes of a prompt, and how many of its chunks came from the store."""
    keys = keys_of(tokens)
    cache = np.empty((len(keys), CHUNK_BYTES), np.uint8)
    hit = store.match_prefix(keys).chunk_count  # some may be gone, or damaged, before the `get`
    loaded = [*store.get(keys[:hit], cache[:hit]), False].index(False)
    for i in range(loaded, len(keys)):
        cache[i] = compute(keys[i])
    store.put(keys[loaded:], cache[loaded:])
    return cache, loaded


def main(folder: Path) -> None:
    """Prefill a few prompts with a common beginning, and print what was loaded."""
    disk = {"name": "disk", "backend": "file", "path": str(folder), "capacity": "1GiB"}
    config = {"primary": {"capacity": "64MiB"}, "secondary": [disk]}
    with TierStore.open(config, MANIFEST) as store:
        for question in range(3):
            tail = range(1000 * question, 1000 * question + 160)
            cache, loaded = prefill(store, [*range(800), *tail])
            print(f"prompt {question}: {loaded} of {len(cache)} chunks loaded")
        try:
            store.flush()
        except BackendError as error:
            print("not all on disk:", error)  # a slower cache, not a failure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
