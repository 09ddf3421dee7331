"""A configuration that nobody means well: refused with few words, soon, and by name.

From files (YAML is a small language to write a large document in) and from a program's mappings,
whose objects may do anything.
"""

import math
import os
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import Manifest, TierStore, load_config
from tierstore.config.yaml_text import parse_yaml
from tierstore.errors import ConfigError

pytestmark = pytest.mark.timeout(300)  # without bounds these would take for ever

MESSAGE_CHARS_MAX = 20_000


def tier(**keys):
    return {"name": "nvme", "backend": "file", "path": "/a", "capacity": "1GiB", **keys}


def document(*tiers, **keys):
    return {"primary": {"capacity": "1GiB"}, "secondary": list(tiers), **keys}


def problem_of(source):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    problem = str(caught.value)
    assert len(problem) <= MESSAGE_CHARS_MAX
    assert all(line.isprintable() for line in problem.split("\n"))
    assert len(problem.split("\n")) <= 21
    error = caught.value
    while error is not None:  # a trace shows the causes, too
        assert len(str(error)) <= MESSAGE_CHARS_MAX
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return problem


def problem_in_file(folder, content):
    path = folder / "store.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = problem_of(path)
    assert problem.startswith(f"{path}: ")
    return problem.removeprefix(f"{path}: ")


def alias_bomb(depth):
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth)]
    return "\n".join(lines)


GOOD = "primary: {capacity: 1GiB}\n"
HUGE = "x\n\x1b[2J" * 300_000

FILES = {
    "alias bomb": (alias_bomb(12), "aliases included"),
    "alias bomb as a value": (f"{alias_bomb(9)}\nprimary: *a8", "aliases included"),
    "small alias bomb as a value": (f"{alias_bomb(3)}\nprimary: *a2", "primary: expected a map"),
    "alias bomb of keys": (
        "a: &a {k: 1}\nb: &b {x: *a, y: *a}\n"
        + "".join(f"c{i}: {{p: *b, q: *b}}\n" for i in range(2_000)),
        "aliases included",
    ),
    "alias of itself": ("primary: &a {capacity: *a}", "the alias has no anchor &a"),
    "list of itself": ("&a [*a]", "the alias has no anchor"),
    "alias of nothing": ("primary: *b", "the alias has no anchor &b"),
    "long anchor": (f"primary: *{'b' * 100_000}", "the alias has no anchor"),
    "deep lists": ("primary: " + "[" * 100_000, "are nested more than"),
    "deep mappings": ("primary: " + "{a: " * 10_000, "are nested more than"),
    "deep blocks": ("- " * 10_000, "are nested more than"),
    "many keys": (GOOD + "".join(f"k{i}: 1\n" for i in range(9_000)), "expected at most 10000"),
    "several keys": (GOOD + "".join(f"k{i}: 1\n" for i in range(900)), "and 880 more"),
    "long list": (
        GOOD + f"secondary: [{'1,' * 9_000}]",
        "secondary: expected at most 8 items, got 9000",
    ),
    "long key": (GOOD + f"? {'k' * 250_000}\n: 1", "unknown key; valid keys are version"),
    "long value": (f"primary: {{capacity: {'1' * 250_000}GiB}}", "expected at most 1048576TiB"),
    "long text": (f"primary: {{capacity: '{'x' * 250_000}'}}", "(250,000 characters)"),
    "long number": (f"primary: {{capacity: {'9' * 250_000}}}", "a number has 250,000 digits"),
    "too large": (GOOD + "#" * 270_000, "at most 262144 bytes"),
    "yes for a version": (GOOD + "version: true", "version: expected 1, got True"),
    "broken version": (GOOD + "version: 1.0", "version: expected 1, got 1.0"),
    "no version": (GOOD + "version: null", "version: expected 1, got None"),
    "text for a version": (GOOD + "version: '1'", "version: expected 1, got '1'"),
    "number as a key": ("1: 2", "the key 1 must be text, not int"),
    "number as an inner key": ("primary: {1: 2}", "primary: the key 1 must be text, not int"),
    "number as a key of a tier": ("secondary: [{1: 2}]", "secondary[0]: the key 1 must be text"),
    "boolean as a key": ("true: 2", "the key True must be text, not bool"),
    "nothing as a key": ("~: 2", "the key None must be text"),
    "empty key": ("'': 2", "unknown key"),
    "list as a key": ("? [a]\n: 2", "line 1, column 3: while constructing a mapping, found unhas"),
    "control characters in a key": ('"a\\n\\e[2J\\0": 2', r"a\n\x1b[2J\x00: unknown key"),
    "surrogate as a key": ('"\\ud800": 2', "not valid Unicode"),
    "surrogate as a value": ('primary: {capacity: "\\ud800"}', "primary.capacity: "),
    "merge": ("a: &a {capacity: 1GiB}\nprimary: {<<: *a}", "primary.<<: unknown key"),
    "tag of Python": ("primary: !!python/object:os.system {}", "tags such as"),
    "binary": ("primary: !!binary aGk=", "tags such as"),
    "set": ("primary: !!set {a, b}", "tags such as"),
    "ordered mapping": ("primary: !!omap [a: 1]", "tags such as"),
    "timestamp": ("primary: {capacity: !!timestamp 2001-01-01}", "tags such as"),
    "tag of a key": ("!!str primary: {capacity: 1GiB}", "tags such as"),
    "no tag": ("primary: ! {capacity: 1GiB}", "tags such as"),
    "two documents": (f"{GOOD}---\n{GOOD}", "expected a single document"),
    "UTF-16": (GOOD.encode("utf-16"), "it is UTF-16; save it as UTF-8"),
    "Latin-1": (b"primary: {capacity: '\xe4'}", "save it as UTF-8"),
    "zero byte": (b"primary: \0", "not YAML: unacceptable character #x0000"),
    "tab": ("primary:\n\tcapacity: 1GiB", "line 2, column 1: "),
    "not a number": ("primary: {capacity: .nan}", "expected a size such as '20GiB', got '.nan'"),
    "infinite": ("primary: {capacity: 1.0e+400}", "expected a size such as '20GiB', got inf"),
    "nothing": ("", "expected a mapping with 'primary', got NoneType"),
    "a word": ("tierstore", "expected a mapping with 'primary', got str"),
}


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_surprises_is_refused_with_few_words(tmp_path, content, expected):
    assert expected in problem_in_file(tmp_path, content)


