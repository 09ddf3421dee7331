"""Why a tier cannot be opened: does its device fail, or has the user to mend something?

its device fails      an error of the system that comes and goes (EIO, ENOSPC, EROFS, a vanished
                      path, ...), an error of the library below, another process or thread that
                      is stuck: the tier is out of use and tried again until it opens
the user has to mend  a wrong configuration, another manifest, a catalog of another version or
                      damaged for good, no permission, something in the way that is no
                      directory: an error when the tiers are opened
"""

import errno

from tierstore.errors import (
    BackendBusyError,
    BackendCorruptError,
    BackendForeignError,
    CatalogDamagedError,
    ConfigError,
    TierStoreError,
)

__all__ = ["may_pass"]

_TO_BE_MENDED = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,
    errno.EPERM,
}


def may_pass(error: TierStoreError) -> bool:
    """Return whether what kept a tier from being opened is its device's, and may pass by itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BackendBusyError):
            return True
        if isinstance(
            cause, BackendCorruptError | BackendForeignError | CatalogDamagedError | ConfigError
        ):
            return False
        if isinstance(cause, OSError):
            return cause.errno not in _TO_BE_MENDED
        if not isinstance(cause, TierStoreError):
            return True  # of the library below
        cause = cause.__cause__
    return False  # what we say ourselves is said to the user
