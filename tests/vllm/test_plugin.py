"""The connector is found by its name, with the plug-in and, given a module path, without it."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from engine import engine_environment

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
HEAVY = ("tierstore_vllm.connector", "tierstore.planner", "tierstore.executor", "lmdb")


def declared() -> EntryPoint:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    return EntryPoint(name, value, "vllm.general_plugins")


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=engine_environment(separate_process=False) | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


def test_the_declared_plugin_is_ours():
    from tierstore_vllm.plugin import register

    assert declared().load() is register


def test_registering_is_cheap_and_may_be_repeated():
    said = run(f"""
import sys
import {FACTORY} as factory
from tierstore_vllm.plugin import register
register()
register()
print([name for name in {HEAVY} if name in sys.modules])
print(factory.KVConnectorFactory.get_connector_class_by_name("TierStoreConnector").__name__)
""")
    assert said.splitlines()[-2:] == ["[]", "TierStoreConnector"]


def test_a_vllm_without_the_factory_goes_on_with_one_warning():
    said = run(f"""
import sys, logging
sys.modules["{FACTORY}"] = None
logging.basicConfig(stream=sys.stdout)
from tierstore_vllm.plugin import register
register()
print("goes on")
""")
    assert said.count("kv_connector_module_path") == 1
    assert said.splitlines()[-1] == "goes on"


def test_a_child_that_was_given_by_module_path_is_known_by_name_too():
    said = run("""
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
child = {
    "kv_connector": "TierStoreConnector",
    "kv_connector_module_path": "tierstore_vllm",
    "kv_role": "kv_both",
}
KVConnectorFactory.supports_hma_config(
    KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]},
    )
)
stats = MultiConnector.build_kv_connector_stats({"TierStoreConnector": {"hit_chunks": 3}})
print(stats.reduce())
""")
    assert said.splitlines()[-1] == "{'TierStoreConnector': {'hit_chunks': 3}}"
