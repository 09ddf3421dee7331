"""Somebody writes below a tier's path who knows the format: with a key, all he gets is misses."""

import logging
import struct
import subprocess
import sys

import pytest
from forging import key_of, plain_header, records_below, rewrite, with_checksum
from keyed import KINDS, key_file, secret_of
from python_paths import environment
from store_kit import Chunks, config_of, misses
from xxhash import xxh3_64_intdigest

from tierstore import TierStore
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.geometry import SpaceGeometry

NUMBERS = range(24)
SIZES = [65_536, 9_000]
BACKENDS = ["file", "lmdb"]


class Tier:
    """A tier with keyed records, and what an attacker does to it while nobody has it open."""

    def __init__(self, folder, backend="file", chunk_bytes=65_536, **tier):
        self.folder = folder
        self.backend = backend
        self.chunks = Chunks(chunk_bytes)
        self.tier = tier
        self.path = folder / "tier"

    def config(self, *numbers, encrypt=False):
        """Return a configuration with a file of numbered keys; without any if there are none."""
        tier = dict(self.tier)
        if numbers:
            tier["integrity"] = {
                "key_file": key_file(self.folder / "records.key", *numbers),
                "encrypt": encrypt,
            }
        return config_of(self.path, backend=self.backend, **tier)

    def open(self, *numbers, **options):
        return self.chunks.open(self.config(*numbers, **options))

    def store(self, *numbers, **options):
        with self.open(*numbers, **options) as store:
            assert self.chunks.put(store, NUMBERS) == len(NUMBERS)
            store.flush()

    def found(self, *numbers, **options):
        """Return what is served, with all bytes compared, and the misses by reason."""
        with self.open(*numbers, **options) as store:
            found = self.chunks.found(store, NUMBERS)
            assert store.check() == []
            return found, misses(store)

    @property
    def map_bytes(self):
        (tier,) = load_config(self.config()).secondary
        return SpaceGeometry.of(tier, self.chunks.manifest, 1).payload_map_bytes

    def rewrite(self, change):
        return rewrite(self.path / "rank0", change, map_bytes=self.map_bytes)

    def records(self):
        return records_below(self.path / "rank0", map_bytes=self.map_bytes)


@pytest.fixture(params=[(b, s) for b in BACKENDS for s in SIZES], ids=str)
def tier(request, tmp_path):
    return Tier(tmp_path, *request.param)


def evil(payload):
    """Return other bytes of the same length."""
    return bytes(byte ^ 0x5A for byte in payload)


def forge_plainly(header, payload):
    return plain_header(header, evil(payload)), evil(payload)


def forge_payload(header, payload):
    return header, evil(payload)


def forge_one_byte(header, payload):
    return header, payload[:-1] + bytes([payload[-1] ^ 1])


def forge_checksums(header, payload):
    """Put sums of the plain format where a careless reader would look for them."""
    made = bytearray(header)
    struct.pack_into("<Q", made, 96, xxh3_64_intdigest(evil(payload)))
    return with_checksum(made), evil(payload)


def forge_version(header, payload):
    version = struct.unpack_from("<H", header, 8)[0] ^ 0x300
    return header[:8] + struct.pack("<H", version) + header[10:], payload


def forge_tag(header, payload):
    return header[:112] + bytes(16), payload


FORGERIES = [
    forge_plainly,
    forge_payload,
    forge_one_byte,
    forge_checksums,
    forge_version,
    forge_tag,
]


def test_without_a_key_a_forged_record_is_served(tier):
    """The limit of checksums, which the documents name."""
    tier.store()
    assert tier.rewrite(forge_plainly) == len(NUMBERS)
    with pytest.raises(AssertionError, match="wrong bytes"):
        tier.found()


@pytest.mark.parametrize("encrypt", KINDS)
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_forged_records_are_counted_misses_and_are_removed(tier, forge, encrypt):
    tier.store(1, encrypt=encrypt)
    assert tier.found(1, encrypt=encrypt) == (list(NUMBERS), {})
    victims = {bytes(key) for key in tier.chunks.keys(range(0, len(NUMBERS), 3))}

    def change(header, payload):
        return forge(header, payload) if key_of(header) in victims else None

    assert tier.rewrite(change) == len(victims)
    rest = [number for number in NUMBERS if number % 3]
    assert tier.found(1, encrypt=encrypt) == (rest, {"corrupt": len(victims)})
    tier.store(1, encrypt=encrypt)
    assert tier.found(1, encrypt=encrypt) == (list(NUMBERS), {})


