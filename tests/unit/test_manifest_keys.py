import pytest

from tierstore import Manifest, ManifestError, make_offload_keys

MANIFEST = Manifest.simple("m", 4096)
HASHES = [bytes([n]) * 32 for n in range(3)]


def test_a_manifest_makes_the_keys_of_its_namespace():
    assert MANIFEST.keys(HASHES) == make_offload_keys(MANIFEST.namespace, 0, HASHES)
    assert MANIFEST.keys([]) == []


@pytest.mark.parametrize("group_idx", [1, -1, "0", None, True])
def test_a_group_that_is_none_of_its_own_is_refused(group_idx):
    with pytest.raises(ManifestError, match="group_idx: expected 0 to 0"):
        MANIFEST.keys(HASHES, group_idx)
