"""Each error of the operating system comes with the remedy against it."""

import errno
import os

import pytest
from store_kit import Chunks, config_of

from tierstore import TierStore
from tierstore.device.remedies import remedy_in, remedy_of
from tierstore.device.system import SystemCalls
from tierstore.errors import CatalogError, ConfigError

CHUNKS = Chunks(4096)
WORDS = {
    errno.EACCES: "writable for the user",
    errno.EROFS: "mount the file system for writing",
    errno.ENOSPC: "free space",
    errno.EDQUOT: "quota",
    errno.EFBIG: "ulimit -f",
    errno.EISDIR: "move the directory away",
    errno.ENOTDIR: "move the file away",
    errno.EEXIST: "move away",
    errno.ELOOP: "symbolic link",
    errno.ENAMETOOLONG: "shorter path",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "fs.file-max",
    errno.EIO: "health of the device",
    errno.ENOMEM: "more memory",
}


class RefusingSystem(SystemCalls):
    """Opens nothing below a path but with an error."""

    def __init__(self, code):
        self._code = code

    def open(self, path, flags, directory=None):
        raise OSError(self._code, os.strerror(self._code), str(path))


PASSING = {
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ENOMEM,
}
"""Of a device or a limit, which may be another one by and by: the store opens without the tier."""


def open_refused(path, code):
    return TierStore.open(
        config_of(path / "tier"), CHUNKS.manifest, open_system=lambda _: RefusingSystem(code)
    )


@pytest.mark.parametrize("code", sorted(WORDS.keys() - PASSING), ids=errno.errorcode.get)
def test_a_path_that_cannot_be_opened_says_what_helps(tmp_path, code):
    with pytest.raises(CatalogError, match=WORDS[code]) as caught:
        open_refused(tmp_path, code)
    assert str(tmp_path) in str(caught.value)
    assert os.strerror(code) in str(caught.value)


@pytest.mark.parametrize("code", sorted(PASSING), ids=errno.errorcode.get)
def test_a_tier_that_is_out_of_use_says_what_helps(tmp_path, code):
    with open_refused(tmp_path, code) as store:
        assert CHUNKS.put(store, range(4)) == 4
        (problem,) = store.check()
    assert str(tmp_path) in problem
    assert os.strerror(code) in problem
    assert WORDS[code] in problem


def test_what_a_library_says_in_words_has_the_same_remedy():
    assert remedy_in("mdb_env_open: Too many open files") == remedy_of(OSError(errno.EMFILE, ""))
    assert remedy_in("MDB_SOMETHING: is wrong") is None


def test_a_path_that_is_too_long_or_leads_in_a_circle_is_named(tmp_path):
    with pytest.raises(ConfigError, match="names of at most 255 bytes"):
        CHUNKS.open(config_of(tmp_path / ("x" * 300)))
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CatalogError, match="symbolic link"):
        CHUNKS.open(config_of(tmp_path / "a"))
