"""How the bytes of records are made and verified: the seam between backends and the record format.

write   spans -> encode, per span -> the header and the stored bytes of each record
read    examine, while the bytes are in the processor's cache -> verify, per batch
        -> explain, of those that did not verify and were read anew
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.key import OffloadKey
from tierstore.record import (
    HEADER_BYTES,
    Mismatch,
    encode_headers,
    explain_mismatch,
    headers_equal,
    payload_checksum,
)

__all__ = ["Encoded", "PlainCodec", "RecordCodec"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Records as they are written."""

    headers: npt.NDArray[np.uint8]
    """A row of `HEADER_BYTES` for each."""
    slots: Sequence[memoryview]
    """As long as the given ones, page-aligned; valid until this thread encodes or reads again."""


class RecordCodec(Protocol):
    """Makes and verifies records of one tier. Thread-safe."""

    def spans(self, slot_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """Divide records into the half-open runs [start, stop) that `encode` takes at once."""

    def encode(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[memoryview],
        payload_bytes: npt.NDArray[np.unsignedinteger],
        *,
        rank: int,
    ) -> Encoded:
        """Make records of payloads, which are the first bytes of their slots and stay unchanged.

        Raises:
            OSError: there is no memory for it.
        """

    def examine(
        self,
        rows: npt.NDArray[np.uint8],
        numbers: Sequence[int],
        keys: Sequence[OffloadKey],
        payloads: Sequence[memoryview],
        *,
        rank: int,
    ) -> list[int]:
        """Look at payloads as read, and leave in each what was stored, if it verifies.

        The header of each is the row of that number. Returns a finding for each, which says nothing
        to anybody but `verify`. Touches each payload once, so that it is best called while they
        are in the processor's cache.
        """

    def verify(
        self,
        headers: npt.NDArray[np.uint8],
        keys: Sequence[OffloadKey],
        payload_bytes: npt.NDArray[np.unsignedinteger],
        findings: Sequence[int],
        *,
        rank: int,
    ) -> npt.NDArray[np.bool_]:
        """Return for each record whether it is the one that was asked for."""

    def explain(
        self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
    ) -> Mismatch | None:
        """Compare one record, header and payload as read, with what was asked for.

        None: it is the one, and `payload` holds what was stored. Agrees with `verify`.
        """


class PlainCodec:
    """Records with checksums, which find accidents. See `RecordCodec`."""

    def spans(self, slot_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """Return one run: nothing is copied."""
        return [(0, len(slot_bytes))]

    def encode(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[memoryview],
        payload_bytes: npt.NDArray[np.unsignedinteger],
        *,
        rank: int,
    ) -> Encoded:
        """Return headers with checksums, and the slots as they are."""
        checksums = [
            payload_checksum(slot[:size])
            for slot, size in zip(slots, payload_bytes.tolist(), strict=True)
        ]
        headers = encode_headers(keys, payload_bytes, checksums, rank=rank)
        return Encoded(headers.view(np.uint8).reshape(-1, HEADER_BYTES), slots)

    def examine(
        self,
        rows: npt.NDArray[np.uint8],
        numbers: Sequence[int],
        keys: Sequence[OffloadKey],
        payloads: Sequence[memoryview],
        *,
        rank: int,
    ) -> list[int]:
        """Return the checksums of the payloads."""
        del rows, numbers, keys, rank
        return list(map(payload_checksum, payloads))

    def verify(
        self,
        headers: npt.NDArray[np.uint8],
        keys: Sequence[OffloadKey],
        payload_bytes: npt.NDArray[np.unsignedinteger],
        findings: Sequence[int],
        *,
        rank: int,
    ) -> npt.NDArray[np.bool_]:
        """Compare the headers with those that the checksums give."""
        return headers_equal(headers, encode_headers(keys, payload_bytes, findings, rank=rank))

    def explain(
        self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
    ) -> Mismatch | None:
        """See `record.explain_mismatch`."""
        return explain_mismatch(header, payload, key, rank=rank)