def test_aliases_that_stand_for_little_are_fine(tmp_path):
    path = tmp_path / "store.yaml"
    path.write_text(
        "primary: {capacity: &size 1GiB}\nsecondary:\n"
        "- {name: a, backend: file, path: a, capacity: *size, io: &io {threads: 2}}\n"
        "- {name: b, backend: file, path: b, capacity: *size, io: *io}\n"
    )
    config = load_config(path)
    assert [tier.io.threads for tier in config.secondary] == [2, 2]
    assert {tier.capacity_bytes for tier in config.secondary} == {1 << 30}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "store.yaml"
    path.write_bytes(GOOD.encode("utf-8-sig"))
    assert load_config(path).primary.capacity_bytes == 1 << 30


@pytest.mark.parametrize(
    "kind", ["pipe", "directory", "device", "endless device", "loop", "socket"]
)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, kind):
    path = tmp_path / "store.yaml"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/null")
        case "endless device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "socket":
            import socket

            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path)) if len(str(path)) < 100 else path.mkdir()
    assert "cannot be read" in problem_of(path)


def test_a_huge_sparse_file_is_not_read(tmp_path):
    path = tmp_path / "store.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 262144 bytes" in problem_of(path)


QUANTITIES = {
    "deadline of 400 digits": (tier(io={"deadline": "9" * 400 + "s"}), "expected 1ms to 60min"),
    "deadline of a tenth of a ns": (tier(io={"deadline": "0.0000000001s"}), "expected 1ms to 60"),
    "deadline of nothing": (tier(io={"deadline": "0s"}), "expected 1ms to 60min"),
    "deadline of a day": (tier(io={"deadline": "1440min"}), "expected 1ms to 60min"),
    "digits behind the point": (tier(io={"deadline": "0." + "0" * 400 + "1s"}), "expected 1ms to"),
    "queue of 2 TiB": (tier(io={"write_queue": "2TiB"}), "less than or equal to"),
    "capacity of 400 digits": (tier(capacity="9" * 400 + "B"), "expected at most 1048576TiB"),
    "65 threads": (tier(io={"threads": 65}), "less than or equal to 64"),
    "threads of 5000 digits": (tier(io={"threads": 10**5000}), "out of range"),
    "threads of 2**62": (tier(io={"threads": 1 << 62}), "less than or equal to 64"),
    "path with a zero byte": (tier(path="/a\0b"), "zero bytes"),
    "path with a line break": (tier(path="/a\nb"), "line breaks"),
    "path with a control character": (tier(path="/a\x1b[2Jb"), "control characters"),
    "path with a long name": (tier(path="/" + "a" * 256), "at most 255 bytes"),
    "path with a long name of few letters": (tier(path="/" + "\u20ac" * 86), "at most 255 bytes"),
    "long path": (tier(path="/a" * 2_000), "3500 in all"),
    "deep path": (tier(path="/a" * 101), "at most 100 folders"),
    "endless path": (tier(path="/a" * 2_000_000), "3500 in all"),
    "path with a surrogate": (tier(path="/a\udc80"), "not valid Unicode"),
    "long name": (tier(name="a" * 3_000_000), "(3,000,000 characters)"),
}


