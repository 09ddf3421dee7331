from tierstore.backend.file import FileBackend
from tierstore.backend.lmdb import LmdbBackend
from tierstore.testing.backend_conformance import SEGMENT_BYTES, BackendConformance


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
        return FileBackend(directory, rank=rank, segment_bytes=SEGMENT_BYTES, mode=self.mode)

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
        replace_in_files(directory, original, damaged)
