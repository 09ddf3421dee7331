"""Keyed records, one by one: what a holder of the key makes is served, and nothing else is."""

import mmap
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from keyed import KINDS, codec_of, secret_of
from xxhash import xxh3_64_intdigest

from tierstore.codec.plain import PlainCodec, ReadBatch
from tierstore.codec.record import HEADER_BYTES
from tierstore.config.key_file import RecordKey
from tierstore.key import Namespace, make_offload_keys
from tierstore.layout import PAGE_BYTES, round_up
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import FailureReason

KEYS = make_offload_keys(Namespace(b"integral"), 0, spread_hashes(range(40)))
RANK = 3
BITS = st.integers(0, 7)


def slot_of(payload):
    slot = memoryview(mmap.mmap(-1, round_up(len(payload), PAGE_BYTES)))
    slot[: len(payload)] = payload
    return slot


def payload_of(number, size=5000):
    return np.random.default_rng(number).bytes(size)


def encoded(codec, payloads, keys=KEYS, rank=RANK):
    """Return the header and the stored payload of each record, in copies."""
    slots = [slot_of(payload) for payload in payloads]
    sizes = np.array(list(map(len, payloads)), np.uint32)
    made = []
    for start, stop in codec.spans(list(map(len, slots))):
        part = codec.encode(keys[start:stop], slots[start:stop], sizes[start:stop], rank=rank)
        assert [len(slot) for slot in part.slots] == [len(slot) for slot in slots[start:stop]]
        made += [
            (row.tobytes(), bytes(slot[:size]))
            for row, slot, size in zip(
                part.headers, part.slots, sizes[start:stop].tolist(), strict=True
            )
        ]
    assert [bytes(s[: len(p)]) for s, p in zip(slots, payloads, strict=True)] == payloads
    return made


def read(codec, header, stored, key=KEYS[0], rank=RANK):
    """Return what a read finds: the payload, or the cause of a miss, by both ways of verifying."""
    outcomes = []
    payload = memoryview(bytearray(stored))
    rows = np.frombuffer(header, np.uint8).reshape(1, HEADER_BYTES)
    sizes = np.array([len(stored)], np.uint32)
    check = codec.check(ReadBatch([key], sizes, [payload], rows, np.arange(1)), rank=rank)
    assert not check.verified().any(), "nothing is, before it is examined"
    check.examine(0, 1)
    verified = check.verified()
    outcomes.append(bytes(payload) if verified.all() else None)
    if not verified.all():
        assert payload == stored, "what did not verify was changed"
    payload = memoryview(bytearray(stored))
    mismatch = codec.explain(header, payload, key, rank=rank)
    outcomes.append(bytes(payload) if mismatch is None else None)
    assert outcomes[0] == outcomes[1]
    return outcomes[0] if mismatch is None else mismatch.cause


@pytest.mark.parametrize("encrypt", KINDS)
@pytest.mark.parametrize("size", [1, 15, 16, 4095, 4096, 4097, 8192, 65_536])
def test_records_come_back_as_they_were(encrypt, size):
    codec = codec_of(1, encrypt=encrypt)
    payloads = [payload_of(number, size) for number in range(3)]
    for key, payload, (header, stored) in zip(
        KEYS[:3], payloads, encoded(codec, payloads, KEYS[:3]), strict=True
    ):
        assert read(codec, header, stored, key) == payload
        if size > 8:
            assert (payload in (stored, header)) == (not encrypt)


