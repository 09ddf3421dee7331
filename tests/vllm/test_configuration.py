"""Configurations that cannot work: refused at start with a remedy, or no cache with one warning."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierstore.errors import ConfigError

pytestmark = pytest.mark.vllm

MEMORY_ONLY = {"version": 1, "primary": {"capacity": "16MiB"}}


def make_connector(extra: dict[str, Any], **transfer: Any) -> object:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tierstore_vllm import TierStoreConnector

    arguments = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | transfer
    config = KVTransferConfig(
        kv_connector="TierStoreConnector", kv_connector_extra_config=extra, **arguments
    )
    cache_config = SimpleNamespace(prefix_caching_hash_algo="sha256")
    vllm_config = SimpleNamespace(kv_transfer_config=config, cache_config=cache_config)
    return TierStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, None)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "expected the one key 'tierstore.config'"),
        ({"tierstore.confg": MEMORY_ONLY}, "expected the one key .*tierstore.confg"),
        ({"tierstore.config": MEMORY_ONLY, "block_size": 64}, "expected the one key .*block_size"),
        ({"tierstore.config": 5}, "the path of a YAML file or the same mapping inline"),
        ({"tierstore.config": "/no/such/file.yaml"}, "/no/such/file.yaml: cannot be read"),
        ({"tierstore.config": MEMORY_ONLY | {"secondry": []}}, "secondry"),
    ],
)
def test_a_wrong_configuration_is_refused_in_words(extra: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_connector(extra)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_one_way_role_is_refused(role: str):
    with pytest.raises(ConfigError, match="kv_role: expected 'kv_both'"):
        make_connector({"tierstore.config": MEMORY_ONLY}, kv_role=role)


def test_the_policy_that_fails_requests_is_warned_of(caplog: pytest.LogCaptureFixture):
    make_connector({"tierstore.config": MEMORY_ONLY})
    assert "recompute" not in caplog.text
    make_connector({"tierstore.config": MEMORY_ONLY}, kv_load_failure_policy="fail")
    assert caplog.text.count("set it to 'recompute'") == 1


def test_vllm_is_told_the_layout_that_is_preferred_and_what_is_not_needed():
    from vllm.config.cache import _layout_from_name

    from tierstore_vllm import TierStoreConnector

    assert TierStoreConnector.get_required_kvcache_layout(None) == "LBHNC"
    assert _layout_from_name("LBHNC").name == "LBHNC"
    assert not TierStoreConnector.requires_piecewise_for_cudagraph({})
    assert not make_connector({"tierstore.config": MEMORY_ONLY}).requires_kv_delivery


def test_an_unknown_key_ends_the_engine_at_its_start_with_the_remedy(tmp_path: Path):
    from engine import Round, run_engine
    from scenario import Scenario
    from tiny_models import DTYPES, build_model

    scenario = Scenario(build_model("llama", tmp_path), DTYPES["llama"], 32)
    config = MEMORY_ONLY | {"primry": {}}
    rounds = {"cold": Round(prompts=scenario.first[:1])}
    job = scenario.job(rounds, config=config, separate_process=False)
    with pytest.raises(RuntimeError, match=r"ConfigError: .*primry"):
        run_engine(job, tmp_path)


def test_a_path_that_cannot_be_used_leaves_an_engine_without_a_cache(tmp_path: Path):
    from engine import Round, run_engine
    from scenario import Scenario, tier_config
    from tiny_models import DTYPES, build_model

    scenario = Scenario(build_model("llama", tmp_path), DTYPES["llama"], 32)
    (tmp_path / "file").touch()
    config = tier_config("file", tmp_path / "file" / "tier")
    round_ = Round(prompts=scenario.first[:12])  # without those that share a prefix
    result = run_engine(scenario.job({"one": round_, "two": round_}, config=config), tmp_path)
    assert {answer.cached for answer in result.rounds["two"]} == {0}
    assert [a.tokens for a in result.rounds["two"]] == [a.tokens for a in result.rounds["one"]]
    assert result.log.count("tierstore caches nothing: cause=") == 1
    assert "move the file away" in result.log
