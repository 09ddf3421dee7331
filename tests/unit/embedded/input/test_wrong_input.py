"""Wrong input to every public name: an error that names what is wrong, and nothing is changed."""

import dataclasses

import numpy as np
import pytest
from store_kit import Chunks, config_of

from tierstore import (
    Manifest,
    TierStore,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_namespace,
    load_config,
    make_offload_keys,
)
from tierstore.errors import CatalogError, ConfigError, ManifestError
from tierstore.layout import GroupKind

CHUNKS = Chunks(4096)
NAMESPACE = CHUNKS.manifest.namespace
NUMBERS = range(4)
KEYS = CHUNKS.keys(NUMBERS)
ROWS = CHUNKS.array(NUMBERS)
OTHER_KEYS = Chunks(4096, model="another").keys(NUMBERS)


@pytest.fixture
def unharmed(unharmed):
    """Nor is anything pinned, or counted as lost."""
    yield unharmed
    unharmed.flush()
    counters = unharmed.stats().counters
    assert not any(name.startswith(("dropped", "misses", "refused")) for name in counters)


WRONG_KEYS = {
    "none": None,
    "one key": KEYS[0],
    "text": "keys",
    "mapping": dict.fromkeys(KEYS),
    "generator": (key for key in KEYS),
    "array": np.array(KEYS),
    "hexadecimal": [key.hex() for key in KEYS],
    "numbers": [1, 2, 3, 4],
    "none at the end": [*KEYS[:3], None],
    "bytearrays": list(map(bytearray, KEYS)),
    "another namespace": OTHER_KEYS,
    "another namespace at the end": [*KEYS[:3], OTHER_KEYS[3]],
    "no group": [*KEYS[:3], NAMESPACE],
    "no hash": [*KEYS[:3], NAMESPACE + bytes(4)],
    "too long a hash": [*KEYS[:3], KEYS[3] + bytes(57)],
    "far too long a hash": [*KEYS[:3], KEYS[3] + bytes(600)],
    "unknown group": make_offload_keys(NAMESPACE, 1, [bytes(32)] * 4),
    "unknown group at the end": [*KEYS[:3], *make_offload_keys(NAMESPACE, 1, [bytes(32)])],
}


