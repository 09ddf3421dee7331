"""Why a tier cannot be opened: does its device fail, or does the user have to change something?

the device fails      an error of the system that comes and goes (EIO, ENOSPC, EROFS, a vanished
                      path, ...), an error of the library below, another process or thread that
                      is stuck: the tier is out of use, and tried again until it opens
the user has to act   a wrong configuration, another manifest, a catalog of another version or
                      damaged beyond repair, no permission, something else than a directory in
                      the way: an error when the tiers are opened
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

_FOR_THE_USER = {
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
    """Return whether an error of opening a tier is its device's, and may pass by itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BackendBusyError):
            return True
        if isinstance(
            cause, BackendCorruptError | BackendForeignError | CatalogDamagedError | ConfigError
        ):
            return False
        if isinstance(cause, OSError):
            return cause.errno not in _FOR_THE_USER
        if not isinstance(cause, TierStoreError):
            return True  # of the library below
        cause = cause.__cause__
    return False  # errors without a cause are our own findings, for the user