@pytest.mark.parametrize(("raw", "expected"), QUANTITIES.values(), ids=QUANTITIES)
def test_a_quantity_out_of_all_bounds_is_refused(raw, expected):
    problem = problem_of(document(raw))
    assert problem.startswith("secondary[0].")
    assert expected in problem


@pytest.mark.parametrize(
    ("size", "size_bytes"), [(1 << 30, 1 << 30), (np.int64(5 << 20), 5 << 20), (np.uint8(200), 200)]
)
def test_a_program_gives_sizes_as_bytes(size, size_bytes):
    assert load_config({"primary": {"capacity": size}}).primary.capacity_bytes == size_bytes
    assert load_config({"primary": {"capacity": 1}, "gpu": {"kernel_below": 0}})


@pytest.mark.parametrize(
    "seconds", [2, 2.5, np.float32(0.5), np.int16(3), Fraction(1, 2), 0.001, 3600]
)
def test_a_program_gives_durations_as_seconds(seconds):
    config = load_config(document(tier(io={"deadline": seconds})))
    assert config.secondary[0].io.deadline_seconds == float(seconds)


@pytest.mark.parametrize("version", [1, np.int8(1)])
def test_a_program_gives_the_version_as_an_integer(version):
    assert load_config(document(version=version)).version == 1


def test_a_program_gives_paths_as_objects(tmp_path):
    for path in (tmp_path, PurePosixPath(tmp_path), FolderOf(str(tmp_path))):
        assert load_config(document(tier(path=path))).secondary[0].path == tmp_path


class FolderOf:
    def __init__(self, answer):
        self.answer = answer

    def __fspath__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "size",
    [
        True,
        -1,
        1.5,
        2.0,
        math.nan,
        math.inf,
        -math.inf,
        1 << 61,
        10**5000,
        Decimal(5),
        np.True_,
        5j,
    ],
    ids=lambda size: str(type(size)),
)
def test_a_program_gives_no_other_number_as_a_size(size):
    problem = problem_of({"primary": {"capacity": size}})
    assert problem.startswith("primary.capacity: ")


@pytest.mark.parametrize(
    "seconds", [True, -1, 0, math.nan, math.inf, -math.inf, 1e-10, 1e400, 3601, 10**300, np.inf]
)
def test_a_program_gives_no_other_number_as_a_duration(seconds):
    problem = problem_of(document(tier(io={"deadline": seconds})))
    assert problem.startswith("secondary[0].io.deadline: ")


class Raising:
    def __getattr__(self, name):
        raise RuntimeError(HUGE)

    def __repr__(self):
        raise RuntimeError(HUGE)

    def __hash__(self):
        raise RuntimeError(HUGE)

    __str__ = __repr__

    def __eq__(self, other):
        raise RuntimeError(HUGE)

    def __bool__(self):
        raise RuntimeError(HUGE)


class Index:
    def __index__(self):
        raise RuntimeError(HUGE)


class Text(str):
    __slots__ = ()

    def __len__(self):
        return 0

    def __str__(self):
        return HUGE

    __repr__ = __str__

    def __eq__(self, other):
        raise RuntimeError(HUGE)

    __hash__ = str.__hash__


