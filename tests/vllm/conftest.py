from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    # This folder, as a namespace package, is found where vLLM is not: it has no file of its own.
    found = find_spec("vllm")
    if found is None or found.origin is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