@pytest.mark.parametrize("keys", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_what_is_no_list_of_keys_of_one_group_is_refused(unharmed, keys):
    with pytest.raises((TypeError, ValueError), match="key"):
        unharmed.put(keys, ROWS)
    out = np.zeros_like(ROWS)
    with pytest.raises((TypeError, ValueError), match="key"):
        unharmed.get(keys, out)
    assert not out.any()


@pytest.mark.parametrize("keys", [None, KEYS[0], [5], OTHER_KEYS, [NAMESPACE], [*KEYS, ""]])
def test_a_prefix_of_no_keys_is_refused(unharmed, keys):
    with pytest.raises((TypeError, ValueError), match="key"):
        unharmed.match_prefix(keys)


WRONG_ARRAYS = [
    None,
    7,
    "rows",
    ROWS.tobytes(),
    ROWS[:3],
    ROWS[0],
    ROWS.reshape(4, 2, 2048),
    np.asfortranarray(ROWS),
    np.zeros((4, 8192), np.uint8)[:, ::2],
    np.zeros((4, 4096), np.int16),
    np.zeros((4, 4096), object),
    np.zeros((4, 512), object),
    list(ROWS[:3]),
    [*ROWS[:3], None],
    [*ROWS[:3], "x" * 4096],
    [*ROWS[:3], bytearray(4095)],
    [*ROWS[:3], memoryview(bytearray(8192))[::2]],
    [*ROWS[:3], np.zeros(512, object)],
]


@pytest.mark.parametrize("array", WRONG_ARRAYS, ids=lambda array: str(type(array).__name__))
def test_what_is_no_row_of_bytes_per_key_is_refused(unharmed, array):
    with pytest.raises((TypeError, ValueError), match=r"^array"):
        unharmed.put(KEYS, array)
    with pytest.raises((TypeError, ValueError), match=r"^out"):
        unharmed.get(CHUNKS.keys(range(100, 104)), array)


def test_a_read_only_out_is_refused(unharmed):
    frozen = np.zeros((4, 4096), np.uint8)
    frozen.flags.writeable = False
    for out in (frozen, [bytes(4096)] * 4, [*np.zeros((3, 4096), np.uint8), frozen[0]]):
        with pytest.raises(ValueError, match=r"^out.*read-only"):
            unharmed.get(CHUNKS.keys(range(100, 104)), out)
    assert not frozen.any()


def test_tensors_are_taken_as_arrays_are_and_refused_with_a_remedy(unharmed):
    torch = pytest.importorskip("torch")
    keys = CHUNKS.keys(range(100, 104))
    out = torch.zeros(4, 4096, dtype=torch.uint8)
    assert unharmed.get(keys, out) == [True] * 4
    assert np.array_equal(out.numpy(), CHUNKS.array(range(100, 104)))
    rows = list(torch.zeros(4, 4096, dtype=torch.uint8))
    assert unharmed.get(keys, rows) == [True] * 4
    assert np.array_equal(np.stack(rows), CHUNKS.array(range(100, 104)))
    for tensor in (
        torch.zeros(4, 2048, dtype=torch.bfloat16),
        torch.zeros(4, 1024, requires_grad=True),
        torch.zeros(4, 4096, dtype=torch.uint8, device="meta"),
        torch.zeros(4, 4096, dtype=torch.uint8).to_sparse(),
    ):
        with pytest.raises(TypeError, match=r"view\(torch.uint8\)"):
            unharmed.put(KEYS, tensor)
    with pytest.raises(ValueError, match="contiguous"):
        unharmed.put(KEYS, torch.zeros(4096, 4, dtype=torch.uint8).T)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, 0, [bytes(32)]), ValueError, "namespace"),
        (("8letters", 0, [bytes(32)]), ValueError, "namespace"),
        ((bytearray(8), 0, [bytes(32)]), ValueError, "namespace"),
        ((bytes(7), 0, [bytes(32)]), ValueError, "namespace"),
        ((NAMESPACE, -1, [bytes(32)]), ValueError, "group_idx"),
        ((NAMESPACE, 1 << 32, [bytes(32)]), ValueError, "group_idx"),
        ((NAMESPACE, 0.0, [bytes(32)]), ValueError, "group_idx"),
        ((NAMESPACE, 0, None), TypeError, "block_hashes"),
        ((NAMESPACE, 0, bytes(32)), TypeError, "block_hashes"),
        ((NAMESPACE, 0, ["x" * 32]), TypeError, "block_hashes"),
        ((NAMESPACE, 0, [bytes(7)]), ValueError, "block_hashes"),
        ((NAMESPACE, 0, [bytes(65)]), ValueError, "block_hashes"),
    ],
)
def test_keys_are_not_made_of_anything_else(arguments, error, words):
    with pytest.raises(error, match=words):
        make_offload_keys(*arguments)


@pytest.mark.parametrize("key", [None, 5, "x" * 44, b"", bytes(19), bytes(77)])
def test_what_is_no_key_has_no_parts(key):
    for part in (get_offload_namespace, get_offload_group_idx, get_offload_block_hash):
        with pytest.raises(ValueError, match="make_offload_keys"):
            part(key)


@pytest.mark.parametrize("chunk_bytes", [0, -1, 4096.0, "4096", None, 1 << 32, 1 << 50])
def test_a_manifest_of_impossible_chunks_is_refused(chunk_bytes):
    with pytest.raises(ManifestError, match="expected"):
        Manifest.simple("model", chunk_bytes)


def test_a_manifest_takes_the_integers_of_numpy_as_they_are_meant():
    assert Manifest.simple("m", np.int64(4096)).namespace == Manifest.simple("m", 4096).namespace


