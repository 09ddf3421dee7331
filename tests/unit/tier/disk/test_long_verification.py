"""A catalog whose verification takes long: the tier is opened in the background meanwhile.

Method: the verification of a small catalog is called a long one, and stops where its rows are read
until the test lets it go on. The catalog was closed in order; without its seal it is verified like
that of a killed process.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from python_paths import environment
from waiting import within_seconds

from tierstore.catalog.catalog import Catalog
from tierstore.catalog.pages.state import find_state, write_state
from tierstore.catalog.rows import CATALOG_VERSION, Databases
from tierstore.config import SecondaryConfig
from tierstore.device.system import DatabasePoint, SystemCalls
from tierstore.errors import CatalogError, ClosedError, ConfigError
from tierstore.key import make_offload_keys
from tierstore.lmdb_env.env import LmdbEnv
from tierstore.manifest import Manifest
from tierstore.testing.spread import spread_hashes
from tierstore.tier.disk.catalog_keeper import KeeperPace
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.opening import open_tiers
from tierstore.tier_events import Refused

MANIFEST = Manifest.simple("m", 4096)
LONG = KeeperPace(long_bytes=0, look_seconds=0.01, pause_seconds_min=0.01, pause_seconds_max=0.01)
KEYS = make_offload_keys(MANIFEST.namespace, 0, spread_hashes(range(2000)))
VERIFIED = "is being verified"
SECONDS_MAX = 120

KILLED = """
import os, signal, sys
from pathlib import Path
from tierstore.catalog.catalog import Catalog
from tierstore.lmdb_env.pace import VerifyPace
from long_verification import MANIFEST, config_of

steps = []

def die_in_time():
    steps.append(None)
    if len(steps) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return False

