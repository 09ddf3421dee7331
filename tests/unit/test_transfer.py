"""Messages between the planes: places as arrays."""

import pickle

import numpy as np
import pytest

from tierstore.key import make_offload_keys
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.transfer import Demote, JobId, Place, place_array

COUNT = 256


@pytest.mark.parametrize(
    "places",
    [
        [b"0123", b"\0\0\0\0", b"ab\0\0"],
        [b"one", b"", b"three\0"],
        [b"", b""],
        [b"\0"],
        [],
    ],
)
def test_places_are_the_same_bytes_in_another_process(places):
    array = place_array([Place(place) for place in places])
    again = pickle.loads(pickle.dumps(array))
    for each in (array, again):
        assert [p if isinstance(p, bytes) else p.tobytes() for p in each] == places
    assert place_array(array) is array


def test_a_command_takes_few_bytes_more_than_its_keys_and_places():
    """Commands cross to the workers in each step: only keys are an object per record."""
    places = place_array([Place(n.to_bytes(24, "little")) for n in range(COUNT)])
    keys = make_offload_keys(Manifest.simple("m", 4096).namespace, 0, spread_hashes(range(COUNT)))
    demote = Demote(
        job_id=JobId(1),
        tier_idx=0,
        group_idx=0,
        keys=tuple(keys),
        places=places,
        slots=np.arange(COUNT),
        owner=1,
    )
    again = pickle.loads(pickle.dumps(demote))
    assert (again.keys, again.places.tolist()) == (demote.keys, places.tolist())
    content_bytes = places.nbytes + demote.slots.nbytes + sum(map(len, keys))
    assert len(pickle.dumps(demote)) < content_bytes + 4 * COUNT + 600
