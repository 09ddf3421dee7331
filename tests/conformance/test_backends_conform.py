from forging import key_of, rewrite
from keyed import codec_of
from native_library import interpreted, native

from tierstore.backend.lmdb.backend import LmdbBackend
from tierstore.backend.segments.backend import FileBackend
from tierstore.codec.plain import PlainCodec
from tierstore.codec.record import HEADER_BYTES
from tierstore.testing.backend_conformance import BackendConformance

MAP_BYTES = 16 << 20


class RecordConformance(BackendConformance):
    """What lies on the disk is found and damaged as a record, whatever its codec made of it."""

    codec = None
    rank = 0

    def overwrite(self, directory, original, damaged):
        codec = self.codec or PlainCodec()

        def damage(header, stored):
            if len(original) == HEADER_BYTES and header == original:
                return damaged, stored
            payload = memoryview(bytearray(stored))
            fault = codec.explain(header, payload, key_of(header), rank=self.rank)
            if fault is not None or payload != original:
                return None
            # Ciphers such as this one carry a flipped bit over to the payload.
            bits = zip(stored, original, damaged, strict=True)
            return header, bytes(byte ^ old ^ new for byte, old, new in bits)

        hits = rewrite(directory, damage, map_bytes=MAP_BYTES)
        assert hits == 1, f"the bytes lie in {hits} places"


class FileConformance(RecordConformance):
    """Moved by the interpreter, unless a class says otherwise."""

    mode = "direct"
    library = staticmethod(interpreted)

    def make(self, directory, rank):
        return FileBackend(
            directory, rank=rank, mode=self.mode, codec=self.codec, library=self.library
        )


class TestDirectFiles(FileConformance):
    pass


class TestBufferedFiles(FileConformance):
    mode = "buffered"


class TestNativeDirectFiles(FileConformance):
    library = staticmethod(native)


class TestNativeBufferedFiles(TestNativeDirectFiles):
    mode = "buffered"


class TestMappedFiles(FileConformance):
    mode = "mmap"


class TestAuthenticatedFiles(FileConformance):
    codec = codec_of(1)


class TestEncryptedFiles(FileConformance):
    codec = codec_of(1, encrypt=True)


class TestEncryptedBufferedFiles(TestEncryptedFiles):
    mode = "buffered"


class TestEncryptedMappedFiles(TestEncryptedFiles):
    mode = "mmap"


class TestLmdb(RecordConformance):
    header_pages = 0

    def make(self, directory, rank):
        return LmdbBackend(directory, rank=rank, map_bytes=MAP_BYTES, codec=self.codec)


class TestAuthenticatedLmdb(TestLmdb):
    codec = codec_of(1)


class TestEncryptedLmdb(TestLmdb):
    codec = codec_of(1, encrypt=True)
