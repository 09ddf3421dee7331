"""The package in `examples/plug_in`, installed by pip and used as its README says."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from source_tree import ROOT

from tierstore.config import PrimaryConfig
from tierstore.layout import PAGE_BYTES
from tierstore.policy import make_policy
from tierstore.policy.use import UseContext
from tierstore.testing.policy_conformance import PolicyConformance, keys_of
from tierstore.tier.memory.primary import PrimaryTier

EXAMPLE = ROOT / "examples" / "plug_in"
PROGRAM = """
import sys
import numpy as np
from tierstore import Manifest, TierStore

manifest = Manifest.simple("m", chunk_bytes=4096)
keys = manifest.keys([n.to_bytes(32, "big") for n in range(1, 13)])
with TierStore.open(sys.argv[1], manifest) as store:
    for key in keys:
        assert store.put([key], np.ones((1, 4096), np.uint8)) == [True]
    print([bool(store.match_prefix([key]).chunk_count) for key in keys].count(True))
    print(store.match_prefix(keys).chunk_count)
    assert store.check() == []
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Where the example is installed; a copy is built, for builders write beside the source."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    paths = ["--target", str(folder / "target"), str(folder / "source")]
    subprocess.run([*pip, *offline, *paths], check=True, timeout=600)
    return folder / "target"


@pytest.fixture
def installed(target, monkeypatch):
    monkeypatch.syspath_prepend(target)


@pytest.mark.usefixtures("installed")
class TestByPriority(PolicyConformance):
    def make(self, capacity_chunks):
        return make_policy("by_priority", capacity_chunks)


@pytest.mark.usefixtures("installed")
def test_what_urgent_requests_use_stays_longest():
    config = PrimaryConfig(capacity_bytes=8 * PAGE_BYTES, eviction="by_priority")
    tier = PrimaryTier(config, [PAGE_BYTES])
    assert tier.needs_use
    urgent, idle, normal = keys_of(1, 2), keys_of(3, 4), keys_of(5, 6)
    for keys, priority in ((urgent, -5), (idle, 7), (normal, 0)):
        use = UseContext.of(str(priority), priority=priority)
        tier.reserve(0, keys, use=use)
        tier.commit(keys, use=use)
    assert tier.coldest(6) == idle + normal + urgent
    tier.touch(idle[:1], use=UseContext.of("again", priority=-9))
    tier.touch(idle[:1])
    assert tier.coldest(6) == [*idle[1:], *normal, *urgent, *idle[:1]]


def run(config, target):
    paths = os.pathsep.join([str(ROOT), str(target)])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(config)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "first_kept"), [("", 0), (", eviction_options: {newest_first: true}", 7)]
)
def test_a_store_uses_the_policy_that_its_file_names(target, tmp_path, options, first_kept):
    """12 chunks into 8 slots: the oldest leave first, or all but the oldest."""
    config = tmp_path / "store.yaml"
    config.write_text(f"primary: {{capacity: 32KiB, eviction: by_priority{options}}}\n")
    result = run(config, target)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["8", str(first_kept)]


def test_where_it_is_not_installed_the_file_is_refused_by_its_key(tmp_path):
    config = tmp_path / "store.yaml"
    config.write_text("primary: {capacity: 32KiB, eviction: by_priority}\n")
    result = run(config, tmp_path)
    assert result.returncode == 1
    assert "primary.eviction: expected 'lru' or 'arc', got 'by_priority'" in result.stderr


def test_options_that_it_does_not_take_are_refused_by_their_key(target, tmp_path):
    config = tmp_path / "store.yaml"
    config.write_text(
        "primary: {capacity: 32KiB, eviction: by_priority, eviction_options: {newest: true}}\n"
    )
    result = run(config, target)
    assert result.returncode == 1
    assert "ConfigError: primary.eviction: 'by_priority': the plug-in makes no policy" in (
        result.stderr
    )


def test_the_readme_names_what_the_package_has():
    text = (EXAMPLE / "README.md").read_text()
    assert len(text.splitlines()) <= 20
    names = re.findall(r"eviction: (\w+)", text)
    project = (EXAMPLE / "pyproject.toml").read_text()
    assert names
    assert all(f"\n{name} = " in project for name in names)