def test_an_extent_larger_than_the_room_for_ciphertext_is_made_in_parts():
    codec = codec_of(1, encrypt=True)
    payloads = [payload_of(number, 1 << 20) for number in range(9)]
    spans = codec.spans([1 << 20] * 9)
    assert spans == [(0, 4), (4, 8), (8, 9)]
    assert codec.spans([9 << 20] * 2) == [(0, 1), (1, 2)]
    for key, payload, (header, stored) in zip(
        KEYS[:9], payloads, encoded(codec, payloads, KEYS[:9]), strict=True
    ):
        assert read(codec, header, stored, key) == payload


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_keyed_record_is_the_one_of_the_documents(encrypt):
    """Made by hand from docs/integrity.md, byte by byte."""
    payload, nonce = payload_of(1), bytes(range(12))
    key = RecordKey(secret_of(1))
    head = struct.pack(
        "<8sHHI76sI", b"TSRECORD", 0x201 if encrypt else 0x101, len(KEYS[0]), len(payload),
        KEYS[0], RANK,
    )  # fmt: skip
    context = head + key.key_id + nonce
    cipher = AESGCM(key.derive(context))
    if encrypt:
        sealed = cipher.encrypt(nonce, payload, None)
        stored, tag = sealed[:-16], sealed[-16:]
    else:
        stored, tag = payload, cipher.encrypt(nonce, b"", payload)
    assert read(codec_of(1), context + tag, stored) == payload


@pytest.mark.parametrize("encrypt", KINDS)
@given(data=st.data())
def test_a_changed_record_is_never_served(encrypt, data):
    """Any bytes of header and payload, changed, swapped, cut; and what the payload was is gone."""
    codec = codec_of(1, encrypt=encrypt)
    payload = payload_of(data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 40, 5000])))
    ((header, stored),) = encoded(codec, [payload], KEYS[:1])
    whole = bytearray(header + stored)
    position = st.integers(0, len(whole) - 1)
    for start, change in data.draw(
        st.lists(st.tuples(position, st.binary(min_size=1, max_size=140)), min_size=1, max_size=4)
    ):
        part = change[: len(whole) - start]
        whole[start : start + len(part)] = part
    if data.draw(st.booleans(), label="checksums of the plain format"):
        struct.pack_into("<Q", whole, 96, xxh3_64_intdigest(bytes(whole[HEADER_BYTES:])))
        struct.pack_into("<Q", whole, 120, xxh3_64_intdigest(bytes(whole[:120])))
    found = read(codec, bytes(whole[:HEADER_BYTES]), bytes(whole[HEADER_BYTES:]))
    assert isinstance(found, str) or whole == header + stored


@pytest.mark.parametrize("encrypt", KINDS)
@given(offset=st.integers(0, HEADER_BYTES - 1), bit=BITS)
def test_every_bit_of_a_header_counts(encrypt, offset, bit):
    codec = codec_of(1, encrypt=encrypt)
    ((header, stored),) = encoded(codec, [payload_of(1)], KEYS[:1])
    changed = bytearray(header)
    changed[offset] ^= 1 << bit
    assert isinstance(read(codec, bytes(changed), stored), str)


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_record_is_served_for_its_own_key_rank_and_length_only(encrypt):
    codec = codec_of(1, encrypt=encrypt)
    ((header, stored),) = encoded(codec, [payload_of(1)], KEYS[:1])
    assert read(codec, header, stored) == payload_of(1)
    assert read(codec, header, stored, KEYS[1]) == "key"
    assert read(codec, header, stored, KEYS[0][:-1]) == "key"
    assert read(codec, header, stored, rank=RANK + 1) == "rank"
    assert read(codec, header, stored[:-1]) == "payload length"


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_header_renamed_to_another_key_is_not_served(encrypt):
    """The attacker writes the fields that the reader expects; the tag was for others."""
    codec = codec_of(1, encrypt=encrypt)
    (one, other) = encoded(codec, [payload_of(1), payload_of(2)], KEYS[:2])
    renamed = one[0][:16] + KEYS[1].ljust(76, b"\0") + one[0][92:]
    assert read(codec, renamed, one[1], KEYS[1]) == "mac"
    assert read(codec, one[0], other[1]) == "mac"
    assert read(codec, one[0][:96] + other[0][96:], other[1]) == "mac"
    other_rank = one[0][:92] + struct.pack("<I", RANK + 1) + one[0][96:]
    assert read(codec, other_rank, one[1], rank=RANK + 1) == "mac"


