"""The revision of a local model: the digest of its files."""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from allocation import Memory, attention, make_model_config

from tierstore_vllm.identity import describe_identity


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    (folder / "config.json").write_text("{}")
    return folder


def revision_of(path: Path) -> str:
    config = Memory({"layer.0": attention()}, "LBHNC").vllm_config
    config.model_config = make_model_config(model=str(path))
    return describe_identity(config).revision


def rewrite(file: Path, content: bytes) -> None:
    """Replace a file's content but not its time, as a careless copy does."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["model.safetensors", "model.tensors", "weights.npz", "layer.py"])
def test_a_changed_file_of_a_local_model_is_another_revision(weights: Path, name: str):
    file = weights / name
    file.write_bytes(bytes(1000))
    before = revision_of(weights)
    rewrite(file, bytes(999) + b"!")
    assert revision_of(weights) != before


def test_a_file_rewritten_in_place_is_another_revision(weights: Path):
    before = revision_of(weights)
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))
    assert revision_of(weights) != before


def test_a_single_file_of_weights_is_digested_too(weights: Path):
    file = weights / "model.gguf"
    file.write_bytes(b"first")
    before = revision_of(file)
    rewrite(file, b"other")
    assert revision_of(file) != before


def test_files_that_decide_no_byte_do_not_count(weights: Path):
    before = revision_of(weights)
    (weights / "README.md").write_text("new words")
    (weights / "chat_template.jinja").write_text("new template")
    (weights / ".cache").mkdir()
    assert revision_of(weights) == before
