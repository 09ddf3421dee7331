"""Listing the segments below a path while others remove them."""

from pathlib import Path

from tierstore.backend.inventory import stored_segments
from tierstore.config import SecondaryConfig
from tierstore.geometry import SpaceGeometry
from tierstore.manifest import Manifest

MIB = 1 << 20


def test_a_segment_that_vanishes_while_it_is_listed_is_left_out(tmp_path):
    config = SecondaryConfig(name="t", backend="file", path=tmp_path, capacity_bytes=8 * MIB)
    geometry = SpaceGeometry.of(config, Manifest.simple("m", 4096), 1)
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "00000001.seg").write_bytes(bytes(8192))
    # Listed, but not there when it is looked at: as if it had been removed between the two.
    (tmp_path / "rank0" / "00000002.seg").symlink_to(Path(tmp_path / "gone"))
    assert stored_segments(config, geometry) == {1: 2}
