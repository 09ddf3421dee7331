"""A file backend on small segments, opened."""

from tierstore.backend.file import FileBackend
from tierstore.testing.backend_conformance import SEGMENT_BYTES

MODES = ["direct", "buffered", "mmap"]


def opened(directory, *, mode="direct", **options):
    backend = FileBackend(directory, rank=0, segment_bytes=SEGMENT_BYTES, mode=mode, **options)
    backend.open()
    return backend
