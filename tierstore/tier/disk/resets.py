"""Resets that a catalog was told of: until it has done all of them, nothing is found in it.

A reset begins an epoch, a namespace that only this process finds. Going without the disk until the
next start would cost a running engine its hits there; a digest of the weights would come too late,
for a reset may precede their update.
"""

from collections.abc import Callable
from contextlib import suppress

from tierstore.catalog.messages import BeginEpoch, Evict, ForgetNamespace, Operation
from tierstore.errors import ClosedError
from tierstore.manifest import Manifest
from tierstore.tier.disk.threads import CatalogThreads

__all__ = ["Resets"]


class Resets:
    """Counts what one tier's catalog was told to forget, and what it has forgotten."""

    def __init__(self, manifest: Manifest, threads: CatalogThreads) -> None:
        """Begin with the records of `manifest`."""
        self._namespace = manifest.namespace
        self._threads = threads
        self._asked_count = 0

    @property
    def is_pending(self) -> bool:
        """Whether something is not forgotten yet. Any thread."""
        return self._threads.dispatcher.forgotten_count < self._asked_count

    def begin(self, manifest: Manifest, put: Callable[[Operation], None]) -> None:
        """Forget all records of the namespace in use, and use that of `manifest` from now on."""
        # Counted first: from the next call on nothing is found, whatever the catalog is doing.
        self._asked_count += 1
        put(ForgetNamespace(self._namespace))
        if manifest.namespace != self._namespace:
            self._namespace = manifest.namespace
            put(BeginEpoch(manifest.namespace, manifest.canonical_json))

    def retry(self, seconds: float) -> bool:
        """Let a failing catalog try again, for so long at most; return whether all are done.

        For a thread that may wait.
        """
        if self.is_pending:
            with suppress(ClosedError):
                self._threads.put(Evict())  # before any operation the writer tries what has failed
                self._threads.wait_idle(seconds)
        return not self.is_pending
