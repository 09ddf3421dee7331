"""How the bytes of records are made and verified: the seam between backends and the record format.

write   spans -> encode, per span -> the header and the stored bytes of each record
read    check -> examine, part by part, while the bytes are in the processor's cache
        -> verified, of all -> explain, of those that were not
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.codec.record import (
    HEADER_BYTES,
    Mismatch,
    encode_headers,
    explain_mismatch,
    headers_equal,
    payload_checksum,
)
from tierstore.key import OffloadKey

__all__ = ["Encoded", "PlainCheck", "PlainCodec", "ReadBatch", "RecordCheck", "RecordCodec"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Records as they are written."""

    headers: npt.NDArray[np.uint8]
    """A row of `HEADER_BYTES` for each."""
    slots: Sequence[memoryview]
    """As long as the given ones, page-aligned; valid until this thread encodes or reads again."""


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Records to read; headers and payloads may arrive later, each before it is examined."""

    keys: Sequence[OffloadKey]
    payload_bytes: npt.NDArray[np.unsignedinteger]
    payloads: Sequence[memoryview]
    """As they are stored; as they are, once verified."""
    rows: npt.NDArray[np.uint8]
    """Of `HEADER_BYTES` each; some of them are headers."""
    numbers: npt.NDArray[np.int64] | None = None
    """Per record, the row that is its header; None: they are in the order of the records."""


class RecordCheck(Protocol):
    """The verification of one batch. One thread."""

    def examine(self, start: int, stop: int) -> None:
        """Look at the records [start, stop), and leave in each what was stored, if it verifies.

        Touches each payload once: best done while they are in the processor's cache.
        """

    def verified(self) -> npt.NDArray[np.bool_]:
        """Return for each record whether it was examined, and is the one that was asked for."""


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

    def check(self, batch: ReadBatch, *, rank: int) -> RecordCheck:
        """Begin to verify a batch."""

    def explain(
        self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
    ) -> Mismatch | None:
        """Compare one record, header and payload as read, with what was asked for.

        None: it is the one, and `payload` holds what was stored. Agrees with `check`.
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

    def check(self, batch: ReadBatch, *, rank: int) -> "PlainCheck":
        """Begin to compare a batch with its checksums."""
        return PlainCheck(batch, rank)

    def explain(
        self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
    ) -> Mismatch | None:
        """See `record.explain_mismatch`."""
        return explain_mismatch(header, payload, key, rank=rank)


class PlainCheck:
    """Compares headers with those that the payloads as read would have. See `RecordCheck`."""

    def __init__(self, batch: ReadBatch, rank: int) -> None:
        """Begin with nothing examined."""
        self._batch = batch
        self._rank = rank
        self._payloads = batch.payloads
        self._checksums = [0] * len(batch.payloads)
        self._examined = bytearray(len(batch.payloads))

    def examine(self, start: int, stop: int) -> None:
        """Sum payloads up."""
        self._checksums[start:stop] = map(payload_checksum, self._payloads[start:stop])
        self._examined[start:stop] = b"\1" * (stop - start)

    def verified(self) -> npt.NDArray[np.bool_]:
        """Compare the headers with those that the sums give."""
        batch = self._batch
        expected = encode_headers(batch.keys, batch.payload_bytes, self._checksums, rank=self._rank)
        headers = batch.rows if batch.numbers is None else batch.rows[batch.numbers]
        equal = headers_equal(headers, expected)
        return equal & np.frombuffer(self._examined, np.bool_) if 0 in self._examined else equal
