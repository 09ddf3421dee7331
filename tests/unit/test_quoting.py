"""Values that somebody else has made: one line, bounded, and none of their code is run."""

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.bounded_log import Causes, bounded
from tierstore.quoting import escaped, named, quoted

HUGE = "a\nb\x1b[31m\u202e" * 100_000


class Hostile:
    """Whose every method raises."""

    def __getattribute__(self, name):
        raise RuntimeError(HUGE)

    def __repr__(self):
        raise RuntimeError(HUGE)

    __str__ = __len__ = __hash__ = __iter__ = __repr__


class Words(str):
    __slots__ = ()

    def __len__(self):
        return 1 << 40

    def __repr__(self):
        return HUGE

    __str__ = __repr__

    def __getitem__(self, index):
        return HUGE


def bomb(depth):
    inner = "lol"
    for _ in range(depth):
        inner = [inner] * 10
    return inner


def endless():
    inner = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("fil", "'fil'"),
        (None, "None"),
        (True, "True"),
        (-5, "-5"),
        (2.5, "2.5"),
        (b"key", "b'key'"),
        (["a", 1], "['a', 1]"),
        ((), "()"),
        ({"a": [1]}, "{'a': [1]}"),
        ("a\nb\x1b", r"'a\nb\x1b'"),
        ("\ud800", r"'\ud800'"),
        (10**5000, "<an integer of 16,610 bits>"),
        (Hostile(), "<Hostile>"),
        ("x" * 3_000_000, f"'{'x' * 200}'... (3,000,000 characters)"),
        (b"x" * 1000, f"{b'x' * 200!r}... (1,000 bytes)"),
        ([1] * 1000, "[1, 1, 1, 1, 1, 1, ... (1,000 items)]"),
        (Words("plain"), "'plain'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_written_as_python_would(value, expected):
    assert quoted(value) == expected


BAD = {
    "bomb": bomb(12),
    "endless": endless(),
    "text": HUGE,
    "class of text": Words(HUGE),
    "mapping": {HUGE: {HUGE: {HUGE: HUGE}}},
    "objects": [Hostile()] * 9,
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_no_value_makes_a_message_long_or_two_lines(value):
    for text in (quoted(value), escaped(quoted(value))):
        assert len(text) < 1000
        assert text.isprintable()


@given(st.recursive(st.text() | st.integers() | st.binary() | st.floats(), st.lists))
def test_any_plain_value_has_a_short_printable_form(value):
    assert len(quoted(value)) <= 450
    assert quoted(value).isprintable()
    assert len(escaped(str(value))) <= 2_100
    assert escaped(str(value)).isprintable()


def test_an_error_is_named_even_if_it_has_no_words():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError(HUGE)

    assert named(ValueError("a\nb")) == r"ValueError: a\nb"
    assert named(SilentError()) == "SilentError: <SilentError without words>"
    assert len(named(ValueError(HUGE))) < 1000


@pytest.fixture
def log():
    """What a plain handler writes of a bounded logger."""
    logger = bounded(logging.Logger("tierstore.test"))  # noqa: LOG001 - of no tree
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    return logger, stream


def test_a_logged_value_cannot_forge_a_line_or_fill_the_disk(log):
    logger, stream = log
    logger.warning("load failed: request=%s cause=%s", HUGE, ValueError(HUGE))
    logger.warning("mapping: %s", {"request": HUGE})
    logger.warning("sizes: count=%d seconds=%.1f", 1 << 70, 2.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all(len(line) < 8_000 and line.isprintable() for line in lines)
    assert lines[0].startswith(r"load failed: request=a\nb\x1b[31m\u202e")
    assert lines[2] == "sizes: count=1180591620717411303424 seconds=2.5"


def raise_with_causes():
    try:
        {}[HUGE]
    except KeyError as error:
        raise OSError(HUGE) from error


def test_a_logged_trace_keeps_its_frames_and_bounds_its_words(log):
    logger, stream = log
    for fail in (raise_with_causes, lambda: json.loads("{" + HUGE)):
        stream.truncate(0)
        try:
            fail()
        except (OSError, ValueError):
            logger.exception("hook failed")
        text = stream.getvalue()
        assert "in test_a_logged_trace_keeps_its_frames_and_bounds_its_words" in text
        assert ("OSError" if fail is raise_with_causes else "json.decoder.JSONDecodeError") in text
        assert "\x1b" not in text
        assert len(text) < 20_000


def test_another_handler_gets_no_unbounded_words_either(log):
    logger, _ = log
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        raise_with_causes()
    except OSError:
        logger.exception("hook failed")
    (record,) = records
    kind, error, trace = record.exc_info
    assert kind.__name__ == "OSError"
    assert trace is not None
    assert len(str(error)) < 8_000
    assert len(str(error.__cause__)) < 8_000


def test_each_cause_is_logged_once_and_few_are_remembered():
    causes = Causes()
    assert [causes.is_new("read", "EIO") for _ in range(3)] == [True, False, False]
    assert sum(causes.is_new(f"cause {number}") for number in range(10_000)) < 100
    assert not causes.is_new("read", "EIO")
