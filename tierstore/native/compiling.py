"""Compiles `extent_io.c`: run by the build of the package, or by hand in a source tree.

    python tierstore/native/compiling.py [TARGET]

Needs nothing but the standard library: the package is not installed yet when it is built.
"""

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LIBRARY", "SECONDS_MAX", "compile_library", "is_sealed", "source_mark"]

_ROOM = Path(__file__).resolve().parent
_SOURCE = _ROOM / "extent_io.c"
LIBRARY = _ROOM / "libextent_io.so"
"""Where the library lies in a source tree and in an installed package."""

SECONDS_MAX = 600.0
"""How long a compiler may take; it needs a second."""

_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra")
_MAGIC = b"\x7fELF"
_DIGEST_BYTES = 32


def source_mark() -> int:
    """Return a number of 64 bits that no other version of the source has.

    A library tells the one that it was compiled from: in a source tree it may be older than the
    code that calls it.

    Raises:
        OSError: the source is not there.
    """
    return int.from_bytes(hashlib.sha256(_SOURCE.read_bytes()).digest()[:8], "little")


def compile_library(
    target: Path = LIBRARY, *, more_flags: Sequence[str] = (), seconds_max: float = SECONDS_MAX
) -> str:
    """Compile the library to `target`, by `$CC` or `cc`; return why not, empty if it was.

    A library that processes have loaded is replaced, not overwritten. Otherwise what was there
    stays. A compiler that takes longer than `seconds_max` is ended.
    """
    try:
        words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    except ValueError as error:
        return f"CC cannot be read: {error}"
    compiler = next(filter(shutil.which, [words[0], "cc", "gcc", "clang"]), None) if words else None
    if compiler is None:
        return "there is no C compiler"
    try:
        mark = f"-DTIERSTORE_SOURCE_MARK={source_mark()}ull"
        flags = [*(words[1:] if compiler == words[0] else ()), *_FLAGS, mark, *more_flags]
        with tempfile.TemporaryDirectory(
            prefix=f"{target.stem}.", suffix=target.suffix, dir=target.parent
        ) as folder:
            scratch = Path(folder, target.name)
            command = [compiler, *flags, str(_SOURCE), "-o", str(scratch)]
            why = _run(command, seconds_max) or _seal(scratch)
            if why:
                return f"{compiler} {why}"
            scratch.replace(target)
    except OSError as error:
        return f"{compiler} cannot be run, or a file not read or written: {error}"
    return ""


def is_sealed(path: Path) -> bool:
    """Return whether a file is a library as it was compiled, to the last byte.

    Where pages of it are missing, the loader maps it all the same, and the process ends.

    Raises:
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    return content.startswith(_MAGIC) and content.endswith(_digest(content[:-_DIGEST_BYTES]))


def _run(command: Sequence[str], seconds_max: float) -> str:
    """Run a compiler; return why it made nothing."""
    # A file takes what it says: a pipe would be held open by what it may have started.
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(  # noqa: S603  the command is the caller's of the build
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            return f"comes to no end within {seconds_max} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        words.seek(0)
        said = words.read().decode(errors="replace").strip()
    return f"failed: {said or code}" if code else ""


def _seal(library: Path) -> str:
    """Put the digest of a library behind it, where no loader looks; return why not."""
    content = library.read_bytes() if library.is_file() else b""
    if not content.startswith(_MAGIC):
        return "made no library"
    with library.open("ab") as file:
        file.write(_digest(content))
        file.flush()
        os.fsync(file.fileno())
    return ""


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


if __name__ == "__main__":
    sys.exit(compile_library(*map(Path, sys.argv[1:2])) or None)
