"""Namespaces of a catalog: their manifests, epochs and owners, and how they are forgotten."""

from collections.abc import Callable

from tierstore.catalog.garbage import Floors
from tierstore.catalog.pages.budget import read_owners
from tierstore.catalog.pages.space import Space
from tierstore.catalog.rows import (
    Databases,
    OwnerRow,
    SegmentState,
    number_value,
    parse_number,
    segment_key,
)
from tierstore.key import NAMESPACE_BYTES, Namespace
from tierstore.lmdb_env.library import Transaction

__all__ = ["Namespaces"]


class Namespaces:
    """Manifests, epochs and owners within one write transaction."""

    def __init__(
        self, txn: Transaction, databases: Databases, space: Space, floors: Floors
    ) -> None:
        self._txn = txn
        self._databases = databases
        self._space = space
        self._floors = floors
        self.has_other_owners = False
        """Whether rows of owners were changed."""

    def begin_epoch(self, namespace: Namespace, manifest_json: bytes) -> None:
        """Enter a namespace that only this owner asks for, from now on."""
        owner = self._space.owner
        self._txn.put(namespace, manifest_json, db=self._databases.namespaces)
        self._txn.put(namespace, number_value(owner), db=self._databases.epochs)
        row = read_owners(self._txn, self._databases).get(owner)
        if row is not None:
            self._enter(owner, OwnerRow(namespace, row.capacity_bytes))

    def forget(self, namespace: Namespace) -> None:
        """Make garbage of all records of a namespace; an epoch is over. O(segments)."""
        self._floors.raise_to(namespace, self._space.state.next_segment)
        self._space.kill_segments(namespace)
        if self._txn.delete(namespace, db=self._databases.epochs):
            self._txn.delete(namespace, db=self._databases.namespaces)

    def forget_dead_epochs(self, is_dead: Callable[[int], bool]) -> None:
        """Forget the namespaces whose only owner is dead: no process will ask for them."""
        with self._txn.cursor(db=self._databases.epochs) as cursor:
            epochs = [(Namespace(bytes(key)), parse_number(owner)) for key, owner in cursor]
        for namespace, owner in epochs:
            if is_dead(owner):
                self.forget(namespace)

    def forget_unused(self) -> int:
        """Forget the manifests of which there is neither a record nor an owner. O(segments).

        Returns:
            How many these were.
        """
        used = {row.namespace for row in read_owners(self._txn, self._databases).values()}
        used |= {
            row.namespace
            for _, row in self._space.segments.all()
            if row.state == SegmentState.ACTIVE or row.record_count or row.writing_count
        }
        with self._txn.cursor(db=self._databases.namespaces) as cursor:
            unused = [bytes(key) for key in cursor.iternext(values=False)]
        unused = [namespace for namespace in unused if namespace not in used]
        for namespace in unused:
            self._txn.delete(namespace, db=self._databases.namespaces)
            self._txn.delete(namespace, db=self._databases.epochs)
        return len(unused)

    def leave(self, owner: int) -> None:
        """Remove the row of an owner, and with it the capacity that it was promised."""
        self._txn.delete(segment_key(owner), db=self._databases.owners)
        self.has_other_owners = True

    def leave_dead(self, is_dead: Callable[[int], bool]) -> None:
        """Remove the rows of dead owners."""
        for owner in read_owners(self._txn, self._databases):
            if is_dead(owner):
                self.leave(owner)

    def _enter(self, owner: int, row: OwnerRow) -> None:
        assert len(row.namespace) == NAMESPACE_BYTES, f"no namespace: {row.namespace!r}"
        self._txn.put(segment_key(owner), row.pack(), db=self._databases.owners)
        self.has_other_owners = True
