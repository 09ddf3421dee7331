"""The row of one extent: its keys, and which of its records were used last together.

    head: record count, stride pages, group count | groups: sequence, bits | key lengths | keys

A group is one row of the order: living records of the extent that were stored or used one after the
other. Within a group, a record with a higher index is older: a prefix loses its tail first.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.errors import CatalogDamagedError

__all__ = ["ExtentRow", "bits_of", "indices_of"]


@dataclass(slots=True)
class ExtentRow:
    """One extent with at least one living record; all of one namespace."""

    HEAD: ClassVar[struct.Struct] = struct.Struct("<3I")
    GROUP: ClassVar[struct.Struct] = struct.Struct("<QI")

    record_count: int
    """Records that were written."""
    stride_pages: int
    """Of each record."""
    groups: dict[int, int]
    """By sequence, the living records of a group: bit i is record i. No two groups share one."""
    names: bytes
    """The length of each key, one byte each, and then the keys, also those of dead records."""

    @classmethod
    def of(cls, stride_pages: int, keys: Sequence[bytes]) -> Self:
        """Return the row of an extent without a group yet."""
        return cls(len(keys), stride_pages, {}, bytes(map(len, keys)) + b"".join(keys))

    @property
    def live_bits(self) -> int:
        """The living records, as bits."""
        bits = 0
        for group in self.groups.values():
            bits |= group
        return bits

    @property
    def live_count(self) -> int:
        """How many records live."""
        return self.live_bits.bit_count()

    def keys(self) -> list[bytes]:
        """Return the key of each record, by index."""
        names, end = self.names, self.record_count
        width = names[0]
        if names.startswith(names[:1] * end):  # as with most models: all of one length
            return [names[at : at + width] for at in range(end, len(names), width)]
        keys = []
        for length in names[:end]:
            keys.append(names[end : end + length])
            end += length
        return keys

    def pack(self) -> bytes:
        """Return the row as bytes."""
        head = self.HEAD.pack(self.record_count, self.stride_pages, len(self.groups))
        groups = [self.GROUP.pack(*group) for group in self.groups.items()]
        return b"".join([head, *groups, self.names])

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """Return the row.

        Raises:
            CatalogDamagedError: its parts contradict each other.
        """
        if len(value) < cls.HEAD.size:
            raise CatalogDamagedError("an extent row is damaged")
        record_count, stride_pages, group_count = cls.HEAD.unpack_from(value)
        groups_end = cls.HEAD.size + group_count * cls.GROUP.size
        names = value[groups_end:]
        if (
            not 0 < record_count <= EXTENT_RECORDS_MAX
            or not 0 < group_count <= record_count
            or len(names) < record_count
            or 0 in names[:record_count]
            or len(names) != record_count + sum(names[:record_count])
        ):
            raise CatalogDamagedError("an extent row is damaged")
        groups = dict(cls.GROUP.iter_unpack(value[cls.HEAD.size : groups_end]))
        common = 0
        for bits in groups.values():
            if not bits or bits & common:
                break
            common |= bits
        else:
            if len(groups) == group_count and not common >> record_count:
                return cls(record_count, stride_pages, groups, names)
        raise CatalogDamagedError("the groups of an extent row are damaged")


def bits_of(indices: Sequence[int]) -> int:
    """Return different indices as bits."""
    return sum([1 << index for index in indices])


def indices_of(bits: int) -> list[int]:
    """Return the indices of bits, the highest first: from the oldest record of a group."""
    return [index for index in range(bits.bit_length() - 1, -1, -1) if bits >> index & 1]