@pytest.mark.parametrize("encrypt", KINDS)
def test_an_authenticated_record_does_not_pass_for_an_encrypted_one(encrypt):
    codec = codec_of(1, encrypt=encrypt)
    ((header, stored),) = encoded(codec, [payload_of(1)], KEYS[:1])
    version = struct.pack("<H", 0x101 if encrypt else 0x201)
    assert read(codec, header[:8] + version + header[10:], stored) == "mac"


@pytest.mark.parametrize("encrypt", KINDS)
def test_both_kinds_are_read_whatever_is_written(encrypt):
    ((header, stored),) = encoded(codec_of(1, encrypt=encrypt), [payload_of(1)], KEYS[:1])
    assert read(codec_of(1, encrypt=not encrypt), header, stored) == payload_of(1)


def test_records_without_and_with_a_key_are_misses_for_each_other():
    ((header, stored),) = encoded(PlainCodec(), [payload_of(1)], KEYS[:1])
    assert read(PlainCodec(), header, stored) == payload_of(1)
    assert read(codec_of(1), header, stored) == "no mac"
    for encrypt in KINDS:
        ((header, stored),) = encoded(codec_of(1, encrypt=encrypt), [payload_of(1)], KEYS[:1])
        assert read(PlainCodec(), header, stored) == "written with a key"


@pytest.mark.parametrize("encrypt", KINDS)
def test_all_keys_verify_and_the_first_one_writes(encrypt):
    ((header, stored),) = encoded(codec_of(1, encrypt=encrypt), [payload_of(1)], KEYS[:1])
    assert read(codec_of(2, 1, encrypt=encrypt), header, stored) == payload_of(1)
    assert read(codec_of(2, encrypt=encrypt), header, stored) == "unknown key"
    ((header, stored),) = encoded(codec_of(2, 1, encrypt=encrypt), [payload_of(1)], KEYS[:1])
    assert read(codec_of(2, encrypt=encrypt), header, stored) == payload_of(1)
    assert read(codec_of(1, encrypt=encrypt), header, stored) == "unknown key"


@pytest.mark.parametrize("encrypt", KINDS)
def test_what_was_given_back_is_absent(encrypt):
    codec = codec_of(1, encrypt=encrypt)
    ((header, stored),) = encoded(codec, [payload_of(1)], KEYS[:1])
    for header_now, stored_now in [
        (bytes(HEADER_BYTES), stored),
        (header, bytes(len(stored))),
    ]:
        mismatch = codec.explain(header_now, memoryview(bytearray(stored_now)), KEYS[0], rank=RANK)
        assert mismatch.reason is FailureReason.ABSENT


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_payload_of_zeros_is_one(encrypt):
    codec = codec_of(1, encrypt=encrypt)
    ((header, stored),) = encoded(codec, [bytes(5000)], KEYS[:1])
    assert read(codec, header, stored) == bytes(5000)


@pytest.mark.parametrize("encrypt", KINDS)
def test_nothing_of_a_record_repeats(encrypt):
    """The same chunk twice, by codecs of two processes: another nonce, another tag."""
    made = [encoded(codec_of(1, encrypt=encrypt), [payload_of(1)], KEYS[:1])[0] for _ in range(64)]
    assert len({header[100:112] for header, _ in made}) == 64
    assert len({header[112:] for header, _ in made}) == 64
    assert len({stored for _, stored in made}) == (64 if encrypt else 1)


def test_the_tail_of_an_encrypted_slot_is_not_written():
    """Behind the payload, a slot may hold what an earlier chunk left there."""
    codec = codec_of(1, encrypt=True)
    slot = slot_of(payload_of(1, 8192))
    part = codec.encode(KEYS[:1], [slot], np.array([5000], np.uint32), rank=RANK)
    assert bytes(slot[5000:5100]) not in bytes(part.slots[0])
