"""A file backend on small segments, opened."""

from tierstore.backend.segments.backend import FileBackend

MODES = ["direct", "buffered", "mmap"]


def opened(directory, *, mode="direct", **options):
    backend = FileBackend(directory, rank=0, mode=mode, **options)
    backend.open()
    return backend
