"""A record's header, bit by bit: what the codec writes, and what it says of a forged one."""

import struct

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tierstore.codec.record import (
    HEADER_BYTES,
    HEADER_DTYPE,
    encode_headers,
    explain_mismatch,
    headers_equal,
    payload_checksum,
)
from tierstore.key import make_offload_key
from tierstore.transfer import FailureReason

KEY = make_offload_key(b"namespac", 3, bytes(range(32)))
PAYLOAD = bytes(range(256)) * 20
RANK = 5


def header_of(key=KEY, payload=PAYLOAD, rank=RANK):
    sizes = np.array([len(payload)], np.uint32)
    return encode_headers([key], sizes, [payload_checksum(payload)], rank=rank).tobytes()


def explain(header, payload=PAYLOAD):
    return explain_mismatch(header, memoryview(payload), KEY, rank=RANK)


def test_a_header_is_the_byte_table_of_the_architecture():
    fields = struct.unpack("<8sHHI76sIQ16sQ", header_of())
    assert fields[:4] == (b"TSRECORD", 1, len(KEY), len(PAYLOAD))
    assert fields[4] == KEY.ljust(76, b"\0")
    assert fields[5:8] == (RANK, xxh3_64_intdigest(PAYLOAD), bytes(16))
    assert fields[8] == xxh3_64_intdigest(header_of()[:120])
    assert explain(header_of()) is None


@pytest.mark.parametrize(
    ("offset", "cause"),
    [
        (0, "magic"),
        (8, "format version"),
        (10, "key"),
        (12, "payload length"),
        (16, "key"),
        (91, "key"),
        (92, "rank"),
        (96, "payload checksum"),
        (104, "reserved bytes"),
        (119, "reserved bytes"),
        (120, "header checksum"),
    ],
)
def test_a_forged_field_is_named_and_never_served(offset, cause):
    forged = bytearray(header_of())
    forged[offset] ^= 4
    if offset < 120:  # as somebody who knows the format would
        struct.pack_into("<Q", forged, 120, xxh3_64_intdigest(bytes(forged[:120])))
    mismatch = explain(bytes(forged))
    assert (mismatch.reason, mismatch.cause) == (FailureReason.CORRUPT, cause)
    rows = np.frombuffer(header_of() + forged, np.uint8).reshape(2, HEADER_BYTES)
    expected = np.frombuffer(2 * header_of(), HEADER_DTYPE)
    assert headers_equal(rows, expected).tolist() == [True, False]


def test_what_was_given_back_is_absent_and_a_payload_of_zeros_is_not():
    zeros = bytes(len(PAYLOAD))
    assert explain(bytes(HEADER_BYTES)).reason is FailureReason.ABSENT
    assert explain(header_of(), zeros).reason is FailureReason.ABSENT
    assert explain(header_of(payload=zeros), zeros) is None
    assert explain(header_of(), PAYLOAD[:-1] + b"\0").cause == "payload checksum"
