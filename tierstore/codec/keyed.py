"""Keyed records: AES-256-GCM over each, so that only holders of the key can make one.

    record key = keyed BLAKE2b(key of the file; bytes 0 to 111 of the header: identity, id, nonce)
    tag        = GCM tag under the record key and the nonce of
                     the payload as associated data, which stays readable      (authenticated)
                     the payload, of which the ciphertext is stored            (encrypted)

The record key binds a tag to magic, format version, key, length, rank, key id and nonce, so the
payload is read in its slot, with nothing in front of it. And it bounds what one AES key sees: a
nonce, 96 random bits, would have to come twice for the same chunk to do harm, so that neither
restarts, nor copies of a path, nor the number of records of a key file matter.

Keyed BLAKE2b over the payload lost: it needs no library, but 10 to 20 times the processor time.

A record that was stored earlier for the same key and rank verifies, wherever it lies now: what a
key names never changes. The library compares tags in constant time; attackers who measure the time
of a miss are out of scope.

The one module that imports `cryptography`.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.codec.plain import Encoded, ReadBatch
from tierstore.codec.record import (
    HEADER_BYTES,
    HEADER_DTYPE,
    IDENTITY_BYTES,
    KEYED_VERSIONS,
    Mismatch,
    identity_fault,
    pack_identity,
)
from tierstore.config.key_file import KEY_ID_BYTES, RecordKey
from tierstore.errors import MissingExtraError
from tierstore.key import OffloadKey
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.manifest import FORMAT_VERSION
from tierstore.transfer import FailureReason

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["PAYLOAD_BYTES_MAX", "KeyedCheck", "KeyedCodec"]

PAYLOAD_BYTES_MAX = (1 << 31) - 4096
"""The library takes messages of less than 2 GiB, tag included."""

_VERSION_AUTHENTICATED = FORMAT_VERSION | 0x100
_VERSION_ENCRYPTED = FORMAT_VERSION | 0x200
_NONCE_BYTES = 12
_TAG_BYTES = 16
_CONTEXT_BYTES = IDENTITY_BYTES + KEY_ID_BYTES + _NONCE_BYTES
_VERSION_FIELD = slice(8, 10)
_SPAN_BYTES_MAX = 4 << 20
"""What a thread encrypts before it writes; a larger chunk goes alone."""

_REMEDY = (
    "integrity: needs cryptography 47 or newer; install it with: pip install 'tierstore[integrity]'"
)


class _Scratch(threading.local):
    """Room for ciphertext: page-aligned, one for each thread, as large as its largest need yet."""

    def __init__(self) -> None:
        self._room = memoryview(b"")

    def room(self, size_bytes: int) -> memoryview:
        """Return room for some bytes; its content is that of the last use.

        Raises:
            OSError: there is no memory for it.
        """
        if len(self._room) < size_bytes:
            self._room = memoryview(mmap.mmap(-1, round_up(size_bytes, PAGE_BYTES)))
        return self._room


class KeyedCodec:
    """Writes with the first of its keys, verifies with all of them. See `RecordCodec`."""

    def __init__(self, keys: Sequence[RecordKey], *, encrypt: bool) -> None:
        """Take over the keys of a key file. Records of both kinds are read in any case.

        Raises:
            MissingExtraError: `cryptography` is not installed, or too old.
        """
        self._cipher, self._invalid_tag = _import_cipher()
        self._key = keys[0]
        self._keys = {key.key_id: key for key in keys}
        self._encrypt = encrypt
        self._version = _VERSION_ENCRYPTED if encrypt else _VERSION_AUTHENTICATED
        self._scratch = _Scratch()

    def spans(self, slot_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """Return runs that fit the room for ciphertext; one run if nothing is encrypted."""
        if not self._encrypt:
            return [(0, len(slot_bytes))]
        spans, start, span_bytes = [], 0, 0
        for index, size in enumerate(slot_bytes):
            if index > start and span_bytes + size > _SPAN_BYTES_MAX:
                spans.append((start, index))
                start, span_bytes = index, 0
            span_bytes += size
        return [*spans, (start, len(slot_bytes))]

    def encode(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[memoryview],
        payload_bytes: npt.NDArray[np.unsignedinteger],
        *,
        rank: int,
    ) -> Encoded:
        """Return headers with tags, and the slots or their ciphertext."""
        sizes = payload_bytes.tolist()
        nonces = os.urandom(_NONCE_BYTES * len(keys))
        stored = self._rooms(slots) if self._encrypt else slots
        headers = bytearray()
        for i, (key, slot, size) in enumerate(zip(keys, slots, sizes, strict=True)):
            nonce = nonces[i * _NONCE_BYTES : (i + 1) * _NONCE_BYTES]
            context = pack_identity(key, size, self._version, rank=rank) + self._key.key_id + nonce
            cipher = self._cipher(self._key.derive(context))
            if self._encrypt:
                # The tag lies behind the ciphertext, where the next record will lie.
                room = stored[i]
                cipher.encrypt_into(nonce, slot[:size], None, room[: size + _TAG_BYTES])
                tag = bytes(room[size : size + _TAG_BYTES])
            else:
                tag = cipher.encrypt(nonce, b"", slot[:size])
            headers += context
            headers += tag
        rows = np.frombuffer(headers, np.uint8).reshape(-1, HEADER_BYTES)
        if self._encrypt:
            stored = [room[: len(slot)] for room, slot in zip(stored, slots, strict=True)]
        return Encoded(rows, stored)

    def _rooms(self, slots: Sequence[memoryview]) -> list[memoryview]:
        """Return room for each slot, a tag longer than it, one behind another."""
        size_bytes = sum(map(len, slots))
        room = self._scratch.room(size_bytes + PAGE_BYTES)
        rooms, start = [], 0
        for slot in slots:
            rooms.append(room[start : start + len(slot) + _TAG_BYTES])
            start += len(slot)
        return rooms

    def check(self, batch: ReadBatch, *, rank: int) -> "KeyedCheck":
        """Begin to verify a batch."""
        return KeyedCheck(self, batch, rank)

    def explain(
        self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int
    ) -> Mismatch | None:
        """Verify one record, and decrypt it in its place; otherwise name the fault."""
        if not any(header):
            return Mismatch(FailureReason.ABSENT, "no header")
        fields = np.frombuffer(header, HEADER_DTYPE)[0]
        cause = identity_fault(fields, len(payload), key, rank=rank)
        if cause != "magic" and fields["format_version"] not in KEYED_VERSIONS:
            cause = "no mac" if fields["format_version"] == FORMAT_VERSION else "format version"
        if cause is not None:
            return Mismatch(FailureReason.CORRUPT, cause)
        if header[IDENTITY_BYTES : IDENTITY_BYTES + KEY_ID_BYTES] not in self._keys:
            return Mismatch(FailureReason.CORRUPT, "unknown key")
        try:
            if self.opens(header, payload, key, rank=rank):
                return None
        except OSError:
            return Mismatch(FailureReason.IO_ERROR, "no memory to decrypt")
        if not np.frombuffer(payload, np.uint8).any():
            return Mismatch(FailureReason.ABSENT, "payload given back")
        return Mismatch(FailureReason.CORRUPT, "mac")

    def opens(self, header: bytes, payload: memoryview, key: OffloadKey, *, rank: int) -> bool:
        """Verify a record, and decrypt it in its place; if it fails, `payload` is as it was.

        Raises:
            OSError: there is no memory for the ciphertext.
        """
        context, tag = header[:_CONTEXT_BYTES], header[_CONTEXT_BYTES:]
        version = int.from_bytes(header[_VERSION_FIELD], "little")
        file_key = self._keys.get(header[IDENTITY_BYTES : IDENTITY_BYTES + KEY_ID_BYTES])
        # What was asked for decides, not what the header says of itself.
        if (
            file_key is None
            or version not in KEYED_VERSIONS
            or context[:IDENTITY_BYTES] != pack_identity(key, len(payload), version, rank=rank)
        ):
            return False
        cipher = self._cipher(file_key.derive(context))
        nonce = context[-_NONCE_BYTES:]
        try:
            if version == _VERSION_ENCRYPTED:
                self._decrypt(cipher, nonce, payload, tag)
            else:
                cipher.decrypt(nonce, tag, payload)
        except self._invalid_tag:
            return False
        return True

    def _decrypt(self, cipher: "AESGCM", nonce: bytes, payload: memoryview, tag: bytes) -> None:
        size = len(payload)
        room = self._scratch.room(size + _TAG_BYTES)[: size + _TAG_BYTES]
        room[:size] = payload
        room[size:] = tag
        try:
            cipher.decrypt_into(nonce, room, None, payload)
        except self._invalid_tag:
            # The library writes before it verifies: what it wrote must not be seen.
            payload[:] = room[:size]
            raise


class KeyedCheck:
    """Verifies records one by one. See `RecordCheck`."""

    def __init__(self, codec: KeyedCodec, batch: ReadBatch, rank: int) -> None:
        """Begin with nothing examined."""
        self._codec = codec
        self._batch = batch
        self._rank = rank
        self._numbers: Sequence[int] = range(len(batch.payloads))
        if batch.numbers is not None:
            self._numbers = batch.numbers.tolist()
        self._verified = bytearray(len(batch.payloads))

    def examine(self, start: int, stop: int) -> None:
        """Verify records, and decrypt them in their places."""
        batch = self._batch
        for i in range(start, stop):
            header = batch.rows[self._numbers[i]].tobytes()
            with suppress(OSError):  # `explain` will say so, if it meets the same
                self._verified[i] = self._codec.opens(
                    header, batch.payloads[i], batch.keys[i], rank=self._rank
                )

    def verified(self) -> npt.NDArray[np.bool_]:
        """Return what was found: all is done by then."""
        return np.frombuffer(self._verified, np.bool_)


def _import_cipher() -> "tuple[type[AESGCM], type[Exception]]":
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtraError(_REMEDY) from error
    if not hasattr(AESGCM, "decrypt_into"):
        raise MissingExtraError(_REMEDY)
    return AESGCM, InvalidTag
