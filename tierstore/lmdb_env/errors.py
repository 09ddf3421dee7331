"""Translation of the errors of LMDB, and of the system below it, into those of tierstore."""

import re
from collections.abc import Mapping
from pathlib import Path

from tierstore.device.remedies import FULL, explain, remedy_in
from tierstore.errors import (
    BackendCorruptError,
    BackendError,
    BackendFullError,
    BackendMapFullError,
    TierStoreError,
)
from tierstore.quoting import escaped

__all__ = ["ERRORS", "translate", "translate_memory", "translate_os"]

_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+:? ?")

ERRORS: Mapping[str, type[TierStoreError]] = {
    "BadChecksumError": BackendCorruptError,
    "BadDbiError": BackendError,
    "BadRslotError": BackendError,
    "BadTxnError": BackendError,
    "BadValsizeError": BackendError,
    "CorruptedError": BackendCorruptError,
    "CryptoFailError": BackendError,
    "CursorFullError": BackendError,
    "DbsFullError": BackendError,
    "DiskError": BackendFullError,
    "EnvEncryptionError": BackendError,
    "Error": BackendError,
    "IncompatibleError": BackendCorruptError,
    "InvalidError": BackendCorruptError,
    "InvalidParameterError": BackendError,
    "KeyExistsError": BackendError,
    "LockError": BackendError,
    "MapFullError": BackendMapFullError,
    "MapResizedError": BackendError,
    "MemoryError": BackendError,
    "NotFoundError": BackendCorruptError,
    "PageFullError": BackendCorruptError,
    "PageNotFoundError": BackendCorruptError,
    "PanicError": BackendCorruptError,
    "ProblemError": BackendError,
    "ReadersFullError": BackendError,
    "ReadonlyError": BackendError,
    "TlsFullError": BackendError,
    "TxnFullError": BackendMapFullError,
    "VersionMismatchError": BackendCorruptError,
}
"""What each exception class of the library becomes, by name (older versions lack some)."""

_REMEDIES: Mapping[type[TierStoreError], str] = {
    BackendFullError: "free space on the device",
    BackendMapFullError: "raise the tier's capacity",
    BackendCorruptError: "remove the directory of the tier; it is rebuilt from nothing",
    BackendError: "check the permissions and the health of the device",
}


def translate(error: Exception, directory: Path) -> TierStoreError:
    """Translate an error of the library."""
    kind = ERRORS.get(type(error).__name__, BackendError)
    # Its path is that of a descriptor, which says nothing.
    words = _DESCRIPTOR.sub("", str(error))
    remedy = _REMEDIES[kind] if kind is not BackendError else remedy_in(words)
    return kind(f"{directory}: {words}; {remedy or _REMEDIES[BackendError]}")


def translate_os(error: OSError, directory: Path) -> BackendError:
    """Translate an error of the system."""
    kind = BackendFullError if error.errno in FULL else BackendError
    return kind(explain(directory, error))


def translate_memory(error: MemoryError, directory: Path) -> BackendError:
    """Translate a lack of memory, which may pass."""
    return BackendError(
        f"{directory}: the system has no memory left ({escaped(error) or 'MemoryError'}); lower "
        "primary.capacity, or raise what limits the process (ulimit -v, the container)"
    )
