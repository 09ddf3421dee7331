"""The byte tables of docs/format.md against the code, number by number.

Method: a row is packed with one field set, and the bytes that this changes must be those that its
table gives to the field. Then each number of each table is changed, and that must be noticed.
"""

import re
import struct

import numpy as np
import pytest
from format_tables import (
    FORMAT,
    INTEGRITY,
    content_of,
    end_of,
    fields_of,
    section_of,
    table_of,
)
from xxhash import xxh3_64_intdigest

from tierstore.catalog.index.head import SHARD_DTYPE
from tierstore.catalog.index.log_row import GROUP_DTYPE
from tierstore.catalog.pages.cluster_row import CLUSTER_RECORDS_MAX, ClusterRow, names_of
from tierstore.catalog.rows import (
    CATALOG_VERSION,
    EXTENT_DTYPE,
    RUN_DTYPE,
    OwnerRow,
    PendingRow,
    SegmentRow,
    SegmentState,
    StateRow,
)
from tierstore.codec import record
from tierstore.codec.record import (
    EXTENT_RECORDS_MAX,
    HEADER_BYTES,
    HEADER_DTYPE,
    IDENTITY_BYTES,
    KEYED_VERSIONS,
    encode_headers,
)
from tierstore.config.key_file import KEY_ID_BYTES
from tierstore.device.block_units import BlockUnits
from tierstore.device.marker import claim
from tierstore.key import BLOCK_HASH_BYTES_MAX, BLOCK_HASH_BYTES_MIN, KEY_BYTES_MAX, OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.manifest import FORMAT_VERSION

ARRAYS = {
    "Record header": HEADER_DTYPE,
    "Extent being written": EXTENT_DTYPE,
    "Page run": RUN_DTYPE,
    "Shard in the index head": SHARD_DTYPE,
    "Log group": GROUP_DTYPE,
}
ROWS = {"State": StateRow, "Owner": OwnerRow, "Segment": SegmentRow}


def checksum_of(content):
    return xxh3_64_intdigest(content).to_bytes(8, "little")


def without_checksum(fields, packed):
    """Compare the checksum that ends a row, if its table has one; return the other fields."""
    *others, (name, offset, width) = fields
    assert offset + width == len(packed)
    if name != "checksum":
        return fields
    assert packed[offset:] == checksum_of(packed[:offset])
    return others


def compare_array(heading, text):
    dtype = ARRAYS[heading]
    actual = [(name, dtype.fields[name][1], dtype[name].itemsize) for name in dtype.names]
    assert fields_of(heading, text) == actual
    assert all(kind.byteorder != ">" for kind, *_ in dtype.fields.values())


def compare_row(heading, text):
    kind = ROWS[heading]
    zeros = {name: bytes(8) if name == "namespace" else 0 for name in kind.__match_args__}
    fields = without_checksum(fields_of(heading, text), kind(**zeros).pack())
    assert [name for name, _, _ in fields] == list(kind.__match_args__)
    for name, offset, width in fields:
        value = bytes(range(0x81, 0x81 + width))
        number = int.from_bytes(value, "little")
        packed = kind(**(zeros | {name: value if name == "namespace" else number})).pack()
        around = bytes(offset), bytes(end_of(fields) - offset - width)
        assert packed[: end_of(fields)] == value.join(around), name
        if name != "namespace":
            with pytest.raises(struct.error):
                kind(**(zeros | {name: 1 << 8 * width})).pack()


def compare_units(heading, text):
    fields = without_checksum(fields_of(heading, text), BlockUnits().pack())
    zeros = {"unit_pages": 0, "metadata_pages": 0, "frees_parts": False, "allocates": False}
    assert [name for name, _, _ in fields] == list(zeros)
    for name, offset, width in fields:
        packed = BlockUnits(**(zeros | {name: 1})).pack()
        around = bytes(offset), bytes(end_of(fields) - offset - width)
        assert packed[: end_of(fields)] == (1).to_bytes(width, "little").join(around), name


def compare_pending_head(heading, text):
    fields = fields_of(heading, text)
    runs = np.arange(1, 1 + 2 * 3, dtype="<u4").view(RUN_DTYPE)
    extents = np.arange(11, 11 + 3 * 4, dtype="<u4").view(EXTENT_DTYPE)
    packed = PendingRow(0x01020304, extents, runs, [7]).pack()
    values = {"owner": 0x01020304, "extent_count": 3, "run_count": 2, "segment_count": 1}
    assert [name for name, _, _ in fields] == list(values)
    for name, offset, width in fields:
        assert packed[offset : offset + width] == values[name].to_bytes(width, "little"), name
    parts = extents.tobytes() + runs.tobytes() + (7).to_bytes(4, "little")
    assert packed[end_of(fields) :] == parts