@pytest.mark.parametrize("encrypt", KINDS)
def test_records_that_changed_places_are_misses(tier, encrypt):
    """Every record lies where its neighbour lay; once as it was, once under the other's name."""
    tier.store(1, encrypt=encrypt)
    for rename in (False, True):
        records = iter([*tier.records()[1:], tier.records()[0]])

        def swap(header, payload, records=records, rename=rename):
            other_header, other_payload = next(records)
            if rename:
                other_header = header[:96] + other_header[96:]
            return other_header, other_payload

        assert tier.rewrite(swap) == len(NUMBERS)
        assert tier.found(1, encrypt=encrypt) == ([], {"corrupt": len(NUMBERS)})
        tier.store(1, encrypt=encrypt)


@pytest.mark.parametrize("encrypt", KINDS)
def test_an_older_record_of_the_same_key_is_served(tmp_path, encrypt):
    """A key names the same bytes for ever: what was stored before is what is asked for."""
    tier = Tier(tmp_path)
    tier.store(1, encrypt=encrypt)
    older = {key_of(header): (header, payload) for header, payload in tier.records()}
    with tier.open(1, encrypt=encrypt) as store:
        store.reset()
    tier.store(1, encrypt=encrypt)
    assert tier.rewrite(lambda header, payload: older[key_of(header)]) == len(NUMBERS)
    assert tier.found(1, encrypt=encrypt) == (list(NUMBERS), {})


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_key_that_is_set_later_or_taken_away_costs_the_records(tier, encrypt, caplog):
    tier.store()
    assert tier.found(1, encrypt=encrypt) == ([], {"corrupt": len(NUMBERS)})
    assert causes(caplog) == ["no mac"]
    tier.store(1, encrypt=encrypt)
    assert tier.found(1, encrypt=encrypt) == (list(NUMBERS), {})
    caplog.clear()
    assert tier.found() == ([], {"corrupt": len(NUMBERS)})
    assert causes(caplog) == ["written with a key"]


@pytest.mark.parametrize("encrypt", KINDS)
def test_a_key_is_changed_without_losing_a_record(tier, encrypt, caplog):
    tier.store(1, encrypt=encrypt)
    assert tier.found(1, 2, encrypt=encrypt) == (list(NUMBERS), {})
    assert tier.found(2, 1, encrypt=encrypt) == (list(NUMBERS), {})
    with tier.open(2, 1, encrypt=encrypt) as store:
        assert tier.chunks.put(store, range(100, 110)) == 10
    with tier.open(2, encrypt=encrypt) as store:
        assert tier.chunks.found(store, range(100, 110)) == list(range(100, 110))
        assert tier.chunks.found(store, NUMBERS) == []
        assert misses(store) == {"corrupt": len(NUMBERS)}
    assert causes(caplog) == ["unknown key"]


def test_running_stores_share_a_path_while_their_key_is_changed(tmp_path):
    """One has been restarted with the new key in front, the other one not yet."""
    stores = [Tier(tmp_path / name) for name in ("old", "new")]
    for tier in stores:
        tier.folder.mkdir()
        tier.path = tmp_path / "tier"
    old, new = stores
    with old.open(1, 2) as first, new.open(2, 1, encrypt=True) as second:
        assert old.chunks.put(first, range(10)) == 10
        assert new.chunks.put(second, range(10, 20)) == 10
        first.flush()
        second.flush()
        assert new.chunks.found(second, range(20)) == list(range(20))
        assert old.chunks.found(first, range(20)) == list(range(20))
        assert misses(first) == misses(second) == {}


