"""What a caller of the embedded store may hand in, and what is said about the rest."""

import numpy as np
import pytest

from tierstore import Manifest, OffloadKey, TierStore, make_offload_key, make_offload_keys

CHUNK_BYTES = 8192
MANIFEST = Manifest.simple("embedded", CHUNK_BYTES)
KEYS = make_offload_keys(MANIFEST.namespace, 0, [bytes([n]) * 32 for n in range(4)])
CHUNKS = np.random.default_rng(7).integers(0, 256, (4, CHUNK_BYTES), np.uint8)


@pytest.fixture
def store():
    with TierStore.open({"primary": {"capacity": "1MiB"}}, MANIFEST) as opened:
        yield opened


class Tensor:
    """What the store knows of a torch tensor: `numpy()`, which some types refuse."""

    def __init__(self, array):
        self._array = array

    def numpy(self):
        if self._array is None:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array


@pytest.mark.parametrize(
    "chunks",
    [
        CHUNKS,
        CHUNKS.view(np.float32),
        Tensor(CHUNKS),
        [memoryview(row) for row in CHUNKS],
        [memoryview(row.view(np.float64)) for row in CHUNKS],
        [row.tobytes() for row in CHUNKS],
    ],
    ids=["uint8", "float32", "tensor", "memoryviews", "memoryviews of float64", "bytes"],
)
def test_chunks_come_in_many_shapes_and_back_as_they_were(store, chunks):
    assert store.put(KEYS, chunks) == 4
    out = np.zeros_like(CHUNKS)
    assert store.get(KEYS, out) == [True] * 4
    assert (out == CHUNKS).all()


@pytest.mark.parametrize("as_out", [np.asarray, Tensor, list], ids=["array", "tensor", "rows"])
def test_chunks_are_got_into_what_the_caller_has_and_unknown_rows_stay(store, as_out):
    store.put(KEYS[:2], CHUNKS[:2])
    out = np.full_like(CHUNKS, 7)
    assert store.get(KEYS, as_out(out)) == [True, True, False, False]
    assert (out[:2] == CHUNKS[:2]).all()
    assert (out[2:] == 7).all()


@pytest.mark.parametrize("empty", [np.empty((0, CHUNK_BYTES), np.uint8), []])
def test_no_keys_are_no_chunks(store, empty):
    assert store.put([], empty) == 0
    assert store.get([], empty) == []
    assert store.match_prefix([]).chunk_count == 0


def test_the_first_of_equal_keys_counts(store):
    assert store.put([KEYS[0], KEYS[0]], CHUNKS[:2]) == 2
    out = np.zeros_like(CHUNKS[:2])
    assert store.get([KEYS[0], KEYS[0]], out) == [True, True]
    assert (out == CHUNKS[0]).all()


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        (CHUNKS[:3], ValueError, r"out: expected 4 rows of 8192 bytes, got shape \(3, 8192\)"),
        (np.zeros((5, CHUNK_BYTES), np.uint8), ValueError, "out: expected 4 rows"),
        (CHUNKS[0], ValueError, r"out: .* shape \(4, 8192\), got shape \(8192,\)"),
        (np.zeros((4, 2 * CHUNK_BYTES), np.uint8)[:, ::2], ValueError, "out: .* strides"),
        (list(CHUNKS[:3]), ValueError, "out: expected 4 buffers, one per key, got 3"),
        ([*CHUNKS[:3], CHUNKS[3, 1:]], ValueError, r"out\[3\]: expected 8192 bytes, got 8191"),
        ([*CHUNKS[:3], CHUNKS[3].tobytes()], ValueError, r"out\[3\]: .* read-only"),
        ([*CHUNKS[:3], memoryview(CHUNKS[3])[::2]], ValueError, r"out\[3\]: .*contiguous"),
        ([*CHUNKS[:3], 3], TypeError, r"out\[3\]: .* 'int'"),
        (np.broadcast_to(CHUNKS[0], (1, CHUNK_BYTES)), ValueError, "out: "),
        (memoryview(CHUNKS), TypeError, "out: .* got memoryview"),
        (Tensor(None), TypeError, r"out: .*BFloat16; .*view\(torch.uint8\)"),
    ],
)
def test_a_wrong_out_is_named_with_what_was_expected(store, chunks, error, words):
    store.put(KEYS, CHUNKS)
    with pytest.raises(error, match=words):
        store.get(KEYS, chunks)


def test_a_read_only_array_can_be_put_and_not_got(store):
    frozen = CHUNKS.copy()
    frozen.flags.writeable = False
    assert store.put(KEYS, frozen) == 4
    with pytest.raises(ValueError, match="out: the array is read-only"):
        store.get(KEYS, frozen)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (make_offload_key(Manifest.simple("x", 1).namespace, 0, bytes(8)), "another namespace"),
        (make_offload_key(MANIFEST.namespace, 1, bytes(8)), "group 1 is not cached"),
        (OffloadKey(MANIFEST.namespace), "20 to 76 bytes each, got 8 to 8"),
        (OffloadKey(KEYS[0] + bytes(33)), "20 to 76 bytes each, got 77 to 77"),
    ],
    ids=["namespace", "group", "too short", "too long"],
)
def test_an_impossible_key_is_refused_and_nothing_is_stored(store, key, words):
    with pytest.raises(ValueError, match=words):
        store.put([key], CHUNKS[:1])
    with pytest.raises(ValueError, match=words):
        store.get([key], CHUNKS[:1].copy())
    with pytest.raises(ValueError, match="keys: "):
        store.put([*KEYS[:3], key], CHUNKS)
    assert store.stats().primary_chunk_count == 0


@pytest.mark.parametrize(
    ("namespace", "group_idx", "block_hash", "words"),
    [
        (b"1234567", 0, bytes(8), "namespace: expected 8 bytes, got 7"),
        (b"12345678", -1, bytes(8), "group_idx: expected 0 to 4294967295, got -1"),
        (b"12345678", 1 << 32, bytes(8), "group_idx: .* got 4294967296"),
        (b"12345678", 0, bytes(7), "expected 8 to 64 bytes, got 7"),
        (b"12345678", 0, bytes(65), "expected 8 to 64 bytes, got 65"),
    ],
)
def test_a_key_is_made_of_eight_bytes_a_group_and_a_hash(namespace, group_idx, block_hash, words):
    with pytest.raises(ValueError, match=words):
        make_offload_key(namespace, group_idx, block_hash)
