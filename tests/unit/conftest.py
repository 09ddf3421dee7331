import pytest
from catalog_harness import Harness


@pytest.fixture
def harness(tmp_path):
    """Return a catalog's writer on a disk that is only counted."""
    harness = Harness(tmp_path)
    yield harness
    harness.catalog.close()