def compare_cluster_head(heading, text):
    names = [b"x" * 20, b"y" * 21, b"z" * 76]
    values = {
        "record_count": 0x01020304,
        "stride_pages": 0x05060708,
        "payload_bytes": 0x11121314,
        "segment_pages": 0x21222324,
        "extent_records": 0x31323334,
    }
    packed = ClusterRow(**values, groups={9: 1, 10: 6}, names=b"names").pack()
    values["group_count"] = 2
    fields = fields_of(heading, text)
    assert [name for name, _, _ in fields] == list(values)
    for name, offset, width in fields:
        assert packed[offset : offset + width] == values[name].to_bytes(width, "little"), name
    assert packed[end_of(fields) + 2 * ClusterRow.GROUP.size :] == b"names"
    assert names_of(names) == bytes([20, 21, 76]) + b"".join(names)
    for keys in (names, names[:1] * 2):
        assert ClusterRow(len(keys), 1, 1, 1, 1, {}, names_of(keys)).keys() == keys


def compare_group(heading, text):
    values = {"sequence": 0x0102030405060708, "bits": 0x11 << 120 | 0x090A0B0C}
    row = ClusterRow(1, 1, 1, 1, 1, {values["sequence"]: values["bits"]}, b"")
    packed = row.pack()[ClusterRow.HEAD.size :]
    fields = fields_of(heading, text)
    assert [name for name, _, _ in fields] == list(values)
    for name, offset, width in fields:
        assert packed[offset : offset + width] == values[name].to_bytes(width, "little"), name
    assert end_of(fields) == len(packed)


COMPARISONS = {
    **dict.fromkeys(ARRAYS, compare_array),
    **dict.fromkeys(ROWS, compare_row),
    "Block units": compare_units,
    "Pending head": compare_pending_head,
    "Cluster head": compare_cluster_head,
    "Group": compare_group,
}


@pytest.mark.parametrize("heading", COMPARISONS)
def test_a_byte_table_is_what_the_code_packs(heading):
    COMPARISONS[heading](heading, FORMAT)


def changed_numbers(heading):
    """Return the page once for each number of a byte table, with this one changed."""
    section = section_of(heading)
    for row in re.finditer(r"^\| (\d+) \| (\d+) \| ", section, re.MULTILINE):
        for group in (1, 2):
            start, end = row.span(group)
            changed = section[:start] + str(int(row[group]) + 1) + section[end:]
            yield FORMAT.replace(section, changed)


@pytest.mark.parametrize("heading", COMPARISONS)
def test_a_changed_number_of_a_byte_table_is_noticed(heading):
    texts = list(changed_numbers(heading))
    assert len(texts) == 2 * len(table_of(heading))
    for text in texts:
        with pytest.raises(AssertionError):
            COMPARISONS[heading](heading, text)


@pytest.mark.parametrize("heading", COMPARISONS)
def test_a_renamed_field_of_a_byte_table_is_noticed(heading):
    for row in table_of(heading):
        text = FORMAT.replace(f"| {row['bytes']} | {row['field']} |", f"| {row['bytes']} | other |")
        with pytest.raises(AssertionError):
            COMPARISONS[heading](heading, text)


def test_every_byte_table_of_the_page_is_compared():
    headings = re.findall(
        r"^#+ ([^\n]+)\n(?:(?!^#).)*?^\| offset \| bytes ", FORMAT, re.MULTILINE | re.DOTALL
    )
    assert set(headings) == COMPARISONS.keys() | {"Seal"}


