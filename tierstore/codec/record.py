"""The record: how one chunk lies in a secondary tier. One codec for all backends.

    extent in a segment file (pages of 4 KiB, h = 1 header page):
        | header page: header 0 .. header n-1 | payload 0 | payload 1 | ... | payload n-1 |
          ^ header_page                         ^ header_page + 1 + index * stride_pages
    items in LMDB (see `backend.lmdb.backend`):
        | payload, as far as it fills pages |      | header | rest of the payload |

A header is 128 bytes, so a header page describes up to 32 adjacent records: a prefix that was
stored together is read with one vectored call, and small chunks do not pay a page each.

    offset  bytes  field             content (integers are little-endian)
         0      8  magic             b"TSRECORD"
         8      2  format_version    `manifest.FORMAT_VERSION`; a keyed record has a mark added
        10      2  key_bytes         length of the key, 20 to 76
        12      4  payload_bytes     live bytes of the payload; the rest of its pages is arbitrary
        16     76  key               namespace, group index and block hash, zero-padded
        92      4  rank              whose payload this is
        96      8  payload_checksum  xxh3_64 of the payload
       104     16  reserved          MUST be zero
       120      8  header_checksum   xxh3_64 of bytes 0 to 119

A keyed record (see `keyed`) has, instead of what begins at 96:

        96      4  key_id            which key of the key file
       100     12  nonce             random
       112     16  tag               of all of the above, and of the payload

The headers that a header page does not use are zero. A reader knows key, length and rank from the
catalog, takes none of them from the disk, and MUST refuse a record whose header differs in any bit
from the one that these and the checksum of the payload as read give; or, of a keyed record, whose
tag is not the one that these and the payload as read have. A header of zeros is a record
that is gone (its pages were given back); so is a payload of zeros whose checksum is not that of
zeros.

A checksum finds accidents. Whoever can write below the path can make a record with a right one;
only keyed records are safe from that. Checksums lie here and not in the catalog, although that
would save the header read of a partial extent: each rank has other bytes, one catalog serves all.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tierstore.key import KEY_BYTES_MAX, OffloadKey
from tierstore.layout import PAGE_BYTES
from tierstore.manifest import FORMAT_VERSION
from tierstore.transfer import FailureReason, Place

__all__ = [
    "EXTENT_RECORDS_MAX",
    "HEADER_BYTES",
    "HEADER_DTYPE",
    "IDENTITY_BYTES",
    "KEYED_VERSIONS",
    "PLACE_BYTES",
    "PLACE_DTYPE",
    "Mismatch",
    "encode_headers",
    "explain_mismatch",
    "headers_equal",
    "identity_fault",
    "pack_identity",
    "parse_places",
    "payload_checksum",
]

HEADER_BYTES = 128
EXTENT_RECORDS_MAX = PAGE_BYTES // HEADER_BYTES
IDENTITY_BYTES = 96
"""What a header begins with, in records of both kinds: magic, version, key, length and rank."""
KEYED_VERSIONS = frozenset({FORMAT_VERSION | 0x100, FORMAT_VERSION | 0x200})
"""Format versions of keyed records: authenticated ones, and those that are encrypted, too."""

PLACE_DTYPE = np.dtype(
    [
        ("segment", "<u4"),
        ("header_page", "<u4"),
        ("index", "<u4"),
        ("stride_pages", "<u4"),
        ("payload_bytes", "<u4"),
        ("segment_pages", "<u4"),
    ]
)
"""Fields of a `transfer.Place`: record `index` of the extent whose header page is `header_page`, in
a segment that is preallocated to `segment_pages`."""

PLACE_BYTES = PLACE_DTYPE.itemsize

HEADER_DTYPE = np.dtype(
    [
        ("magic", "V8"),
        ("format_version", "<u2"),
        ("key_bytes", "<u2"),
        ("payload_bytes", "<u4"),
        ("key", f"V{KEY_BYTES_MAX}"),
        ("rank", "<u4"),
        ("payload_checksum", "<u8"),
        ("reserved", "V16"),
        ("header_checksum", "<u8"),
    ]
)
"""The byte table of the module, as numpy reads it."""

_MAGIC = b"TSRECORD"
_CHECKED_BYTES = HEADER_BYTES - 8
_CHECKED_FIELDS = struct.Struct(f"<8sHHI{KEY_BYTES_MAX}sIQ16x")
_IDENTITY_FIELDS = struct.Struct(f"<8sHHI{KEY_BYTES_MAX}sI")
_CHECKSUM = struct.Struct("<Q")
_NO_PLACE = bytes(PLACE_BYTES)

payload_checksum = xxh3_64_intdigest
"""xxh3_64 of a buffer; about 65 GB/s while the bytes are in cache."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a record is not the one that was asked for."""

    reason: FailureReason
    cause: str
    """In words, the same for every record with this fault: the cause of one log line."""