pace = VerifyPace(die_in_time)
Catalog.open(config_of(Path(sys.argv[1])), MANIFEST, rank_count=1, pace=pace)
sys.stdout.write(str(len(steps)))
sys.stdout.flush()
os._exit(0)
"""


class Holding(SystemCalls):
    """Stops the thread that opens a catalog where it reads rows first."""

    def __init__(self):
        self.is_reached = threading.Event()
        self._may_go_on = threading.Event()

    def reach(self, point):
        if point is DatabasePoint.READ:
            self.is_reached.set()
            assert self._may_go_on.wait(SECONDS_MAX)

    def at_database(self, directory):
        del directory
        return self

    def go_on(self):
        self._may_go_on.set()


def config_of(path):
    return SecondaryConfig(name="t", backend="file", path=path, capacity_bytes=64 << 20)


def open_tier(path, system=None, pace=LONG, on_opened=None):
    tier = DiskTier(
        config_of(path),
        MANIFEST,
        tier_idx=0,
        rank_count=1,
        system=system,
        on_opened=on_opened,
        pace=pace,
    )
    return open_tiers([tier])[0]


def fill(path):
    """Leave a catalog with records, as a killed process does."""
    catalog = Catalog.open(config_of(path), MANIFEST, rank_count=1)
    with catalog.transaction() as work:
        work.commit(work.reserve(KEYS, 4096), ())
    catalog.close()
    (path / "catalog" / "seal.bin").unlink()


def found_count(tier):
    tier.poll()
    return sum(place is not None for place in tier.locate(KEYS))


def is_open(tier):
    """Return whether a tier has its catalog; follows it as the scheduler does."""
    tier.poll()
    return tier.is_open


def is_closing(tier):
    """Return whether a tier takes requests no longer."""
    try:
        tier.request_places(1, KEYS[:1], 4096)
    except ClosedError:
        return True
    return False


@pytest.fixture
def path(tmp_path):
    fill(tmp_path / "tier")
    return tmp_path / "tier"


@pytest.fixture
def held(path):
    """A tier that is verified for as long as its system does not go on."""
    system = Holding()
    tier = open_tier(path, system)
    assert system.is_reached.wait(SECONDS_MAX)
    yield tier, system
    system.go_on()
    tier.close()


def test_a_tier_answers_misses_while_its_catalog_is_verified_and_hits_later(held):
    tier, system = held
    assert (tier.is_open, VERIFIED in tier.complaint) == (False, True)
    assert found_count(tier) == 0
    assert not tier.stats().is_open
    tier.request_places(1, KEYS[:4], 4096)
    assert within_seconds(lambda: any(isinstance(event, Refused) for event in tier.poll()))
    system.go_on()
    assert within_seconds(lambda: is_open(tier))
    assert within_seconds(lambda: found_count(tier) == len(KEYS))
    assert (tier.complaint, tier.check()) == ("", [])


def test_a_small_catalog_is_waited_for(path):
    tier = open_tier(path, pace=KeeperPace())
    assert tier.is_open
    tier.close()


def test_a_tier_that_is_verified_says_so_and_is_not_out_of_use(held, caplog):
    tier, system = held
    system.go_on()
    assert within_seconds(lambda: is_open(tier))
    assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == []


def test_another_tier_on_the_path_waits_for_its_turn_in_the_background(held, path):
    first, system = held
    second = open_tier(path)
    assert not second.is_open
    assert VERIFIED in second.complaint
    system.go_on()
    assert within_seconds(lambda: is_open(first) and is_open(second))
    assert within_seconds(lambda: found_count(second) == len(KEYS))
    second.close()


def test_a_close_ends_the_verification(path):
    system = Holding()
    tier = open_tier(path, system)
    assert system.is_reached.wait(SECONDS_MAX)
    closing = threading.Thread(target=tier.close)
    closing.start()
    assert within_seconds(lambda: is_closing(tier))
    system.go_on()
    closing.join(SECONDS_MAX)
    assert not closing.is_alive()
    # One that had been opened would have been sealed.
    assert not (path / "catalog" / "seal.bin").exists()
    again = open_tier(path)
    assert within_seconds(lambda: is_open(again))
    assert within_seconds(lambda: found_count(again) == len(KEYS))
    again.close()


def test_damage_that_is_found_in_the_background_starts_an_empty_catalog(path):
    env = LmdbEnv.open(path / "catalog", map_bytes=1 << 30)
    databases = Databases(env)
    with env.write() as txn:
        state = find_state(txn, databases)
        state.charged_pages -= 10
        write_state(txn, databases, state)
    env.close()
    system = Holding()
    damages = []
    tier = open_tier(path, system, on_opened=lambda catalog: damages.append(catalog.damage))
    assert not tier.is_open
    system.go_on()
    assert within_seconds(lambda: is_open(tier))
    assert found_count(tier) == 0
    assert ["charged" in damage for damage in damages] == [True]
    assert tier.check() == []
    tier.close()


def change_state(path, change):
    """Change the state row of a catalog that is left without a seal."""
    env = LmdbEnv.open(path / "catalog", map_bytes=1 << 30)
    databases = Databases(env)
    with env.write() as txn:
        state = find_state(txn, databases)
        change(state)
        write_state(txn, databases, state)
    env.close()


def be_of_the_next_version(state):
    state.format_version = CATALOG_VERSION + 1


def be_of_lmdb(state):
    state.backend = 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (be_of_the_next_version, CatalogError, "another path"),
        (be_of_lmdb, ConfigError, "another backend"),
    ],
)
def test_what_the_user_has_to_change_is_not_left_to_the_background(path, change, error, words):
    """Goal: a catalog that would be verified for long is refused by the opening of its tier."""
    change_state(path, change)
    data = (path / "catalog" / "data.mdb").read_bytes()
    system = Holding()  # nothing goes on: an opening that verified first would succeed
    try:
        with pytest.raises(error, match=words):
            open_tier(path, system)
    finally:
        system.go_on()
    assert (path / "catalog" / "data.mdb").read_bytes() == data


def test_a_kill_during_the_verification_changes_nothing(tmp_path, path):
    """Goal: pages, then rows: whatever is being verified, the next opener verifies it again."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "long_verification.py").write_text(Path(__file__).read_text())
    data = path / "catalog" / "data.mdb"
    before = data.read_bytes()

    def open_and_die(step):
        command = [sys.executable, "-c", KILLED, str(path), str(step)]
        ended = subprocess.run(
            command, env=environment(modules), stdout=subprocess.PIPE, check=False
        )
        return ended.returncode, ended.stdout

    step = 1
    while (ended := open_and_die(step))[0]:
        assert ended[0] == -signal.SIGKILL
        assert data.read_bytes() == before
        assert list((path / "owners").iterdir()) == []
        step += 1
    assert int(ended[1]) == step - 1 > len(KEYS) // 1024
    tier = open_tier(path)
    assert within_seconds(lambda: is_open(tier))
    assert within_seconds(lambda: found_count(tier) == len(KEYS))
    assert tier.check() == []
    tier.close()
