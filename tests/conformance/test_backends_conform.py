from tierstore.backend.file import FileBackend
from tierstore.backend.lmdb import LmdbBackend
from tierstore.geometry import lmdb_body_bytes
from tierstore.lmdb_env import LmdbEnv
from tierstore.record import HEADER_BYTES, payload_checksum
from tierstore.testing.backend_conformance import BackendConformance


def replace_in_files(directory, original, damaged):
    hits = 0
    for path in directory.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            hits += content.count(original)
            if original in content:
                with path.open("r+b") as file:
                    file.seek(content.index(original))
                    file.write(damaged)
    assert hits == 1, f"the bytes lie in {hits} places"


class FileConformance(BackendConformance):
    mode = "direct"

    def make(self, directory, rank):
        return FileBackend(directory, rank=rank, mode=self.mode)

    def overwrite(self, directory, original, damaged):
        replace_in_files(directory, original, damaged)


class TestDirectFiles(FileConformance):
    pass


class TestBufferedFiles(FileConformance):
    mode = "buffered"


class TestMappedFiles(FileConformance):
    mode = "mmap"


class TestLmdb(BackendConformance):
    header_pages = 0

    def make(self, directory, rank):
        return LmdbBackend(directory, rank=rank, map_bytes=16 << 20)

    def overwrite(self, directory, original, damaged):
        checksum = payload_checksum(original).to_bytes(8, "little")
        cut = lmdb_body_bytes(len(original))
        hits = 0
        env = LmdbEnv.open(directory, map_bytes=16 << 20)
        with env.write() as txn, txn.cursor() as cursor:
            for key, value in list(cursor):
                header, tail = value[:HEADER_BYTES], value[HEADER_BYTES:]
                if header == original:
                    txn.put(key, damaged + tail)
                elif checksum in header:
                    txn.put(key, header + damaged[cut:])
                    txn.put(key[:-1], damaged[:cut])
                else:
                    continue
                hits += 1
        env.close()
        assert hits == 1, f"the bytes lie in {hits} places"