class Lying(Mapping):
    """Raises, lies or never ends, each where it is asked to."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 1 << 40

    def __iter__(self):
        if self.fault == "iter":
            raise RuntimeError(HUGE)
        yield "primary"
        while self.fault == "endless":
            yield f"key{id(object())}"

    def __getitem__(self, key):
        if self.fault == "getitem":
            raise KeyError(HUGE)
        return self if self.fault == "circle" else HUGE


def circle():
    inner = {}
    inner["primary"] = inner
    return inner


def bomb():
    inner = {"capacity": 1}
    for _ in range(14):
        inner = dict.fromkeys("abcdefghij", inner)
    return inner


MAPPINGS = {
    "circle": circle(),
    "bomb": bomb(),
    "raises when it is walked": Lying("iter"),
    "raises when it is asked": Lying("getitem"),
    "endless": Lying("endless"),
    "circle of its own": Lying("circle"),
    "huge value": Lying(None),
    "inner": {"primary": Lying("iter")},
    "number as a key": {1: 2},
    "pair as a key": {(1, 2): 2},
    "bytes as a key": {b"primary": 2},
    "object as a key": {Index(): 1},
    "value that raises": document(version=Raising()),
    "value that raises, for a word": document(tier(backend=Raising())),
    "value that raises, for a text": document(tier(name=Raising())),
    "value that raises, for a section": document(offload=Raising()),
    "value that raises, for a list": document(secondary=Raising()),
    "index that raises": {"primary": {"capacity": Index()}},
    "path that raises": document(tier(path=FolderOf(RuntimeError(HUGE)))),
    "path of bytes": document(tier(path=FolderOf(b"/a"))),
    "path of nothing": document(tier(path=FolderOf(None))),
    "path of a zero byte": document(tier(path=FolderOf("a\0b"))),
    "path as a name": document(tier(name=Path("a/b"))),
    "generator": document(secondary=(i for i in range(3))),
    "set": document(secondary={1, 2}),
    "bytes": {"primary": b"x" * 3_000_000},
    "class of text": document(tier(name=Text("a b"))),
    "surrogates": {"\udc80": 1},
    "number of 5000 digits": {"primary": 10**5000},
    "array": {"primary": np.zeros(1_000_000)},
    "huge": {HUGE: HUGE},
    "unknown keys": {f"k{i}{HUGE[:5000]}": HUGE for i in range(5_000)},
    "wrong tiers": document(*[{f"k{i}": HUGE for i in range(1_000)}] * 8),
}


@pytest.mark.parametrize("raw", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_that_surprises_is_refused_with_few_words(raw):
    problem_of(raw)


@pytest.mark.parametrize(
    "source",
    [
        FolderOf(RuntimeError(HUGE)),
        FolderOf(b"/etc/tierstore.yaml"),
        FolderOf(None),
        "\udc80",
        "a\0b",
        "a\nb",
        "x" * 3_000_000,
        "/x" * 3_000_000,
        "~" * 3_000_000,
        "",
        ".",
        Raising(),
        10**5000,
        bytearray(5),
    ],
    ids=lambda source: str(type(source)),
)
def test_what_is_no_name_of_a_file_is_refused_with_few_words(source):
    problem_of(source)
    with pytest.raises(ConfigError):
        TierStore.open(source, Manifest.simple("m", 4096))


def test_a_relative_path_needs_a_current_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "current folder was removed" in problem_of(document(tier(path="cache")))
    assert "absolute path" in problem_of(document(tier(path="cache")))
    assert load_config(document(tier(path="/a"))).secondary[0].path == Path("/a")
    problem_of("store.yaml")


def refusal_of(call, *arguments):
    """Return the words of a refusal, empty without one; anything else but a refusal is raised."""
    try:
        call(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


words = st.sampled_from(
    ["primary", "secondary", "capacity", "io", "deadline", "name", "path", "version", "gpu", "1GiB"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | words
    | st.sampled_from(
        [Raising, Index, list, lambda: Text("x"), lambda: 10**5000, lambda: HUGE]
    ).map(lambda make: make())
    | st.sampled_from([Path("a"), np.float64(2), 1j])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(words | st.text(max_size=3), anything, max_size=5))
def test_any_mapping_is_read_or_refused_with_few_words(raw):
    assert len(refusal_of(load_config, raw)) <= MESSAGE_CHARS_MAX


SIGNS = "[]{}:,&*!|>%@`#-?\"' \n\t\\~\ufeff\0\x85\u2028"
WORDS = ["primary", "capacity", "secondary", "1GiB", "2s", "1e400", "---", "<<", "&a ", "*a"]
pieces = st.sampled_from([*SIGNS, *WORDS, "\n  ", "\n- ", ": ", "!!set "])


@settings(deadline=None)
@given(st.lists(pieces | st.text(max_size=3), max_size=40).map("".join))
def test_any_text_is_yaml_or_refused_with_few_words(text):
    assert len(refusal_of(lambda: load_config(parse_yaml(text)))) <= MESSAGE_CHARS_MAX


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused_with_few_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    assert len(refusal_of(load_config, path)) <= MESSAGE_CHARS_MAX
