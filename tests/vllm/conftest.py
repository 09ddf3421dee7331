from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    if find_spec("vllm") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
