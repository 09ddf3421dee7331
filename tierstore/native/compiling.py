"""Compiles `extent_io.c`: run by the build of the package, or by hand in a source tree.

    python tierstore/native/compiling.py [TARGET]

Needs nothing but the standard library: the package is not installed yet when it is built.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LIBRARY", "compile_library", "source_mark"]

_ROOM = Path(__file__).resolve().parent
_SOURCE = _ROOM / "extent_io.c"
LIBRARY = _ROOM / "libextent_io.so"
"""Where the library lies in a source tree and in an installed package."""

_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra")


def source_mark() -> int:
    """Return a number of 64 bits that no other version of the source has.

    A library tells the one that it was compiled from: in a source tree it may be older than the
    code that calls it.

    Raises:
        OSError: the source is not there.
    """
    return int.from_bytes(hashlib.sha256(_SOURCE.read_bytes()).digest()[:8], "little")


def compile_library(target: Path = LIBRARY, *, more_flags: Sequence[str] = ()) -> str:
    """Compile the library to `target`, by `$CC` or `cc`; return why not, empty if it was.

    A library that processes have loaded is replaced, not overwritten.
    """
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    compiler = next(filter(shutil.which, [words[0], "cc", "gcc", "clang"]), None) if words else None
    if compiler is None:
        return "there is no C compiler"
    mark = f"-DTIERSTORE_SOURCE_MARK={source_mark()}ull"
    flags = [*(words[1:] if compiler == words[0] else ()), *_FLAGS, mark, *more_flags]
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    command = [compiler, *flags, str(_SOURCE), "-o", str(scratch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            return f"{compiler} failed: {done.stderr.strip()}"
        scratch.replace(target)
    except OSError as error:
        return f"{compiler} cannot be run: {error}"
    finally:
        scratch.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    sys.exit(compile_library(*map(Path, sys.argv[1:2])) or None)
