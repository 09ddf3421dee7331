"""Which library is taken, and why none is."""

import hashlib
import logging
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_library import compiled, native
from opened_backend import opened
from python_paths import environment
from store_kit import config_of

from tierstore import Manifest, TierStore
from tierstore.layout import PAGE_BYTES
from tierstore.native.compiling import LIBRARY, compile_library, source_mark
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
    assert "no library" in load_library(other).why
    other.write_bytes(other.read_bytes() + hashlib.sha256(other.read_bytes()).digest())
    assert "tierstore_source_mark" in load_library(other).why


def test_a_library_that_was_cut_off_does_not_end_the_process(tmp_path):
    """In a process of its own, which a library without its pages may end by a signal."""
    native()
    content = compiled().read_bytes()
    cuts = [*range(64, len(content), 1024), len(content) - 1]
    for cut in cuts:
        (tmp_path / f"{cut}.so").write_bytes(content[:cut])
    assert refused_by_a_process([tmp_path / f"{cut}.so" for cut in cuts])


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


def test_a_library_with_pages_that_were_lost_does_not_end_the_process(tmp_path):
    """What a power cut makes of a file that was installed just before: as long, but zeros."""
    native()
    content = compiled().read_bytes()
    for at in range(0, len(content), PAGE_BYTES):
        page = content[at : at + PAGE_BYTES]
        (tmp_path / f"{at}-page.so").write_bytes(
            content[:at] + bytes(len(page)) + content[at + len(page) :]
        )
        (tmp_path / f"{at}-rest.so").write_bytes(content[:at] + bytes(len(content) - at))
    assert refused_by_a_process(sorted(tmp_path.iterdir()))


def refused_by_a_process(paths):
    """Return whether all are refused, for reasons; a process of its own may end by a signal."""
    script = (
        "import sys; from pathlib import Path; from tierstore.native.library import load_library\n"
        "for path in sys.argv[1:]:\n"
        "    loaded = load_library(Path(path))\n"
        "    assert loaded.calls is None and loaded.why, path"
    )
    done = subprocess.run([sys.executable, "-c", script, *paths], check=False, env=environment())
    return done.returncode == 0


def test_libraries_of_other_machines_are_refused(tmp_path):
    native()
    content = compiled().read_bytes()
    for name, at, value in [("32 bits", 4, 1), ("big-endian", 5, 2), ("aarch64", 18, 183)]:
        changed = bytearray(content)
        changed[at] = value
        (tmp_path / name).write_bytes(changed)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    paths = [*sorted(tmp_path.iterdir()), tmp_path / ("long" * 100), "/dev/zero", "/dev/null"]
    assert refused_by_a_process(paths)


@pytest.mark.parametrize("value", ["off", "false", "no", "2", " 0 "])
def test_a_switch_that_is_neither_on_nor_off_is_off_and_told(value):
    """Who reaches for it wants to be rid of the library."""
    program = "from tierstore.native.library import find_library; print(find_library())"
    env = environment(TIERSTORE_NATIVE=value)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout.startswith("Loaded(calls=None")
    assert f"TIERSTORE_NATIVE={value!r}" in done.stdout


@pytest.mark.parametrize("value", ["", "1"])
def test_a_switch_that_is_on_changes_nothing(value):
    program = "from tierstore.native.library import find_library; print(find_library())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=environment(TIERSTORE_NATIVE=value),
    )
    assert "TIERSTORE_NATIVE" not in done.stdout


def compiler(folder, script):
    """Make a compiler of a shell script; return what to put into `CC`."""
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "failed"),
        ("printf '\\374ber\\n' >&2; exit 1", "failed"),
        ("kill -9 $$", "failed"),
        ("exit 0", "made no library"),
        ("for last; do :; done; mkdir $last", "made no library"),
        ("for last; do :; done; echo garbage > $last", "made no library"),
        ("for last; do :; done; : > $last", "made no library"),
        ("sleep 1000 & wait", "no end"),
        ("exec sleep 1000", "no end"),
    ],
)
def test_a_compiler_that_misbehaves_is_told_and_changes_nothing(
    tmp_path, monkeypatch, script, words
):
    (tmp_path / "tree").mkdir()
    target = tmp_path / "tree" / "lib.so"
    target.write_text("as before")
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    # Short where the bound is what ends it; else it is not to be reached.
    assert words in compile_library(target, seconds_max=0.3 if "sleep" in script else 300)
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["lib.so"]
    assert target.read_text() == "as before"


@pytest.mark.parametrize("words", ["'", "cc 'not closed", "  ", "/", "/dev/null"])
def test_words_that_name_no_compiler_are_told_or_passed_over(tmp_path, monkeypatch, words):
    monkeypatch.setenv("CC", words)
    why = compile_library(tmp_path / "lib.so")
    assert why or load_library(tmp_path / "lib.so").calls is not None


def test_a_tree_that_cannot_be_written_is_told():
    native()
    assert compile_library(Path("/proc/lib.so"))


def test_a_source_that_is_not_there_is_told(tmp_path):
    """To the build, which goes on without a library."""
    native()
    (tmp_path / "compiling.py").write_text(LIBRARY.with_name("compiling.py").read_text())
    why = runpy.run_path(str(tmp_path / "compiling.py"))["compile_library"]()
    assert "extent_io.c" in why
    assert not list(tmp_path.glob("*.so"))


def test_compilations_at_once_do_not_disturb_each_other(tmp_path):
    """Of threads here; of processes in containers, which have numbers in common, too."""
    native()
    target = tmp_path / "lib.so"
    with ThreadPoolExecutor(4) as threads:
        whys = list(threads.map(lambda _: compile_library(target), range(4)))
    assert whys == [""] * 4
    assert load_library(target).why == ""
    assert list(tmp_path.iterdir()) == [target]
