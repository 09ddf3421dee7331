"""Errors that tierstore raises on purpose.

    TierStoreError
    +-- ConfigError      the YAML file or mapping is wrong; names the key, the value and the remedy
    +-- ManifestError    a path or a peer holds other bytes than ours (different identity)
    +-- LayoutError      the engine's KV caches cannot be described or addressed
    +-- BackendError     a disk or a file system failed
    |   +-- BackendFullError   no space left although it was reserved (ENOSPC, quota)
    |   |   +-- BackendMapFullError   the database, not the device, is as large as it may be
    |   +-- BackendCorruptError   a database file is damaged, or of another format
    |   +-- BackendForeignError   what lies below a tier's path belongs to another program
    |   +-- BackendBusyError   another process or thread keeps a database for too long; names it
    +-- DeviceError      the GPU or its driver refused a call
    |   +-- DeviceBusyError   only for now: a CUDA graph is being captured; try again later
    +-- CatalogError     the directory of a secondary tier cannot be opened or written
    |   +-- CatalogDamagedError   its rows contradict each other; it is emptied when next opened
    +-- ClosedError      the object was used after `close`
    +-- ReentryError     a store was called from within a call of the same thread
    +-- PromptError      a line of prompts for a warm-up is wrong; names the line and the remedy
    +-- MissingExtraError      an optional library is not installed; names the extra

Expected refusals (cache full, key absent, queue full) are values, never exceptions.
"""

__all__ = [
    "BackendBusyError",
    "BackendCorruptError",
    "BackendError",
    "BackendForeignError",
    "BackendFullError",
    "BackendMapFullError",
    "CatalogDamagedError",
    "CatalogError",
    "ClosedError",
    "ConfigError",
    "DeviceBusyError",
    "DeviceError",
    "LayoutError",
    "ManifestError",
    "MissingExtraError",
    "PromptError",
    "ReentryError",
    "TierStoreError",
]


class TierStoreError(Exception):
    """Base of every error that tierstore raises on purpose."""


class ConfigError(TierStoreError):
    """The configuration is wrong; the message names the key, the value and the remedy."""


class ManifestError(TierStoreError):
    """Bytes of another identity: model, layout, hash seed, or format differ."""


class LayoutError(TierStoreError):
    """The engine's KV caches cannot be described or addressed."""


class BackendError(TierStoreError):
    """A disk or a file system failed."""


class BackendFullError(BackendError):
    """No space left on the device although the bytes were reserved."""


class BackendMapFullError(BackendFullError):
    """A database is as large as it may be: less in it would help, space on the device would not."""


class BackendCorruptError(BackendError):
    """A database file is damaged, or of another format."""


class BackendForeignError(BackendError):
    """What lies below a tier's path belongs to another program; a user has to move it away."""


class BackendBusyError(BackendError):
    """Another process or thread keeps a database for too long; the message names it."""


class DeviceError(TierStoreError):
    """The GPU or its driver refused a call."""


class DeviceBusyError(DeviceError):
    """The driver refused a call only for now: a CUDA graph is being captured."""


class CatalogError(TierStoreError):
    """The directory of a secondary tier cannot be opened, read or written."""


class CatalogDamagedError(CatalogError):
    """The rows of a catalog contradict each other, or have impossible lengths."""

    def __init__(self, what: str) -> None:
        """`what` names the contradiction."""
        super().__init__(f"catalog: {what}; it is emptied when a process opens the tier alone")


class ClosedError(TierStoreError):
    """The object was used after `close`."""


class ReentryError(TierStoreError):
    """A store was called from within one of its calls in the same thread; nothing was changed."""


class MissingExtraError(TierStoreError):
    """An optional library is not installed; the message names the extra to install."""


class PromptError(TierStoreError):
    """A prompt for a warm-up is wrong; the message names the line and the remedy."""