@pytest.mark.parametrize("model", [None, 5, b"model"])
def test_a_manifest_of_a_model_without_name_is_refused(model):
    with pytest.raises(ManifestError, match="model: expected a string"):
        Manifest.simple(model, 4096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "full"}, r"groups\[0\].kind: expected a GroupKind"),
        ({"tokens_per_block": 0}, r"groups\[0\].tokens_per_block: expected a positive int"),
        ({"tokens_per_block": "16"}, r"groups\[0\].tokens_per_block: expected a positive int"),
        ({"kind": GroupKind.SLIDING_WINDOW, "window_tokens": -1}, r"groups\[0\].window_tokens"),
        ({"window_tokens": None}, r"groups\[0\].window_tokens"),
        ({"layer_names": ("a", "b")}, r"groups\[0\].layer_names: expected a name per page"),
        ({"layer_names": (1,)}, r"groups\[0\].layer_names: expected a name per page"),
    ],
    ids=str,
)
def test_a_group_that_cannot_be_is_refused(changes, words):
    group = dataclasses.replace(CHUNKS.manifest.groups[0], **changes)
    with pytest.raises(ManifestError, match=words):
        dataclasses.replace(CHUNKS.manifest, groups=(group,))


@pytest.mark.parametrize("extra", [(("name", b"value"),), (("name",),), ("name",), {"a": 1}])
def test_a_further_fact_that_is_no_pair_of_strings_is_refused(extra):
    with pytest.raises(ManifestError, match="extra: expected"):
        dataclasses.replace(CHUNKS.manifest, extra=extra)


@pytest.mark.parametrize("manifest", [None, "model", CHUNKS.manifest.canonical_json])
def test_a_store_without_a_manifest_is_refused(tmp_path, manifest):
    with pytest.raises(TypeError, match="expected a Manifest"):
        TierStore.open(config_of(tmp_path / "tier"), manifest)
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "mapping"),
        (5, "mapping"),
        (b"/etc/tierstore.yaml", "mapping"),
        ([], "mapping"),
        ("~nobody-of-this-name/tierstore.yaml", "home"),
        ("tier\0store.yaml", "cannot be read"),
        ({"primary": {"capacity": "1048577TiB"}}, "primary.capacity: expected at most"),
        ({"primary": {"capacity": "9" * 5000 + "B"}}, "primary.capacity: expected at most"),
        (config_of("a\0b"), r"secondary\[0\].path: a path has no zero bytes"),
        (config_of("~nobody-of-this-name/x"), r"secondary\[0\].path: .* home"),
        (config_of("x", capacity="9e9TiB"), r"secondary\[0\].capacity"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configuration_out_of_this_world_is_an_error_of_the_configuration(source, words):
    with pytest.raises(ConfigError, match=words):
        load_config(source)


@pytest.mark.parametrize(
    "text",
    ["!!int abc", "!!float abc", "!!bool abc", "!!timestamp abc", "9" * 5000, "[" * 5000],
    ids=lambda text: text[:20],
)
def test_yaml_that_the_library_stumbles_over_is_an_error_of_the_configuration(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(f"primary: {text}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(path)


def test_more_memory_than_there_is_is_refused_with_the_key_and_nothing_stays_open(tmp_path):
    config = config_of(tmp_path / "tier", primary="64TiB")
    with pytest.raises(ConfigError, match=r"primary\.capacity.*lower it"):
        CHUNKS.open(config)
    with CHUNKS.open(config | {"primary": {"capacity": "1MiB"}}) as store:
        assert CHUNKS.put(store, NUMBERS) == 4


@pytest.mark.parametrize("below", [".", "below"])
def test_a_path_that_is_a_file_is_refused_and_the_file_is_left_alone(tmp_path, below):
    path = tmp_path / "tier"
    path.write_bytes(b"somebody's")
    with pytest.raises(CatalogError, match="Not a directory; move the file away"):
        CHUNKS.open(config_of(path / below))
    assert path.read_bytes() == b"somebody's"
