"""Admissions of other packages: followed where they name chunks that they were asked about."""

import pytest
from store_kit import Chunks, config_of
from written_plug_in import installer

SOURCE = """
from tierstore.tier.admission.on_evict import OnEvict
from tierstore.tier.admission.write_through import WriteThrough

calls = [0]

class make({base}):
    def {name}(self, *args):
        answer = super().{name}(*args)
        calls[0] += 1
        if calls[0] > 2:
            {foul}
        return answer
"""

FOULS = [
    "raise RuntimeError('not now')",
    "return None",
    "return 5",
    "return -5",
    "return [None, 5, 'x', b'', b's' * 44, []]",
    "return [b's' * 44]",
    "return [args[0][0][:-1] + b'z']",
    "return list(args[0]) * 2",
    "args[0].clear()",
]
CALLS = [
    *(("WriteThrough", name) for name in ("on_resident", "on_touched", "on_admitted")),
    *(("WriteThrough", name) for name in ("on_promoted", "on_evicted", "reset")),
    *(("OnEvict", name) for name in ("on_victims", "on_touched", "on_evicted")),
]


@pytest.fixture
def install(tmp_path, monkeypatch):
    return installer(tmp_path / "installed", monkeypatch, "tierstore.admissions")


@pytest.mark.parametrize("foul", FOULS)
@pytest.mark.parametrize(("base", "method"), CALLS)
def test_an_admission_that_fails_or_lies_costs_neither_a_byte_nor_the_store(
    install, tmp_path, base, method, foul
):
    """Every `get` compares all bytes. Which chunks go down is what the admission has said."""
    chunks = Chunks()
    name = install(SOURCE.format(base=base, name=method, foul=foul))
    config = config_of(tmp_path / "tier", primary="1MiB", cascade=name)
    config["primary"]["eviction"] = "lru"
    with chunks.open(config) as store:
        for _ in range(2):
            for first in range(0, 48, 8):
                assert chunks.put_each(store, range(first, first + 8)) == [True] * 8
                assert len(chunks.found(store, range(first, first + 8))) == 8
                chunks.found(store, range(first))
        store.flush()
        assert store.check() == []
        store.reset()
        assert chunks.found(store, range(48)) == []
        assert chunks.put(store, range(8)) == 8
        store.flush()
        assert store.check() == []
    with chunks.open(config) as store:
        chunks.found(store, range(48))
