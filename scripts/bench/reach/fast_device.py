"""The stand-in for a fast NVMe drive (`fast_device.c`): compiled, preloaded, switched on."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LIBRARY_NAME", "FastDevice", "compile_into", "preloading"]

LIBRARY_NAME = "fast_device.so"
_SOURCE = Path(__file__).resolve().parents[1] / "fast_device.c"


class FastDevice:
    """The stand-in, in a process that it was preloaded into."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if self.is_loaded:
            self._library.fast_device_gbps.restype = ctypes.c_double
            self._library.fast_device_set_gbps.argtypes = [ctypes.c_double]
            self._library.fast_device_set_gbps.restype = None
            self._library.fast_device_bytes.restype = ctypes.c_int64

    @property
    def is_loaded(self) -> bool:
        """Return whether this process has it."""
        return hasattr(self._library, "fast_device_gbps")

    @property
    def is_on(self) -> bool:
        """Return whether payload only takes time, so that its bytes never arrive."""
        return self.is_loaded and bool(self._library.fast_device_gbps() > 0)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that it took time for."""
        return int(self._library.fast_device_bytes())

    @contextmanager
    def switched_on(self, gigabytes_per_second: float) -> Iterator[None]:
        """Let direct transfers of payload take its time, in the whole process."""
        self._library.fast_device_set_gbps(gigabytes_per_second)
        try:
            yield
        finally:
            self._library.fast_device_set_gbps(0.0)


def compile_into(folder: Path) -> Path | None:
    """Compile the library into a folder; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / LIBRARY_NAME
    subprocess.run(
        [compiler, "-O2", "-Wall", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)],
        check=True,
    )
    return library


def preloading(library: Path) -> dict[str, str]:
    """Return the environment of a process that has it, switched off."""
    environment = {name: value for name, value in os.environ.items() if name != "DMA_GBPS"}
    others = environment.get("LD_PRELOAD", "")
    return environment | {"LD_PRELOAD": f"{library} {others}".strip()}
