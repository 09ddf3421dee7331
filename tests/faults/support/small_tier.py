"""A tier of 16 MiB: filled, used again within its capacity, or refused by name."""

from store_kit import MIB, Chunks, config_of, du

from tierstore import TierStoreError

BACKENDS = ["file", "lmdb"]
CAPACITY_BYTES = 16 * MIB
CHUNKS = Chunks(65_536)
FEW, NEW = range(40), range(100, 180)


def configured(path, backend):
    return config_of(path, backend=backend, primary="2MiB", capacity="16MiB")


def store_and_find(config, path):
    """Store, within the capacity, and find some of it again, also after a restart."""
    with CHUNKS.open(config) as store:
        for start in range(NEW.start, NEW.stop, 20):
            CHUNKS.put(store, range(start, start + 20))
            store.flush()
            assert du(path) <= CAPACITY_BYTES
        assert store.check() == []
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, NEW)
        assert store.check() == []
        assert du(path) <= CAPACITY_BYTES


def fill(config):
    with CHUNKS.open(config) as store:
        assert CHUNKS.put(store, FEW) == len(FEW)


def is_refused(config, *words):
    """Open; return whether it was refused by the right words."""
    try:
        CHUNKS.open(config).close()
    except TierStoreError as error:
        message = str(error)
    else:
        return False
    assert all(word in message for word in words), message
    return True
