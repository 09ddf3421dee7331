"""A catalog's writer on a disk that is only counted."""

import collections
from typing import ClassVar

import numpy as np
from fake_clock import FakeClock

from tierstore.catalog.catalog import Catalog
from tierstore.catalog.messages import (
    CommitTicket,
    Evict,
    ReleaseDone,
    RequestPlaces,
    SweepGarbage,
)
from tierstore.catalog.pages.cluster_row import ClusterRow, indices_of
from tierstore.catalog.writer import CatalogWriter
from tierstore.codec.record import PLACE_DTYPE
from tierstore.config import SecondaryConfig
from tierstore.geometry import segment_overhead_pages
from tierstore.key import make_offload_keys
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.tier_events import Committed, Evicted, Freed, Placed

MIB = 1 << 20
OVERDUE_SECONDS = 1.5
"""Longer than a request waits before it takes over the releases of others."""


class CountedDisk:
    """What the segment files of one rank would occupy."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.segments = {}
        self.lengths = {}
        self.written = set()
        self.payload = 0

    def write(self, places):
        for raw in places:
            place = np.frombuffer(raw, PLACE_DTYPE)[0]
            segment = int(place["segment"])
            length = int(place["segment_pages"])
            if segment not in self.segments:
                pages = length if self.geometry.charges_segments else 0
                self.segments[segment] = set(range(pages))
                self.lengths[segment] = length
            header = self.geometry.header_pages
            first = int(place["header_page"] + header + place["index"] * place["stride_pages"])
            pages = {(segment, page) for page in range(first, first + int(place["stride_pages"]))}
            assert not pages & self.written, "a page was given out twice"
            self.written |= pages
            assert first + place["stride_pages"] <= length == self.lengths[segment]
            self.segments[segment] |= {page for _, page in pages}

    def release(self, freed):
        for run in freed.runs:
            if run.segment in self.segments:
                self.segments[run.segment] -= set(
                    range(run.first_page, run.first_page + run.page_count)
                )
        for segment in freed.empty_segments:
            self.segments.pop(segment, None)

    def pages(self):
        charges = self.geometry.charges_segments
        return sum(
            len(pages) + (segment_overhead_pages(self.lengths[segment]) if charges else 0)
            for segment, pages in self.segments.items()
        )


class Harness:
    """A writer, a counted disk, and a model of the records in order of eviction."""

    numbers: ClassVar[dict[bytes, int]] = {}
    """Of all keys that were made, whoever made them."""

    def __init__(
        self,
        path,
        *,
        backend="file",
        capacity=8 * MIB,
        chunk=64 << 10,
        ranks=1,
        model="m",
        manifest=None,
        disk=None,
        open_system=None,
    ):
        self.config = SecondaryConfig(name="t", backend=backend, path=path, capacity_bytes=capacity)
        self.manifest = manifest or Manifest.simple(model, chunk)
        self.chunk = chunk
        self.ranks = ranks
        self.pins = collections.Counter()
        self.tickets = 0
        self.disk = disk
        self.system = open_system and open_system(self.config)
        self.clock = FakeClock()
        self.unreleased = []
        self.evicted = []
        self.open()

    def open(self):
        self.catalog = Catalog.open(
            self.config, self.manifest, rank_count=self.ranks, system=self.system
        )
        self.writer = CatalogWriter(self.catalog, self.pins, self.clock)
        if self.disk is None:
            self.disk = CountedDisk(self.catalog.geometry)
        self.writer.recover()

    def reopen(self):
        self.catalog.close()
        self.open()

    def keys(self, *numbers):
        keys = make_offload_keys(self.manifest.namespace, 0, spread_hashes(numbers))
        self.numbers.update(zip(keys, numbers, strict=True))
        return keys

    def listed(self):
        """Return the segments as a search for unreferenced ones lists them."""
        is_file = self.config.backend == "file"
        return {s: len(pages) * is_file for s, pages in self.disk.segments.items()}

    def take(self):
        events = list(self.writer.events)
        self.writer.events.clear()
        self.unreleased += [event for event in events if isinstance(event, Freed)]
        self.evicted += [
            key for event in events if isinstance(event, Evicted) for key in event.keys
        ]
        return [event for event in events if not isinstance(event, Evicted | Freed | Committed)]

    def release(self):
        while self.unreleased:
            freed = self.unreleased.pop(0)
            self.disk.release(freed)
            self.writer.handle([ReleaseDone(freed.release_id)])
            self.take_later()

    def take_later(self):
        self.later = getattr(self, "later", []) + self.take()

    def commit(self, ticket):
        self.writer.handle([CommitTicket(ticket, frozenset())])

    def store(self, *numbers, failed=()):
        """Store keys, answering releases as they come; return the answer."""
        self.tickets += 1
        self.later = []
        self.writer.handle([RequestPlaces(self.tickets, tuple(self.keys(*numbers)), self.chunk)])
        self.take_later()
        self.release()
        self.take_later()
        if self.writer.waiting:
            # For what an owner was releasing when it died: taken over when the request is overdue.
            self.clock.now += OVERDUE_SECONDS
            self.writer.handle([Evict()])
            self.take_later()
            self.release()
        (answer,) = self.later
        if isinstance(answer, Placed):
            self.disk.write(answer.places)
            self.check_capacity()
            self.writer.handle([CommitTicket(self.tickets, frozenset(failed))])
            self.take_later()
            self.release()
        self.check_capacity()
        return answer

    def check_capacity(self):
        allowed = self.catalog.budget().space_pages_max
        assert self.disk.pages() * self.ranks <= allowed

    def located(self, *numbers):
        return [place is not None for place in self.catalog.locate(self.keys(*numbers))]

    def order(self):
        """Return the recorded numbers, oldest first, as the catalog's victims would be."""
        databases = self.catalog._databases
        keys, expected = [], []
        with self.catalog._env.read() as txn, txn.cursor(db=databases.order) as cursor:
            for sequence, cluster in cursor:
                row = ClusterRow.unpack(txn.get(cluster, db=databases.clusters))
                names = row.keys()
                indices = indices_of(row.groups[int.from_bytes(sequence, "big")])
                keys += [names[index] for index in indices]
                number = int.from_bytes(cluster, "big")
                expected += row.places(number, indices, self.catalog.geometry.header_pages)
        places = self.catalog.locate(keys)
        return [
            self.numbers[key]
            for key, own, place in zip(keys, expected, places, strict=True)
            if place == own
        ]

    def name_count(self):
        """Return how many keys clusters have of living records, garbage included."""
        databases = self.catalog._databases
        with self.catalog._env.read(databases.clusters) as txn:
            rows = [ClusterRow.unpack(value) for _, value in txn.cursor()]
        return sum(row.live_bits.bit_count() for row in rows)

    def row_count(self, database):
        """Return how many rows a database has, garbage included."""
        with self.catalog._env.read() as txn:
            return txn.stat(db=getattr(self.catalog._databases, database))["entries"]

    def sweep(self):
        """Remove all garbage; return in how many steps."""
        steps = 0
        while self.writer.has_garbage:
            self.writer.handle([SweepGarbage()])
            steps += 1
        return steps
