"""How queued operations are cut into transactions."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from tierstore.catalog.messages import (
    ForgetNamespace,
    Operation,
    SweepGarbage,
    TouchKeys,
)

__all__ = ["batches", "joined_touches"]

_BATCH_KEYS_MAX = 512


def batches(
    operations: Iterable[Operation], key_count_of: Callable[[Operation], int]
) -> Iterable[list[Operation]]:
    """Cut operations into transactions of bounded size; what is one by itself stands alone.

    `key_count_of` says how many records an operation changes. Garbage is swept by an idle writer
    alone.
    """
    batch: list[Operation] = []
    key_count = 0
    operations = list(operations)
    for operation in operations:
        if isinstance(operation, SweepGarbage) and len(operations) > 1:
            continue
        if isinstance(operation, ForgetNamespace | SweepGarbage):
            if batch:
                yield batch
            yield [operation]
            batch, key_count = [], 0
            continue
        batch.append(operation)
        key_count += key_count_of(operation)
        if key_count >= _BATCH_KEYS_MAX:
            yield batch
            batch, key_count = [], 0
    if batch:
        yield batch


def joined_touches(batch: Sequence[Operation]) -> Iterable[Operation]:
    """Join touches that follow each other, with the same outcome.

    Each touch of all records there are would cost a page of the map until the transaction ends, and
    what gathers behind a slow transaction is hundreds of them.
    """
    for kind, operations in itertools.groupby(batch, type):
        if kind is TouchKeys:
            touches = (cast("TouchKeys", operation).keys for operation in operations)
            yield TouchKeys(tuple(itertools.chain.from_iterable(touches)))
        else:
            yield from operations
