"""Two engines whose KV bytes may differ never share a chunk.

Goal: each way to start vLLM that changes the bytes of a block changes the namespace, and what the
user reads names it. Method: one setting at a time is changed in a configuration; the real classes
of vLLM stand where a setting passes through them.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from allocation import Memory, attention, latent_attention, make_model_config, state, window
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.manifest import Manifest
from tierstore_vllm.identity import check_block_hashes, describe_identity

pytestmark = pytest.mark.vllm


LONG_ROPE = {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}


def make_manifest(change: Callable[[Any], None] = lambda _: None, **model: Any) -> Manifest:
    memory = Memory({f"layer.{i}": attention() for i in range(2)}, "LBHNC")
    memory.vllm_config.model_config = make_model_config(**model)
    change(memory.vllm_config)
    return memory.describe().manifest


def hf_config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(to_dict=lambda: dict(fields))


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def change(vllm_config: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            vllm_config = getattr(vllm_config, parent)
        setattr(vllm_config, name, value)

    return change


def draft(**changes: Any) -> SimpleNamespace:
    model = make_model_config(**({"model": "some/draft"} | changes))
    return SimpleNamespace(method="eagle3", draft_model_config=model)


def backend(name: str) -> dict[str, Any]:
    return {"layer.0": SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name))}


def pictures(**changes: Any) -> SimpleNamespace:
    fields = {"language_model_only": False, "mm_processor_kwargs": None, "media_io_kwargs": {}}
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"model": "other/model"}, "model: stored 'some/model', ours 'other/model'"),
        ({}, {"revision": "v2"}, "revision: stored 'main', ours 'v2'"),
        ({}, {"code_revision": "v2"}, "code_revision=v2"),
        ({}, {"quantization": "fp8"}, "quantization: stored '', ours 'fp8'"),
        ({}, {"quantization_config": {"ignore": ["lm_head"]}}, "quantization_config="),
        ({}, {"dtype": torch.bfloat16}, "dtype=torch.bfloat16"),
        ({}, {"model_impl": "transformers"}, "implementation=transformers"),
        ({}, {"model_class_overrides": {"Llama": "plug_in:Llama"}}, "class_overrides="),
        (
            {"hf_config": hf_config(rope_theta=1e4)},
            {"hf_config": hf_config(rope_theta=1e4, rope_parameters={"rope_type": "yarn"})},
            "hf_config=",
        ),
        (
            {"hf_config": hf_config(text_config={"sliding_window": 128})},
            {"hf_config": hf_config(text_config={"sliding_window": None})},
            "hf_config=",
        ),
        (
            {"hf_config": hf_config(**LONG_ROPE)},
            {"hf_config": hf_config(**LONG_ROPE), "max_model_len": 8192},
            "rope_length=4096/8192",
        ),
        (
            {"hf_config": hf_config(**LONG_ROPE)},
            {"hf_config": hf_config(**LONG_ROPE), "original_max_model_len": -1},
            "rope_length=-1/4096",
        ),
        ({}, {"multimodal_config": pictures()}, "multimodal="),
        (
            {"multimodal_config": pictures()},
            {"multimodal_config": pictures(mm_processor_kwargs={"max_pixels": 7})},
            "multimodal=",
        ),
    ],
)
def test_what_changes_a_models_numbers_changes_the_namespace(
    before: dict[str, Any], after: dict[str, Any], words: str
):
    stored, ours = make_manifest(**before), make_manifest(**after)
    assert stored.namespace != ours.namespace
    assert words in str(ours.difference(stored.canonical_json))


@pytest.mark.parametrize(
    ("path", "before", "after", "words"),
    [
        ("cache_config.cache_dtype", "fp8_e4m3", "fp8_e5m2", "extra.cache_dtype: stored 'fp8_e4"),
        ("cache_config.cache_dtype", "nvfp4", "nvfp4_4over6", "extra.cache_dtype"),
        ("cache_config.prefix_caching_hash_algo", "sha256", "sha256_cbor", "hash_algorithm"),
        ("parallel_config.tensor_parallel_size", 1, 2, "stored 'tp1-pp1"),
        ("parallel_config.pipeline_parallel_size", 1, 2, "ours 'tp1-pp2"),
        ("parallel_config.prefill_context_parallel_size", 1, 2, "parallel_shape"),
        ("parallel_config.decode_context_parallel_size", 1, 2, "parallel_shape"),
        ("parallel_config.cp_kv_cache_interleave_size", 1, 16, "extra.cp_interleave"),
        ("attention_config.indexer_kv_dtype", "auto", "mxfp4", "extra.indexer_dtype"),
        ("load_config.load_format", "auto", "gguf", "extra.load_format"),
        ("num_hash_lookahead_tokens", 0, 1, "extra.hash_lookahead_tokens"),
        ("speculative_config", None, draft(), "extra.draft_model: stored '', ours 'eagle3"),
        ("speculative_config", draft(), draft(model="other/draft"), "extra.draft_model"),
        ("speculative_config", draft(), draft(quantization="fp8"), "extra.draft_model"),
        (
            "compilation_config.static_forward_context",
            backend("FLASH_ATTN"),
            backend("FLASHINFER"),
            "extra.attention_backends: stored 'FLASH_ATTN', ours 'FLASHINFER'",
        ),
    ],
)
def test_what_changes_an_engines_bytes_changes_the_namespace(
    path: str, before: Any, after: Any, words: str
):
    stored, ours = make_manifest(setting(path, before)), make_manifest(setting(path, after))
    assert stored.namespace != ours.namespace
    assert words in str(ours.difference(stored.canonical_json))


def test_two_fp8_formats_look_alike_to_the_kv_cache():
    """Why `cache_dtype` itself is part of the identity."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    assert STR_DTYPE_TO_TORCH_DTYPE["fp8_e4m3"] is STR_DTYPE_TO_TORCH_DTYPE["fp8_e5m2"]
    assert get_kv_quant_mode("fp8_e4m3") is get_kv_quant_mode("fp8_e5m2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_SSM_CONV_STATE_LAYOUT", "DS"), ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")],
)
def test_a_switch_that_reorders_pages_changes_the_namespace(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(name, raising=False)
    stored = make_manifest()
    monkeypatch.setenv(name, value)
    ours = make_manifest()
    assert name in str(ours.difference(stored.canonical_json))


def test_states_of_one_size_but_other_parts_differ():
    flat, tall = (
        Memory({"a": attention(), "b": state(8192, shapes=shapes)}, "LBHNC").describe().manifest
        for shapes in (((3, 40), (2, 8, 16)), ((40, 3), (2, 8, 16)))
    )
    assert flat.chunk_bytes(1) == tall.chunk_bytes(1)
    assert "kv_dtype" in str(tall.difference(flat.canonical_json))


def test_dummy_weights_come_from_the_seed():
    def dummy(vllm_config: Any) -> None:
        vllm_config.load_config.load_format = "dummy"

    assert make_manifest(dummy, seed=0).namespace != make_manifest(dummy, seed=1).namespace
    assert make_manifest(seed=0).namespace == make_manifest(seed=1).namespace


@pytest.mark.parametrize(
    ("change", "model"),
    [
        (setting("cache_config.num_gpu_blocks_override", 77), {}),
        (setting("scheduler_config.disable_hybrid_kv_cache_manager", True), {}),
        (setting("num_hash_lookahead_tokens", 0), {}),
        (lambda _: None, {"max_model_len": 8192}),
        (lambda _: None, {"hf_config": hf_config(_name_or_path="/elsewhere")}),
        (
            setting(
                "speculative_config",
                SimpleNamespace(method="ngram", draft_model_config=make_model_config()),
            ),
            {},
        ),
    ],
)
def test_what_changes_no_byte_keeps_the_cache_warm(change: Callable[[Any], None], model: Any):
    assert make_manifest(change, **model).namespace == make_manifest().namespace


def test_sliding_windows_that_are_switched_off_are_another_group():
    on, off = (
        Memory({"a": attention(), "b": spec}, "LBHNC").describe().manifest
        for spec in (window(), attention(sliding_window=64))
    )
    assert on.namespace != off.namespace


def test_layouts_with_other_bytes_in_a_page_differ_and_the_place_of_a_page_does_not_matter():
    pages = {
        name: Memory({"layer.0": attention()}, name).describe().manifest
        for name in ("LBHNC", "LBNHC")
    }
    assert pages["LBHNC"].namespace != pages["LBNHC"].namespace
    assert "extra.pages" in str(pages["LBHNC"].difference(pages["LBNHC"].canonical_json))


def test_latent_rows_of_one_size_but_other_formats_differ():
    found = []
    for cache_dtype in ("fp8", "fp8_ds_mla"):
        memory = Memory({"layer.0": latent_attention(dtype=torch.uint8)}, "LBHNC")
        memory.vllm_config.cache_config.cache_dtype = cache_dtype
        found.append(memory.describe().manifest)
    assert found[0].groups == found[1].groups
    assert found[0].namespace != found[1].namespace


@pytest.mark.parametrize(
    ("resolved", "config_path", "revision"),
    [
        ("c0ffee", None, "c0ffee"),
        (None, None, "abc123"),
        (None, "some/model", "abc123"),
        ("c0ffee", "other/model", "c0ffee"),
        (None, "other/model", "main"),
    ],
)
def test_the_revision_is_the_commit_of_the_weights_not_of_a_borrowed_configuration(
    resolved: str | None, config_path: str | None, revision: str
):
    class Branch(str):
        """A name that knows its commit, such as `huggingface_hub.ResolvedRevision`."""

        __slots__ = ("resolved",)

    branch = Branch("main")
    branch.resolved = resolved
    config = SimpleNamespace(to_dict=dict, _commit_hash="abc123")
    found = make_manifest(revision=branch, hf_config=config, hf_config_path=config_path)
    assert found.revision == revision


def test_weights_from_object_storage_are_named_by_their_address(tmp_path: Path):
    """vLLM puts the configuration in a temporary folder, whose name is new in every run."""
    first, second = (
        make_manifest(model=str(folder), model_weights="s3://bucket/model")
        for folder in (tmp_path / "one", tmp_path / "two")
    )
    assert first.model == "s3://bucket/model"
    assert first.namespace == second.namespace


def test_a_configuration_is_digested_alike_in_every_process():
    facts = [{"names": set(names), "object": object()} for names in ("abc", "cba")]
    first, second = (make_manifest(hf_config=hf_config(**one)) for one in facts)
    assert first.namespace == second.namespace


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model without weights: vLLM reads no more than this to make a configuration."""
    import transformers

    folder = tmp_path_factory.mktemp("identity") / "model"
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=320,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        num_hidden_layers=2,
        intermediate_size=256,
    ).save_pretrained(folder)
    return folder


LONG_FACTORS = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 2048,
    }
}


DRAFT = {"method": "draft_model", "model": "model", "num_speculative_tokens": 2}


GUESSES = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ({}, {}, True),
        ({}, {"max_model_len": 1024}, True),
        ({}, {"gpu_memory_utilization": 0.5, "max_num_seqs": 3}, True),
        ({}, {"speculative_config": GUESSES}, True),
        ({}, {"dtype": "bfloat16"}, False),
        ({}, {"seed": 3}, False),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, False),
        ({}, {"prefix_caching_hash_algo": "sha256_cbor"}, False),
        ({}, {"hf_overrides": {"rope_theta": 5e5}}, False),
        ({}, {"hf_overrides": {"sliding_window": 64}}, False),
        (
            {},
            {"hf_overrides": lambda config: config.update({"rms_norm_eps": 1e-3}) or config},
            False,
        ),
        (
            {"hf_overrides": LONG_FACTORS},
            {"hf_overrides": LONG_FACTORS, "max_model_len": 1024},
            False,
        ),
        ({}, {"speculative_config": DRAFT}, False),
    ],
)
def test_vllms_own_configuration_says_what_matters(
    before: dict[str, Any],
    after: dict[str, Any],
    is_same: bool,  # noqa: FBT001 - a table of cases
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        pytest.skip("this vLLM is built for a device that is not here")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(model_folder.parent)
    common = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True}
    first, second = (
        describe_identity(EngineArgs(model="model", **(common | some)).create_engine_config())
        for some in (before, after)
    )
    assert (first == second) is is_same


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_random_block_hashes_are_refused_for_a_tier_that_outlives_them(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = load_config(
        {
            "version": 1,
            "primary": {"capacity": "64MiB"},
            "secondary": [
                {"name": "disk", "backend": "file", "path": str(tmp_path), "capacity": "1GiB"}
            ],
        }
    )
    memory = Memory({"layer.0": attention()}, "LBHNC")
    memory.vllm_config.cache_config.prefix_caching_hash_algo = algorithm
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        check_block_hashes(memory.vllm_config, config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    check_block_hashes(memory.vllm_config, config)
    seeds = set()
    for seed in ("7", "8"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seeds.add(memory.describe().manifest.namespace)
    assert len(seeds) == 2, "another seed is another namespace"


def test_the_seed_is_the_one_that_vllm_takes(monkeypatch: pytest.MonkeyPatch):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert make_manifest().hash_seed == resolve_none_hash_seed(sha256)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert make_manifest().hash_seed.endswith("=" + resolve_none_hash_seed(sha256))
