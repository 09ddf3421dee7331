"""A device that hangs while a configuration that names it is read: only its tier is out of use.

Method: the tier lies in a directory whose server is stopped (`fuse_directory`) before anything of
tierstore is called. The call that may hang is in a thread of its own.
"""

import threading

import pytest
from fuse_directory import HangingDirectory, why_there_is_none
from store_kit import Chunks

from tierstore import TierStore
from tierstore.config import load_config
from tierstore.embedded.planes import Patience

pytestmark = [
    pytest.mark.skipif(bool(why_there_is_none()), reason=f"no FUSE: {why_there_is_none()}"),
    pytest.mark.timeout(600),
]

SECONDS_MAX = 120
CHUNKS = Chunks(65_536)


def in_time(call):
    """Return what a call returns; one that hangs is a failure, and not the end of the test run."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    assert answers, "the call hangs, or has failed"
    return answers[0]


def tier(name, path, **changes):
    return {"name": name, "backend": "file", "path": str(path), "capacity": "32MiB", **changes}


@pytest.fixture
def directory(tmp_path):
    with HangingDirectory(tmp_path) as hanging:
        hanging.hang()
        yield hanging
        hanging.heal()


@pytest.mark.parametrize("place", ["mount", "below"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_store_opens_and_has_its_memory_over_a_hung_tier(tmp_path, directory, place, others):
    hung = directory.path if place == "mount" else directory.path / "tier"
    document = {
        "primary": {"capacity": "4MiB"},
        "secondary": [
            tier("hung", hung),
            *(tier(f"sound{i}", tmp_path / f"sound{i}") for i in range(others)),
        ],
    }
    patience = Patience(put_seconds=1, flush_seconds=2, close_seconds=2)

    def use():
        config = load_config(document)
        with TierStore.open(config, CHUNKS.manifest, patience=patience) as store:
            assert CHUNKS.put(store, range(10)) == 10
            return CHUNKS.found(store, range(10))

    assert in_time(use) == list(range(10))


def test_paths_that_lead_to_one_place_are_refused_beside_a_hung_one(tmp_path, directory):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tiers = [
        tier("hung", directory.path / "tier"),
        tier("one", tmp_path / "real"),
        tier("other", tmp_path / "link"),
    ]

    def refusal():
        with pytest.raises(Exception, match="contain each other") as caught:
            load_config({"primary": {"capacity": "4MiB"}, "secondary": tiers})
        return caught.typename

    assert in_time(refusal) == "ConfigError"
