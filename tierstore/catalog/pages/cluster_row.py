"""The row of one cluster: its keys, where they lie, and which of them were used last together.

    head: record count, stride pages, payload bytes, segment pages, extent records, group count
    groups: sequence, bits | key lengths | keys

A cluster is a run of adjacent extents of one segment that one request was given. All of them have
`extent_records` records, except the last, which may have fewer. So a place follows from the index:

    | header | 0 | 1 | .. | 31 | header | 32 | 33 | .. | 63 | header | 64 | 65 |
      ^ first page: the number of the cluster

A group is one row of the order: living records of the cluster that were stored or used one after
the other. Within a group, a record with a higher index is older: a prefix loses its tail first.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from tierstore.codec.record import EXTENT_RECORDS_MAX
from tierstore.errors import CatalogDamagedError
from tierstore.transfer import Place

__all__ = ["CLUSTER_RECORDS_MAX", "ClusterRow", "bits_of", "indices_of", "names_of"]

CLUSTER_RECORDS_MAX = 128
"""Bits of a group. More would make the rows that each use rewrites longer."""

_BITS_BYTES = CLUSTER_RECORDS_MAX // 8
_STRIDE_PAGES_MAX = 1 << 24
"""Larger records are not made: a place within the cluster has 32 bits."""
_PLACE = struct.Struct("<6I")
"""The fields of `PLACE_DTYPE`."""


@dataclass(slots=True)
class ClusterRow:
    """One cluster with at least one living record; all of one namespace and one size."""

    HEAD: ClassVar[struct.Struct] = struct.Struct("<6I")
    GROUP: ClassVar[struct.Struct] = struct.Struct(f"<Q{_BITS_BYTES}s")

    record_count: int
    """Records that were written."""
    stride_pages: int
    """Of each record."""
    payload_bytes: int
    """Of each record."""
    segment_pages: int
    """Least length of the file that contains the cluster."""
    extent_records: int
    """Records of each extent, except the last, which may have fewer."""
    groups: dict[int, int]
    """By sequence, the living records of a group: bit i is record i. No two groups share one."""
    names: bytes
    """The length of each key, one byte each, and then the keys, also those of dead records."""

    @property
    def live_bits(self) -> int:
        """The living records, as bits."""
        return sum(self.groups.values())

    @property
    def all_bits(self) -> int:
        """All records that were written, as bits."""
        return (1 << self.record_count) - 1

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

    def index_of(self, key: bytes, guess: int = 0) -> int | None:
        """Return the index of a key; fast if it is `guess`. None: the cluster does not name it."""
        names, count = self.names, self.record_count
        width = names[0]
        at = count + guess * width
        if names[at : at + width] == key and 0 <= guess < count and self._has_equal_names():
            return guess
        at = names.find(key, count)
        if at < 0:
            return None
        if self._has_equal_names() and len(key) == width and (at - count) % width == 0:
            return (at - count) // width
        keys = self.keys()
        return keys.index(key) if key in keys else None

    def _has_equal_names(self) -> bool:
        return self.names.startswith(self.names[:1] * self.record_count)

    def page_count(self, header_pages: int) -> int:
        """Return the pages that were given out to it."""
        extent_count = -(-self.record_count // self.extent_records)
        return extent_count * header_pages + self.record_count * self.stride_pages

    def places(self, cluster: int, indices: Iterable[int], header_pages: int) -> list[Place]:
        """Return the places of records.

        Raises:
            struct.error: a number of the row is damaged.
        """
        segment, first_page = cluster >> 32, cluster & 0xFFFFFFFF
        per_extent, stride_pages = self.extent_records, self.stride_pages
        extent_pages = header_pages + per_extent * stride_pages
        rest = stride_pages, self.payload_bytes, self.segment_pages
        pack = _PLACE.pack
        return [
            Place(
                pack(
                    segment,
                    first_page + index // per_extent * extent_pages,
                    index % per_extent,
                    *rest,
                )
            )
            for index in indices
        ]

    def page_runs(
        self, cluster: int, bits: int, live_bits: int, header_pages: int
    ) -> Iterator[tuple[int, int, int]]:
        """Iterate over the page runs (`RUN_DTYPE`) of records that die, with their headers.

        `live_bits` are those that live on: an extent without any of them loses its header pages.
        """
        segment, first_page = cluster >> 32, cluster & 0xFFFFFFFF
        mask = (1 << self.extent_records) - 1
        while bits:
            here, stays = bits & mask, live_bits & mask
            if here and not stays and header_pages:
                yield segment, first_page, header_pages
            page = first_page + header_pages
            while here:
                skipped = (here & -here).bit_length() - 1
                here >>= skipped
                count = (~here & here + 1).bit_length() - 1
                here >>= count
                page += skipped * self.stride_pages
                yield segment, page, count * self.stride_pages
                page += count * self.stride_pages
            bits >>= self.extent_records
            live_bits >>= self.extent_records
            first_page += header_pages + self.extent_records * self.stride_pages

    def pack(self) -> bytes:
        """Return the row as bytes."""
        head = self.HEAD.pack(
            self.record_count,
            self.stride_pages,
            self.payload_bytes,
            self.segment_pages,
            self.extent_records,
            len(self.groups),
        )
        groups = [
            self.GROUP.pack(sequence, bits.to_bytes(_BITS_BYTES, "little"))
            for sequence, bits in self.groups.items()
        ]
        return b"".join([head, *groups, self.names])

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """Return the row.

        Raises:
            CatalogDamagedError: its parts contradict each other.
        """
        if len(value) < cls.HEAD.size:
            raise CatalogDamagedError("a cluster row is damaged")
        head: tuple[int, int, int, int, int, int] = cls.HEAD.unpack_from(value)
        record_count, stride_pages, payload_bytes, segment_pages, extent_records, group_count = head
        groups_end = cls.HEAD.size + group_count * cls.GROUP.size
        names = value[groups_end:]
        lengths = names[:record_count]
        if (
            not 0 < record_count <= CLUSTER_RECORDS_MAX
            or not 0 < extent_records <= EXTENT_RECORDS_MAX
            or not 0 < stride_pages <= _STRIDE_PAGES_MAX
            or not 0 < group_count <= record_count
            or len(lengths) < record_count
            or 0 in lengths
            or len(names) != record_count + sum(lengths)
        ):
            raise CatalogDamagedError("a cluster row is damaged")
        groups = {
            sequence: int.from_bytes(bits, "little")
            for sequence, bits in cls.GROUP.iter_unpack(value[cls.HEAD.size : groups_end])
        }
        common = 0
        for bits in groups.values():
            if not bits or bits & common:
                break
            common |= bits
        else:
            if len(groups) == group_count and not common >> record_count:
                return cls(
                    record_count,
                    stride_pages,
                    payload_bytes,
                    segment_pages,
                    extent_records,
                    groups,
                    names,
                )
        raise CatalogDamagedError("the groups of a cluster row are damaged")


def names_of(keys: Sequence[bytes]) -> bytes:
    """Return the names of a row with these keys."""
    return bytes(map(len, keys)) + b"".join(keys)


def bits_of(indices: Iterable[int]) -> int:
    """Return different indices as bits."""
    return sum([1 << index for index in indices])


def indices_of(bits: int) -> list[int]:
    """Return the indices of bits, the highest first: from the oldest record of a group."""
    return [index for index in range(bits.bit_length() - 1, -1, -1) if bits >> index & 1]
