"""A catalog that does not answer, since another process stopped within a transaction."""

import pytest
from store_kit import Chunks, config_of

CHUNKS = Chunks(4096)


@pytest.mark.parametrize("backend", ["file", "lmdb"])
def test_what_waits_for_a_stuck_catalog_is_bounded_and_memory_goes_on_serving(tmp_path, backend):
    config = config_of(tmp_path, backend=backend, primary="1MiB", capacity="8MiB")
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(16))
        store.flush()
        (secondary,) = store._stack.secondaries
        with (
            secondary._threads.catalog._env.write()
        ):  # as a stopped process would: the writer waits
            for _ in range(3000):
                assert store.get(CHUNKS.keys(range(16)), bytearrays(16)) == [True] * 16
            assert len(secondary._threads._mailbox._items) <= 1024
        store.flush()
        assert store.check() == []
        CHUNKS.put(store, range(16, 32))
        store.flush()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(32)) == list(range(32))


def bytearrays(count):
    return [bytearray(4096) for _ in range(count)]
