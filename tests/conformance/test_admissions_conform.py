import pytest

from tierstore.errors import ConfigError
from tierstore.testing.admission_conformance import AdmissionConformance
from tierstore.tier.admission import ADMISSIONS, make_admission
from tierstore.tier.admission.on_evict import OnEvict
from tierstore.tier.admission.second_touch import SecondTouch
from tierstore.tier.admission.write_through import WriteThrough


class TestWriteThrough(AdmissionConformance):
    def make(self):
        return WriteThrough()


class TestOnEvict(AdmissionConformance):
    def make(self):
        return OnEvict()


class TestSecondTouch(AdmissionConformance):
    def make(self):
        return SecondTouch()


def test_admissions_are_made_by_name_and_share_nothing():
    assert {name: type(make_admission(name)) for name in ADMISSIONS} == {
        "write_through": WriteThrough,
        "on_evict": OnEvict,
        "second_touch": SecondTouch,
    }
    assert make_admission("on_evict") is not make_admission("on_evict")


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"expected 'write_through', 'on_evict' or .*got 'on_f"):
        make_admission("on_full")
