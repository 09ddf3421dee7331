"""A key file: what is read, what is refused by name, and that no key is ever quoted."""

import base64
import copy
import os
import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config.key_file import RecordKey, looks_like_key, read_key_file
from tierstore.errors import ConfigError

SECRET = bytes(range(7, 39))
OTHER = bytes(range(107, 139))


def written(tmp_path, content, mode=0o600):
    path = tmp_path / "records.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def ids(path):
    return [key.key_id for key in read_key_file(path)]


def refused(path):
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    text = str(caught.value)
    assert str(path) in text
    for secret in (SECRET, OTHER):
        quoted = [secret.hex(), secret.hex().upper(), base64.b64encode(secret).decode()]
        assert not any(form in text or form[:20] in text for form in quoted)
    return text


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        SECRET + b"\n",
        SECRET.hex().encode(),
        SECRET.hex().upper().encode() + b"\n",
        base64.b64encode(SECRET),
        base64.b64encode(SECRET) + b"\r\n",
        b"\n" + SECRET.hex().encode() + b"\n\n",
    ],
)
def test_every_form_of_a_key_is_the_same_key(tmp_path, content):
    assert ids(written(tmp_path, content)) == [RecordKey(SECRET).key_id]


def test_a_raw_key_may_end_with_a_newline_of_its_own(tmp_path):
    secret = SECRET[:31] + b"\n"
    assert ids(written(tmp_path, secret)) == [RecordKey(secret).key_id]


def test_several_keys_keep_their_order_and_a_repeated_one_counts_once(tmp_path):
    lines = [SECRET.hex(), base64.b64encode(OTHER).decode(), SECRET.hex()]
    path = written(tmp_path, "\n".join(lines).encode())
    assert ids(path) == [RecordKey(SECRET).key_id, RecordKey(OTHER).key_id]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (SECRET[:31], "64 hexadecimal"),
        (SECRET + b"\0", "64 hexadecimal"),
        (SECRET + b"\n\n", "64 hexadecimal"),
        (SECRET.hex().encode()[:-1], "64 hexadecimal"),
        (SECRET.hex().encode() + b"00", "64 hexadecimal"),
        (base64.b64encode(SECRET[:31]), "base64"),
        (base64.b64encode(SECRET)[:-1], "base64"),
        (SECRET.hex().encode() + b"\nnonsense", "key 2"),
        (b"key: " + SECRET.hex().encode(), "64 hexadecimal"),
        ("ä".encode() * 32, "64 hexadecimal"),
        (b"\n".join(os.urandom(32).hex().encode() for _ in range(17)), "at most 16"),
        (b"x" * 5000, "4096"),
        (bytes(32), "zeros"),
        (SECRET.hex().encode() + b"\n" + b"0" * 64, "zeros"),
    ],
)
def test_what_is_no_key_is_refused_and_not_quoted(tmp_path, content, words):
    assert words in refused(written(tmp_path, content))


@given(content=st.binary(max_size=200))
def test_any_content_is_keys_or_refused_by_name(tmp_path_factory, content):
    path = written(tmp_path_factory.mktemp("any"), content)
    try:
        keys = read_key_file(path)
    except ConfigError:
        refused(path)
    else:
        assert len(keys) >= 1


def test_two_keys_with_one_identifier_are_refused(tmp_path):
    seen = {}
    for number in range(1, 1 << 20):
        secret = number.to_bytes(32, "little")
        other = seen.setdefault(RecordKey(secret).key_id, secret)
        if other != secret:
            break
    else:
        pytest.fail("no two keys with the same identifier")
    content = f"{other.hex()}\n{secret.hex()}\n".encode()
    assert "same identifier" in refused(written(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_file_that_others_can_get_at_is_refused_with_the_remedy(tmp_path, mode):
    assert "chmod 600" in refused(written(tmp_path, SECRET, mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_the_file_of_another_user_is_refused(tmp_path):
    path = written(tmp_path, SECRET)
    os.chown(path, 12345, -1)
    assert "chown" in refused(path)


def make_fifo(path):
    os.mkfifo(path, 0o600)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


def make_loop(path):
    path.symlink_to(path)


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(mode=0o700),
        make_fifo,
        make_socket,
        make_loop,
        make_huge,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("nowhere"),
    ],
    ids=["absent", "folder", "fifo", "socket", "loop", "huge", "device", "dangling"],
)
def test_what_is_no_regular_file_of_keys_is_refused_at_once(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "odd"
    make(path)
    assert ";" in refused(path), "there is no remedy"


def test_a_link_is_followed_to_a_file_that_is_checked_itself(tmp_path):
    path = written(tmp_path, SECRET)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert ids(link) == [RecordKey(SECRET).key_id]
    path.chmod(0o644)
    assert "chmod 600" in refused(link)


def test_a_key_shows_itself_nowhere(tmp_path):
    (key,) = read_key_file(written(tmp_path, SECRET))
    shown = repr(key) + str(key) + repr([getattr(key, name) for name in key.__slots__])
    assert SECRET.hex() not in shown
    assert repr(SECRET)[2:20] not in shown
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            duplicate(key)


def test_a_key_in_the_place_of_a_path_is_recognised():
    assert looks_like_key(SECRET.hex())
    assert looks_like_key(base64.b64encode(SECRET).decode() + "\n")
    assert not looks_like_key("/etc/tierstore/records.key")
    assert not looks_like_key("ä" * 64)


def test_derived_keys_differ_with_key_and_context():
    derived = {
        RecordKey(secret).derive(context) for secret in (SECRET, OTHER) for context in (b"a", b"b")
    }
    assert len(derived) == 4