def test_encryption_is_turned_on_and_off_without_losing_a_record(tier):
    tier.store(1)
    assert tier.found(1, encrypt=True) == (list(NUMBERS), {})
    with tier.open(1, encrypt=True) as store:
        assert tier.chunks.put(store, range(100, 110)) == 10
    with tier.open(1) as store:
        assert tier.chunks.found(store, range(100, 110)) == list(range(100, 110))


@pytest.mark.parametrize("encrypt", KINDS)
def test_only_an_encrypted_tier_has_no_payload_on_its_disk(tier, encrypt):
    """Not even in what lies behind a payload, where a slot may hold what was in it before."""
    with tier.open(1, encrypt=encrypt) as store:
        for start in range(0, 400, 40):
            assert tier.chunks.put(store, range(start, start + 40)) == 40
    files = [path.read_bytes() for path in tier.path.rglob("*") if path.is_file()]
    pieces = [
        row[at : at + 64].tobytes()
        for row in tier.chunks.array(range(5, 400, 40))
        for at in (0, 5000, tier.chunks.chunk_bytes - 128)
    ]
    on_disk = sum(piece in content for piece in pieces for content in files)
    assert on_disk == (0 if encrypt else len(pieces))


@pytest.mark.parametrize("encrypt", KINDS)
@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_records_forged_under_a_running_store_are_not_served(tmp_path, mode, encrypt):
    """Header pages are held in memory, from a time when they were right."""
    tier = Tier(tmp_path, io={"mode": mode}, primary="1MiB")
    tier.store(1, encrypt=encrypt)
    with tier.open(1, encrypt=encrypt) as store:
        for number in reversed(NUMBERS):  # from within its extent each
            assert tier.chunks.found(store, [number]) == [number]
        assert tier.rewrite(forge_payload) == len(NUMBERS)
        in_memory = set(tier.chunks.found(store, NUMBERS))
        assert len(in_memory) <= 16
        assert set(misses(store)) == {"corrupt"}
        assert tier.chunks.put(store, NUMBERS) == len(NUMBERS)
        store.flush()
        assert store.check() == []
    assert tier.found(1, encrypt=encrypt)[0] != []


def test_no_key_is_in_what_a_store_says(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    tier = Tier(tmp_path)
    tier.store(1)
    tier.rewrite(forge_payload)
    tier.found(1)
    config = load_config(tier.config(1))
    said = caplog.text + repr(config) + repr(vars(type(config.secondary[0].integrity)))
    assert secret_of(1).hex() not in said
    assert repr(secret_of(1))[2:-1] not in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_file_that_cannot_be_used_is_refused_before_anything_is_made(tmp_path, backend):
    tier = Tier(tmp_path, backend)
    config = tier.config(1)
    (tmp_path / "records.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"'disk': integrity\.key_file: .*chmod 600"):
        tier.chunks.open(config)
    assert not tier.path.exists()


def test_chunks_that_are_too_large_for_a_cipher_are_refused(tmp_path):
    tier = Tier(tmp_path)
    tier.chunks = Chunks.__new__(Chunks)
    from tierstore import Manifest

    manifest = Manifest.simple("large", chunk_bytes=(1 << 31) - 1)
    config = config_of(
        tier.path,
        primary="4GiB",
        capacity="64GiB",
        integrity={"key_file": key_file(tmp_path / "records.key", 1)},
    )
    with pytest.raises(ConfigError, match="blocks_per_chunk"):
        TierStore.open(config, manifest)


def test_without_the_library_the_extra_is_named(tmp_path):
    config = Tier(tmp_path).config(1)
    code = f"""
import sys
sys.modules["cryptography"] = None  # an import finds nothing
from tierstore import Manifest, TierStore
from tierstore.errors import MissingExtraError
plain = {config!r}
try:
    TierStore.open(plain, Manifest.simple("m", 65536))
except MissingExtraError as error:
    print(error)
del plain["secondary"][0]["integrity"]
TierStore.open(plain, Manifest.simple("m", 65536)).close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert "tierstore[integrity]" in done.stdout


def causes(caplog):
    """Return the causes of failed reads that were logged, each of them once per store."""
    return [
        record.args[2]
        for record in caplog.records
        if record.msg.startswith("%s failed") and record.args[0] == "read"
    ]
