"""The catalog whose answers a tier's user is given: which one, and what has come of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import take_all
from tierstore.tier.disk.dispatcher import CatalogDispatcher
from tierstore.tier_events import SecondaryEvent

if TYPE_CHECKING:
    from tierstore.tier.disk.catalog_keeper import OpenCatalog
    from tierstore.tier.secondary import LossListener

__all__ = ["ServedCatalog"]


class ServedCatalog:
    """Follows the dispatcher's catalog, but only when it is told to. One thread.

    The dispatcher turns to another catalog at any time, in its own thread. A user that was between
    two calls then would be told of places of one owner and write them for another.
    """

    def __init__(
        self,
        dispatcher: CatalogDispatcher,
        forget: Callable[[], None],
        on_opened: Callable[[Catalog], None] | None,
    ) -> None:
        """`forget` drops what is known of a catalog; `on_opened` is told of each opening."""
        self._dispatcher = dispatcher
        self._forget = forget
        self._on_opened = on_opened
        self.on_lost: LossListener = _nothing
        """Called by `follow` when the catalog was lost, with its records."""
        self.opened: OpenCatalog | None = None
        """The catalog that answers now; None: there is none."""
        self.change_count = 0
        """How often it was lost or opened."""
        self.owner = 0
        """The owner of the places; 0: there never was a catalog."""

    def follow(self) -> None:
        """Turn to the catalog that is open now, and tell of it if it is another one."""
        opened, before = self._dispatcher.opened, self.opened
        if opened is before:
            return
        self.opened = opened
        self.change_count += 1
        self._forget()
        if before is not None:
            self.on_lost()
        if opened is not None:
            self.owner = opened.catalog.owner
            if self._on_opened is not None:
                self._on_opened(opened.catalog)

    def take_answers(self) -> list[SecondaryEvent]:
        """Return the answers since the last call: those of lost catalogs first."""
        answers = take_all(self._dispatcher.answers)
        if self.opened is not None:
            answers += take_all(self.opened.writer.events)
        return answers

    def has_answers(self) -> bool:
        """Return whether `follow` or `take_answers` has something to do."""
        return bool(
            self._dispatcher.answers
            or self.opened is not self._dispatcher.opened
            or (self.opened is not None and self.opened.writer.events)
        )


def _nothing() -> None:
    pass
