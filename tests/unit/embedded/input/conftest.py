import pytest
from store_kit import Chunks, config_of

CHUNKS = Chunks(4096)
STORED = range(100, 104)
NEVER_STORED = range(4)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store with four chunks that the tests of a module share."""
    path = tmp_path_factory.mktemp("store") / "tier"
    with CHUNKS.open(config_of(path, primary="1MiB", capacity="8MiB")) as store:
        assert CHUNKS.put(store, STORED) == 4
        yield store


@pytest.fixture
def unharmed(store):
    """What every test with it ends with: nothing came, and nothing went."""
    before = store.stats().primary_chunk_count
    yield store
    assert store.stats().primary_chunk_count == before
    assert store.check() == []
    assert CHUNKS.found(store, [*NEVER_STORED, *STORED]) == list(STORED)
