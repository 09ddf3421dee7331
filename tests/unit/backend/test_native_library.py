"""Which library is taken, and why none is."""

import logging
import subprocess
import sys

import pytest
from native_library import compiled, native
from opened_backend import opened
from python_paths import environment
from store_kit import config_of

from tierstore import Manifest, TierStore
from tierstore.native.compiling import compile_library, source_mark
from tierstore.native.library import HASH_NAMES, Loaded, find_library, load_library


def test_a_library_that_was_compiled_from_this_source_is_taken():
    loaded = native()
    assert loaded.why == ""
    assert loaded.calls.source_mark == source_mark()


def test_without_a_library_the_reason_is_told(tmp_path):
    loaded = load_library(tmp_path / "absent.so")
    assert loaded == Loaded(None, "not compiled at the installation")


def test_what_is_no_library_or_another_one_is_not_taken(tmp_path):
    native()
    (tmp_path / "text.so").write_text("no library")
    assert load_library(tmp_path / "text.so").calls is None
    other = tmp_path / "other.so"
    (tmp_path / "other.c").write_text("int other(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-o", other, tmp_path / "other.c"], check=True)
    assert "tierstore_source_mark" in load_library(other).why


def test_a_library_that_was_cut_off_does_not_end_the_process(tmp_path):
    """In a process of its own, which a library without its pages may end by a signal."""
    native()
    content = compiled().read_bytes()
    cuts = [*range(64, len(content), 1024), len(content) - 1]
    for cut in cuts:
        (tmp_path / f"{cut}.so").write_bytes(content[:cut])
    script = (
        "import sys; from pathlib import Path; from tierstore.native.library import load_library\n"
        "for path in sys.argv[1:]: assert load_library(Path(path)).calls is None, path"
    )
    paths = [tmp_path / f"{cut}.so" for cut in cuts]
    subprocess.run([sys.executable, "-c", script, *paths], check=True, env=environment())


def test_a_library_of_another_version_of_the_source_is_not_taken(tmp_path):
    native()
    target = tmp_path / "older.so"
    assert (
        compile_library(target, more_flags=["-UTIERSTORE_SOURCE_MARK", "-DTIERSTORE_SOURCE_MARK=1"])
        == ""
    )
    assert "another version" in load_library(target).why


@pytest.mark.parametrize("name", HASH_NAMES)
def test_any_name_of_the_hash_will_do(name):
    assert load_library(compiled(), [name]).why == ""


def test_without_a_hash_that_gives_the_checksums_of_the_format_none_is_taken():
    """A function that xxhash does not export, and one that is called alike and is another."""
    for names in ([], ["no_such_function"], ["XXH32", "XXH3_128bits"]):
        assert load_library(compiled(), names).calls is None
        assert "xxhash" in load_library(compiled(), names).why


def test_the_environment_switches_it_off(tmp_path):
    program = "from tierstore.native.library import find_library; print(find_library())"
    command = [sys.executable, "-c", program]
    env = environment(TIERSTORE_NATIVE="0")
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "Loaded(calls=None, why='TIERSTORE_NATIVE=0')"


def test_the_log_says_at_the_opening_what_moves_the_bytes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    opened(tmp_path, library=native).close()
    opened(tmp_path, library=lambda: Loaded(None, "for a reason")).close()
    lines = [line for line in caplog.messages if line.startswith("file backend open")]
    assert [line.partition("path=")[2] for line in lines] == [
        "native",
        "interpreted (for a reason)",
    ]


def test_without_a_compiler_the_build_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compile_library(tmp_path / "lib.so") == "there is no C compiler"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_told_with_what_it_said(tmp_path):
    native()
    why = compile_library(tmp_path / "lib.so", more_flags=["--no-such-flag"])
    assert "no-such-flag" in why
    assert list(tmp_path.iterdir()) == []


def test_the_statistics_of_a_store_say_what_moves_the_bytes(tmp_path):
    manifest = Manifest.simple("native", chunk_bytes=4096)
    with TierStore.open(config_of(tmp_path / "tier"), manifest) as store:
        assert store.stats().why_interpreted == find_library().why
