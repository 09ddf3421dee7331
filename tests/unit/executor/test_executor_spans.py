"""How commands are cut into I/O tasks."""

import random

import numpy as np
import pytest

from tierstore.codec.places import extent_ends
from tierstore.codec.record import EXTENT_RECORDS_MAX, PLACE_DTYPE
from tierstore.executor.splitting import Splitter
from tierstore.key import Namespace, make_offload_keys
from tierstore.transfer import Demote, JobId, Promote

READ_BYTES_MAX = 4 << 20
HERE = Splitter(thread_count=8, find_cuts=extent_ends)
ELSEWHERE = Splitter(thread_count=8)


def extents_of(counts):
    """Return keys, places and slots of records that lie in extents of so many."""
    places = np.zeros(sum(counts), PLACE_DTYPE)
    places["header_page"] = np.repeat(np.cumsum(counts), counts)
    places["index"] = [i for count in counts for i in range(count)]
    hashes = [random.Random(n).randbytes(32) for n in range(len(places))]
    return {
        "keys": tuple(make_offload_keys(Namespace(b"n" * 8), 0, hashes)),
        "places": places.view(f"V{places.itemsize}"),
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
    reads = cuts_of(HERE.split(promote, 5, chunk_bytes))
    demote = Demote(job_id=JobId(1), tier_idx=0, group_idx=0, owner=1, **fields)
    writes = cuts_of(HERE.split(demote, 0, chunk_bytes))
    for cuts in (reads, writes):
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == sum(counts)
    ends = set(np.cumsum(counts).tolist())
    assert {stop for _, stop in writes} <= ends
    record_count_max = max(1, READ_BYTES_MAX // chunk_bytes)
    assert all(0 < stop - start <= record_count_max for start, stop in reads)
    # Only what is too long is cut within an extent.
    assert len(reads) <= len(writes) + sum(counts) // record_count_max


@pytest.mark.parametrize("kind", [Promote, Demote])
def test_tasks_that_would_wait_for_a_thread_anyway_are_as_long_as_they_may_be(kind):
    """Each costs a turn of the interpreter: 8 MiB are 4 tasks, or 2 behind others."""
    extra = {} if kind is Promote else {"job_id": JobId(1), "owner": 1}
    command = kind(tier_idx=0, group_idx=0, **extents_of([32] * 4), **extra)
    assert cuts_of(HERE.split(command, 0, 65_536)) == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert cuts_of(HERE.split(command, 0, 65_536, has_others=True)) == [(0, 64), (64, 128)]


def test_the_records_of_a_span_know_their_index_in_the_job():
    promote = Promote(tier_idx=0, group_idx=0, **extents_of([2, 2]))
    spans = HERE.split(promote, 5, READ_BYTES_MAX)
    assert [span.indices for span in spans] == [range(i, i + 1) for i in range(5, 9)]


@pytest.mark.parametrize("chunk_bytes", [4096, 65_536, 3 << 19, 6 << 20])
@pytest.mark.parametrize("places", [np.zeros(300, "V40"), np.array([b"a", b"bc"] * 150, object)])
def test_places_of_a_tier_elsewhere_are_divided_anywhere_and_not_looked_into(chunk_bytes, places):
    fields = extents_of([1] * 300) | {"places": places}
    commands = (
        Promote(tier_idx=0, group_idx=0, **fields),
        Demote(job_id=JobId(1), tier_idx=0, group_idx=0, owner=0, **fields),
    )
    for command in commands:
        cuts = cuts_of(ELSEWHERE.split(command, 0, chunk_bytes))
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == 300
        count_max = max(1, READ_BYTES_MAX // chunk_bytes)
        assert all(0 < stop - start <= count_max for start, stop in cuts)


@pytest.mark.parametrize("places", [np.zeros(3, "V5"), np.array([b"a", b"bc", b""], object)])
def test_places_that_the_catalog_never_gave_are_divided_nevertheless(places):
    """What a damaged catalog says must not stop the engine."""
    assert extent_ends(places)[-1] == 3
