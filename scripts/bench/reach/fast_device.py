"""The stand-in for a fast NVMe drive (`fast_device.c`): compiled, preloaded, switched on."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["FastDevice", "compile_into", "restart_with_fast_device"]

_PRELOADED = "/proc/self/fd/"
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
    library = folder / "fast_device.so"
    subprocess.run(
        [compiler, "-O2", "-Wall", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)],
        check=True,
    )
    return library


def restart_with_fast_device() -> None:
    """Start this script anew with the stand-in preloaded, switched off.

    Returns in the process that was started anew, whether or not it could be loaded, and where there
    is no C compiler.
    """
    others = os.environ.get("LD_PRELOAD", "").split()
    if FastDevice().is_loaded or any(name.startswith(_PRELOADED) for name in others):
        # Processes that this one starts do not have the descriptor.
        os.environ["LD_PRELOAD"] = " ".join(
            name for name in others if not name.startswith(_PRELOADED)
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        library = compile_into(Path(folder))
        if library is None:
            return
        # A descriptor keeps the library for the loader when the folder has gone: the process is
        # replaced, so that nobody would remove it, and a parent that waited could be killed alone.
        descriptor = os.open(library, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    environment = {name: value for name, value in os.environ.items() if name != "DMA_GBPS"}
    environment["LD_PRELOAD"] = " ".join([f"{_PRELOADED}{descriptor}", *others])
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606 - no shell
