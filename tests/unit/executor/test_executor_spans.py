"""How commands are cut into I/O tasks."""

import random

import numpy as np
import pytest

from tierstore.codec.record import EXTENT_RECORDS_MAX, PLACE_DTYPE
from tierstore.executor.job import split_spans
from tierstore.key import Namespace, make_offload_keys
from tierstore.transfer import Demote, JobId, Place, Promote

READ_BYTES_MAX = 4 << 20


def extents_of(counts):
    """Return keys, places and slots of records that lie in extents of so many."""
    places = np.zeros(sum(counts), PLACE_DTYPE)
    places["header_page"] = np.repeat(np.cumsum(counts), counts)
    places["index"] = [i for count in counts for i in range(count)]
    hashes = [random.Random(n).randbytes(32) for n in range(len(places))]
    return {
        "keys": tuple(make_offload_keys(Namespace(b"n" * 8), 0, hashes)),
        "places": tuple(Place(place.tobytes()) for place in places),
        "slots": np.arange(len(places)),
    }


def cuts_of(spans):
    return [(span.start, span.stop) for span in spans]


@pytest.mark.parametrize("chunk_bytes", [4096, 65_536, 1 << 18, 3 << 19, 6 << 20])
@pytest.mark.parametrize("seed", range(10))
def test_reads_are_short_whatever_the_extents_and_writes_take_whole_ones(chunk_bytes, seed):
    dice = random.Random(seed)
    counts = [dice.randrange(1, EXTENT_RECORDS_MAX + 1) for _ in range(dice.randrange(1, 40))]
    fields = extents_of(counts)
    promote = Promote(tier_idx=0, group_idx=0, **fields)
    reads = cuts_of(split_spans(promote, 5, chunk_bytes, 8))
    demote = Demote(job_id=JobId(1), tier_idx=0, group_idx=0, owner=1, **fields)
    writes = cuts_of(split_spans(demote, 0, chunk_bytes, 8))
    for cuts in (reads, writes):
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == sum(counts)
    ends = set(np.cumsum(counts).tolist())
    assert {stop for _, stop in writes} <= ends
    record_count_max = max(1, READ_BYTES_MAX // chunk_bytes)
    assert all(0 < stop - start <= record_count_max for start, stop in reads)
    # Only what is too long is cut within an extent.
    assert len(reads) <= len(writes) + sum(counts) // record_count_max


def test_the_records_of_a_span_know_their_index_in_the_job():
    promote = Promote(tier_idx=0, group_idx=0, **extents_of([2, 2]))
    spans = split_spans(promote, 5, READ_BYTES_MAX, 8)
    assert [span.indices for span in spans] == [range(i, i + 1) for i in range(5, 9)]
