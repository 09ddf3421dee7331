"""Fills a small file system, and writes to pages that were given back before; on both paths."""

import sys
from pathlib import Path

from native_library import interpreted, native

from tierstore.backend.segments.backend import FileBackend
from tierstore.testing.extents import Extent, write_extent
from tierstore.transfer import FailureReason

root = Path(sys.argv[1])
for library in (native, interpreted):
    backend = FileBackend(root / library.__name__, rank=0, mode="buffered", library=library)
    backend.open()
    assert backend.is_native == (library is native)
    kept, freed = Extent(4, 9000), Extent(4, 9000, page=64)
    write_extent(backend, kept, freed)
    assert backend.release([freed.run], []) is None
    filler = root / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    failed = backend.write([*kept.to_write(), *freed.to_write()])
    assert failed == dict.fromkeys(range(4, 8), FailureReason.FULL), failed
    assert kept.served(backend) == [None] * 4
    filler.unlink()
    write_extent(backend, freed)
    assert freed.served(backend) == [None] * 4
    backend.close()
    print(library.__name__, "full")
