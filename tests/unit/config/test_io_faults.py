"""`io.faults`: rules in the configuration, refused unless the environment allows them."""

import logging

import pytest
from store_kit import Chunks, config_of, misses

from tierstore.config import FaultRule, load_config, to_mapping
from tierstore.errors import BackendError, ConfigError
from tierstore.faults import ALLOW_FAULTS
from tierstore.metrics import Counters
from tierstore.tier.opening import check_tiers, open_stack

CHUNKS = Chunks(65_536)


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv(ALLOW_FAULTS, "1")


def config_with(path, *rules, **more):
    return config_of(path, io={"threads": 1, "faults": list(rules)}, **more)


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_faults_are_refused_where_the_environment_does_not_allow_them(tmp_path, monkeypatch, value):
    monkeypatch.delenv(ALLOW_FAULTS, raising=False)
    if value is not None:
        monkeypatch.setenv(ALLOW_FAULTS, value)
    config = config_with(tmp_path / "tier", {"kind": "error"})
    parsed = load_config(config)
    for opening in (
        lambda: CHUNKS.open(config),
        lambda: check_tiers(parsed, CHUNKS.manifest, rank_count=1),
        lambda: open_stack(parsed, CHUNKS.manifest, rank_count=1, counters=Counters()),
    ):
        with pytest.raises(ConfigError, match=rf"'disk'.*{ALLOW_FAULTS}=1"):
            opening()
    assert not (tmp_path / "tier").exists()


def test_a_tier_with_faults_says_so_loudly(tmp_path, allowed, caplog):
    with (
        caplog.at_level(logging.WARNING),
        CHUNKS.open(config_with(tmp_path, {"kind": "latency", "latency": "1ms"})),
    ):
        pass
    (record,) = [one for one in caplog.records if "FAULTS ARE INJECTED" in one.getMessage()]
    assert "secondary=disk" in record.getMessage()
    assert "kind='latency'" in record.getMessage()


@pytest.mark.parametrize(
    ("backend", "rule"),
    [
        ("file", {"kind": "error", "error": "ENOSPC", "calls": ["pwritev"]}),
        ("lmdb", {"kind": "error", "calls": ["database.commit"], "files": "rank0/payload"}),
    ],
)
def test_a_switch_starts_and_ends_a_game_day(tmp_path, allowed, backend, rule):
    switch = tmp_path / "on"
    config = config_with(tmp_path / "tier", rule | {"switch": str(switch)}, backend=backend)
    with CHUNKS.open(config) as store:
        CHUNKS.put(store, range(8))
        store.flush()
        switch.touch()
        CHUNKS.put(store, range(8, 16))
        with pytest.raises(BackendError, match="tier disk: 8 chunks"):
            store.flush()
        switch.unlink()
        store.flush()
    with CHUNKS.open(config) as store:
        assert CHUNKS.found(store, range(16)) == list(range(16))


def test_reads_that_lie_are_misses(tmp_path, allowed):
    with CHUNKS.open(config_of(tmp_path)) as store:
        CHUNKS.put(store, range(8))
    flip = {"kind": "flip", "calls": ["preadv"], "files": "rank0/*.seg", "at": "5000B"}
    with CHUNKS.open(config_with(tmp_path, flip)) as store:
        assert len(CHUNKS.found(store, range(8))) < 8
        assert set(misses(store)) == {"corrupt"}


def test_a_tier_that_is_opened_again_counts_on(tmp_path, allowed):
    rule = {"kind": "error", "calls": ["pwritev"], "nth": 2, "times": 1, "files": "rank0/*.seg"}
    config = config_with(tmp_path, rule)
    failures = 0
    for number in range(3):
        with CHUNKS.open(config) as store:
            CHUNKS.put(store, [number])
            try:
                store.flush()
            except BackendError:
                failures += 1
    assert failures == 1


def test_rules_survive_the_way_to_a_mapping_and_back(tmp_path):
    config = load_config(
        config_with(
            tmp_path,
            {"kind": "torn", "error": "EROFS", "at": "700B", "switch": "on", "times": 3},
            {"kind": "latency", "latency": "20ms", "probability": 0.5, "calls": ["open", "flush"]},
        )
    )
    assert load_config(to_mapping(config)) == config
    first, second = config.secondary[0].io.faults
    assert first.at_bytes == 700
    assert first.switch.is_absolute()
    assert second == FaultRule(
        kind="latency", latency_seconds=0.02, probability=0.5, calls=("open", "flush")
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "secondary\\[0\\].io.faults\\[0\\].kind: this key is required"),
        ({"kind": "sorrow"}, "kind: expected 'error'"),
        ({"kind": "error", "error": "EPLEASE"}, "error: expected the name of an errno"),
        ({"kind": "error", "nht": 1}, "unknown key; did you mean 'nth'?"),
        ({"kind": "error", "nth": 0}, "nth: must be greater"),
        ({"kind": "error", "probability": 2}, "probability: must be less"),
        ({"kind": "latency", "latency": True}, "latency: expected a duration"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_path(tmp_path, rule, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_with(tmp_path, rule))