def parse_places(places: Sequence[Place] | npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Return the places as an array of `PLACE_DTYPE`; one of a wrong length becomes all zeros.

    An array of items as wide as a place is not copied.
    """
    if isinstance(places, np.ndarray):
        if places.dtype.kind == "V" and places.itemsize == PLACE_BYTES:
            return places.view(PLACE_DTYPE)
        places = places.tolist() if len(places) else ()
    joined = b"".join(places)
    if len(joined) != PLACE_BYTES * len(places) or set(map(len, places)) != {PLACE_BYTES}:
        joined = b"".join(p if len(p) == PLACE_BYTES else _NO_PLACE for p in places)
    return np.frombuffer(joined, PLACE_DTYPE)


def encode_headers(
    keys: Sequence[OffloadKey],
    payload_bytes: npt.NDArray[np.unsignedinteger],
    payload_checksums: Sequence[int],
    *,
    rank: int,
) -> npt.NDArray[np.void]:
    """Return the headers of records as an array of `HEADER_DTYPE`, contiguous in memory.

    Costs about 0.3 us per record. Without numpy, whose assignments to fields give up the
    interpreter: each would be a wait for the other threads of the data plane.
    """
    encoded = bytearray()
    for key, size, checksum in zip(keys, payload_bytes.tolist(), payload_checksums, strict=True):
        fields = _CHECKED_FIELDS.pack(_MAGIC, FORMAT_VERSION, len(key), size, key, rank, checksum)
        encoded += fields
        encoded += _CHECKSUM.pack(xxh3_64_intdigest(fields))
    return np.frombuffer(encoded, HEADER_DTYPE)


def pack_identity(key: OffloadKey, payload_bytes: int, version: int, *, rank: int) -> bytes:
    """Return the first `IDENTITY_BYTES` of a record's header."""
    return _IDENTITY_FIELDS.pack(_MAGIC, version, len(key), payload_bytes, key, rank)


def headers_equal(
    actual: npt.NDArray[np.uint8], expected: npt.NDArray[np.void]
) -> npt.NDArray[np.bool_]:
    """Return per record whether the header as read, a row of 128 bytes, is the expected one."""
    rows = expected.view(np.uint64).reshape(-1, HEADER_BYTES // 8)
    equal: npt.NDArray[np.bool_] = (actual.view(np.uint64) == rows).all(axis=1)
    return equal


def explain_mismatch(
    header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
) -> Mismatch | None:
    """Compare one record as read with what was asked for; None: it is the one.

    `payload` has the expected length. Agrees with `headers_equal`, but says what is wrong.
    """
    if not any(header):
        return Mismatch(FailureReason.ABSENT, "no header")
    cause = _header_fault(header, len(payload), key, rank)
    if cause is not None:
        return Mismatch(FailureReason.CORRUPT, cause)
    checksum = int(np.frombuffer(header, HEADER_DTYPE)["payload_checksum"][0])
    if xxh3_64_intdigest(payload) == checksum:
        return None
    if not np.frombuffer(payload, np.uint8).any():
        return Mismatch(FailureReason.ABSENT, "payload given back")
    return Mismatch(FailureReason.CORRUPT, "payload checksum")


def identity_fault(
    fields: np.void, payload_bytes: int, key: OffloadKey, *, rank: int
) -> str | None:
    """Name what in the fields of `HEADER_DTYPE` is not of the record that was asked for."""
    if fields["magic"].tobytes() != _MAGIC:
        return "magic"
    if fields["key_bytes"] != len(key) or fields["key"].tobytes() != key.ljust(
        KEY_BYTES_MAX, b"\0"
    ):
        return "key"
    if fields["payload_bytes"] != payload_bytes:
        return "payload length"
    return "rank" if fields["rank"] != rank else None


def _header_fault(header: bytes, payload_bytes: int, key: OffloadKey, rank: int) -> str | None:
    """Name the first field of a header that is not as expected."""
    fields = np.frombuffer(header, HEADER_DTYPE)[0]
    if fields["magic"].tobytes() != _MAGIC:
        return "magic"
    if fields["format_version"] in KEYED_VERSIONS:
        return "written with a key"
    if fields["format_version"] != FORMAT_VERSION:
        return "format version"
    if xxh3_64_intdigest(header[:_CHECKED_BYTES]) != fields["header_checksum"]:
        return "header checksum"
    fault = identity_fault(fields, payload_bytes, key, rank=rank)
    if fault is not None:
        return fault
    return "reserved bytes" if any(fields["reserved"].tobytes()) else None
