"""Families whose KV caches no other test has: what `scripts/families.py` says of all of them."""

from pathlib import Path

import pytest
from families import COLUMNS, Family

# In continuous integration these cost more than two minutes; layouts, planner and engine are tested
# there by others.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", ["llama4", "deepseek_v2"])
def test_a_family_is_stored_and_loaded_exactly(name: str, tmp_path: Path) -> None:
    found = Family(name, tmp_path).run()
    assert {column: found.get(column) for column in COLUMNS} == dict.fromkeys(COLUMNS, "yes")
