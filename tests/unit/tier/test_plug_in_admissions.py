"""Admissions of other packages: followed where they name chunks that they were asked about."""

import pytest
from store_kit import Chunks, config_of
from written_plug_in import write_plug_in

from tierstore.testing.admission_conformance import AdmissionConformance
from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.admission import make_admission
from tierstore.tier.admission.checked import CheckedAdmission
from tierstore.tier.admission.on_evict import OnEvict
from tierstore.tier.admission.second_touch import SecondTouch
from tierstore.tier.admission.write_through import WriteThrough

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


class TestChecked(AdmissionConformance):
    @pytest.fixture(autouse=True, params=[WriteThrough, OnEvict, SecondTouch])
    def rule(self, request):
        self.kind = request.param

    def make(self):
        return CheckedAdmission(self.kind(), "rule")


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"admission_{tmp_path.name}"

    def write(base, method, foul):
        source = SOURCE.format(base=base, name=method, foul=foul)
        write_plug_in(tmp_path, "tierstore.admissions", name, source, attribute="make")
        return name

    return write


@pytest.mark.parametrize("foul", FOULS)
@pytest.mark.parametrize(("base", "method"), CALLS)
def test_an_admission_that_fails_or_lies_costs_neither_a_byte_nor_the_store(
    install, tmp_path, base, method, foul
):
    """Every `get` compares all bytes. Which chunks go down is what the admission has said."""
    chunks = Chunks()
    config = config_of(tmp_path / "tier", primary="1MiB", cascade=install(base, method, foul))
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


@pytest.mark.parametrize(
    ("kind", "goes_down"),
    [(WriteThrough, "on_resident"), (OnEvict, "on_victims"), (SecondTouch, "on_touched")],
)
def test_after_a_failure_a_built_in_rule_goes_on_and_is_told_of_once(kind, goes_down, caplog):
    class Fails(kind):
        def on_promoted(self, keys, use=None):
            raise RuntimeError("not now")

    admission = CheckedAdmission(Fails(), "rule")
    keys = keys_of(1, 2, 3)
    for _ in range(3):
        admission.on_promoted(keys[:1])
    for call in ("on_resident", "on_touched", "on_victims"):
        asked = list(getattr(admission, call)(keys))
        assert set(asked) <= set(keys)
        assert bool(asked) == (call == goes_down)
        admission.on_admitted(asked)
    assert set(keys[1:]) <= set(admission.admitted(keys))
    (record,) = caplog.records
    assert "cascade=rule cause=RuntimeError: not now" in record.getMessage()


def test_a_plug_in_is_checked_and_a_built_in_rule_is_not(install):
    name = install("OnEvict", "on_touched", "pass")
    assert isinstance(make_admission(name), CheckedAdmission)
    assert isinstance(make_admission("on_evict"), OnEvict)