def test_versions_and_bounds_of_the_page_are_those_of_the_code():
    first = r"Catalog version (\d+), record header version (\d+), directory version \d+\."
    versions = re.search(first, FORMAT)
    assert [int(number) for number in versions.groups()] == [CATALOG_VERSION, FORMAT_VERSION]
    assert int(content_of("State", "format version").split(":")[0]) == CATALOG_VERSION
    version, *keyed = re.findall(r"\b0x\w+|\b\d+", content_of("Record header", "format version"))
    assert int(version) == FORMAT_VERSION
    assert {int(number, 16) for number in keyed} == KEYED_VERSIONS
    bounds = [12 + BLOCK_HASH_BYTES_MIN, 12 + BLOCK_HASH_BYTES_MAX]
    assert content_of("Record header", "key bytes") == "{} to {}".format(*bounds)
    assert bounds[1] == KEY_BYTES_MAX
    states = dict(re.findall(r"(\d) (\w+)", content_of("Segment", "state")))
    assert {name.upper(): int(n) for n, name in states.items()} == SegmentState.__members__
    assert f"A page is {PAGE_BYTES} bytes." in FORMAT
    assert f"{HEADER_BYTES} bytes, one per record" in FORMAT
    assert f"up to {EXTENT_RECORDS_MAX} record headers of one extent" in FORMAT
    assert EXTENT_RECORDS_MAX * HEADER_BYTES == PAGE_BYTES
    bound = content_of("Cluster head", "record count")
    assert bound == f"records that were written, 1 to {CLUSTER_RECORDS_MAX}"
    bound = content_of("Cluster head", "extent records")
    assert bound.startswith(f"1 to {EXTENT_RECORDS_MAX};")


@pytest.mark.parametrize(
    ("heading", "field"),
    [
        ("Record header", "header checksum"),
        ("State", "checksum"),
        ("Block units", "checksum"),
        ("Seal", "checksum"),
    ],
)
def test_a_checksum_covers_what_stands_before_it(heading, field):
    *_, (_, offset, _) = fields_of(heading)
    assert content_of(heading, field) == f"xxh3_64 of bytes 0 to {offset - 1}"


def test_a_header_is_made_as_its_table_says():
    key = OffloadKey(b"k" * 20)
    header = encode_headers([key], np.array([9], np.uint32), [5], rank=3).tobytes()
    fields = fields_of("Record header")
    at = {name: slice(offset, offset + width) for name, offset, width in fields}
    assert f"`{header[at['magic']].decode()}`" == content_of("Record header", "magic")
    assert header[at["key_bytes"]] == bytes([20, 0])
    assert header[at["payload_bytes"]] == bytes([9, 0, 0, 0])
    assert header[at["key"]] == key.ljust(KEY_BYTES_MAX, b"\0")
    assert header[at["rank"]] == bytes([3, 0, 0, 0])
    assert header[at["payload_checksum"]] == (5).to_bytes(8, "little")
    assert header[at["header_checksum"]] == checksum_of(header[: at["header_checksum"].start])


def test_the_table_in_the_module_of_records_is_that_of_the_page():
    fields = re.findall(r"^ +(\d+) +(\d+)  (\w+)", record.__doc__, re.MULTILINE)
    plain = fields[: len(HEADER_DTYPE.names)]
    assert [(name, int(offset), int(width)) for offset, width, name in plain] == (
        fields_of("Record header")
    )


def test_the_table_of_keyed_headers_continues_that_of_others():
    version, *rows = table_of("Format", INTEGRITY)
    assert {int(number, 16) for number in re.findall(r"0x\w+", version["content"])} == (
        KEYED_VERSIONS
    )
    field = ("format_version", int(version["offset"]), int(version["bytes"]))
    assert field in fields_of("Record header")
    end = IDENTITY_BYTES
    for row in rows:
        assert int(row["offset"]) == end
        end += int(row["bytes"])
    assert end == HEADER_BYTES
    assert int(rows[0]["bytes"]) == KEY_ID_BYTES


def test_a_marker_is_as_the_page_says(tmp_path):
    claim(tmp_path / "tier").close()
    line, checksum = (tmp_path / "tier" / ".tierstore").read_bytes().splitlines(keepends=True)
    (documented,) = re.findall(r"^The marker is two lines: `(.*?)`", FORMAT, re.MULTILINE)
    assert line == documented.encode() + b"\n"
    assert checksum == b"%016x\n" % xxh3_64_intdigest(line)
    assert f"directory version {documented.rpartition(' ')[2]}." in FORMAT


def test_a_seal_is_as_the_page_says(tmp_path):
    LmdbEnv.open(tmp_path, map_bytes=1 << 20, sealed=True).close()
    content, sealed = (tmp_path / "data.mdb").read_bytes(), (tmp_path / "seal.bin").read_bytes()
    fields = without_checksum(fields_of("Seal"), sealed)
    values = {
        name: int.from_bytes(sealed[offset : offset + width], "little")
        for name, offset, width in fields
    }
    assert values == {"file_bytes": len(content), "file_checksum": xxh3_64_intdigest(content)}
