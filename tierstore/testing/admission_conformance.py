"""What every admission has to do, whatever its rule: a suite to inherit from.

class TestMyAdmission(AdmissionConformance):
    def make(self):
        return MyAdmission()
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.key import OffloadKey
from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.testing.policy_conformance import keys_of
from tierstore.tier.admission.protocol import Admission

__all__ = ["AdmissionConformance"]

_USE = UseContext.of("request-1", parent_id="request-0", turn=1, priority=2)
_COUNT = 8


class AdmissionConformance(ABC):
    """Inherit, name the class `Test...`, implement `make`; pytest does the rest."""

    @abstractmethod
    def make(self) -> Admission:
        """Return a new admission."""

    def holding(self, *numbers: int) -> Admission:
        """Return an admission that has taken chunks which are in memory, whatever its rule."""
        admission = self.make()
        admission.on_resident(keys_of(*numbers))
        admission.on_admitted(keys_of(*numbers))
        return admission

    def test_arrivals_are_asked_for_as_the_rule_says(self) -> None:
        """Who admits arrivals asks for each of them."""
        admission = self.make()
        asked = admission.on_resident(keys_of(1, 2, 3))
        assert list(asked) == keys_of(1, 2, 3) or not admission.admits_arrivals

    def test_victims_are_asked_for_as_the_rule_says(self) -> None:
        """Who admits victims asks for those that it has not; others ask for none."""
        admission = self.make()
        arrived = admission.on_resident(keys_of(1, 2, 3))
        admission.on_admitted(arrived)
        missing = [key for key in keys_of(3, 2, 1) if key not in set(arrived)]
        asked = list(admission.on_victims(keys_of(3, 2, 1)))
        assert asked == (missing if admission.admits_victims else [])

    def test_what_found_no_room_is_asked_for_again(self) -> None:
        """Asking changes nothing: only `on_admitted` does."""
        admission = self.make()
        admission.on_resident(keys_of(1, 2, 3))
        for _ in range(2):
            assert list(admission.on_victims(keys_of(3, 2))) == list(
                admission.on_victims(keys_of(3, 2))
            )

    def test_an_admitted_chunk_is_not_asked_for_again(self) -> None:
        """It would be written twice."""
        admission = self.holding(1, 2)
        assert not admission.on_touched(keys_of(1, 2))
        assert not admission.on_victims(keys_of(2, 1))
        assert admission.admitted(keys_of(1, 2)) == keys_of(1, 2)

    def test_a_promoted_chunk_is_admitted(self) -> None:
        """The tier has it."""
        admission = self.make()
        admission.on_promoted(keys_of(1, 2))
        assert not admission.on_touched(keys_of(1, 2))
        assert not admission.on_victims(keys_of(2, 1))
        assert admission.admitted(keys_of(1, 2)) == keys_of(1, 2)
        assert admission.on_evicted(keys_of(2, 1)) == 0

    def test_no_admitted_chunk_is_lost_when_it_leaves_memory(self) -> None:
        """The tier has it, or was asked for it."""
        assert self.holding(1, 2).on_evicted(keys_of(2, 1)) == 0

    def test_a_chunk_whose_record_is_gone_is_treated_like_one_without_a_record(self) -> None:
        """Withdrawn, it is asked for as often as a chunk that was never taken."""
        withdrawn, fresh = self.holding(1, 2), self.make()
        fresh.on_resident(keys_of(1, 2))
        withdrawn.on_withdrawn(keys_of(1))
        assert list(withdrawn.on_victims(keys_of(2, 1))) == list(fresh.on_victims(keys_of(1)))
        assert list(withdrawn.on_touched(keys_of(1, 2))) == list(fresh.on_touched(keys_of(1)))

    def test_lost_records_withdraw_all_but_what_is_being_written(self) -> None:
        """What is on its way will be recorded."""
        lost, withdrawn = self.holding(1, 2, 3), self.holding(1, 2, 3)
        lost.on_records_lost(set(keys_of(2)))
        withdrawn.on_withdrawn(keys_of(1, 3))
        assert set(keys_of(2)) <= set(lost.admitted(keys_of(1, 2, 3)))
        assert lost.admitted(keys_of(1, 2, 3)) == withdrawn.admitted(keys_of(1, 2, 3))
        assert list(lost.on_victims(keys_of(3, 2, 1))) == list(
            withdrawn.on_victims(keys_of(3, 2, 1))
        )

    def test_after_a_reset_it_is_as_new(self) -> None:
        """Nothing of what came before is remembered, but for what is being written."""
        admission = self.holding(1, 2)
        admission.on_evicted(keys_of(2))
        admission.on_resident(keys_of(3))
        admission.on_evicted(keys_of(3))
        admission.reset(set())
        fresh = self.make()
        for one in (2, 3, 1):
            assert list(admission.on_resident(keys_of(one))) == list(
                fresh.on_resident(keys_of(one))
            )
        assert list(admission.on_touched(keys_of(1, 2))) == list(fresh.on_touched(keys_of(1, 2)))
        assert list(admission.on_victims(keys_of(3, 2))) == list(fresh.on_victims(keys_of(3, 2)))

    def test_what_is_being_written_at_a_reset_is_not_asked_for(self) -> None:
        """A reset that keeps records lets demotes go on."""
        admission = self.holding(1, 2)
        admission.reset(set(keys_of(1)))
        assert not admission.on_touched(keys_of(1))
        assert not admission.on_victims(keys_of(1))

    def test_unknown_chunks_do_no_harm(self) -> None:
        """What it is told of chunks that it never saw, or of none, changes nothing."""
        admission = self.make()
        admission.on_withdrawn(keys_of(1))
        admission.on_admitted(())
        admission.on_promoted(())
        for asked in (
            admission.on_resident(()),
            admission.on_touched(()),
            admission.on_victims(()),
        ):
            assert not asked
        assert admission.on_evicted(()) == 0
        assert admission.admitted(()) == []

    def test_who_needs_no_use_answers_without_it(self) -> None:
        """Callers need not make uses for those that do not ask for them."""
        told, untold = self.make(), self.make()
        if told.needs_use:
            return
        for number in (1, 2, 1):
            for admission, use in ((told, _USE), (untold, UNKNOWN_USE)):
                admission.on_resident(keys_of(number), use)
            assert list(told.on_touched(keys_of(number), _USE)) == list(
                untold.on_touched(keys_of(number), UNKNOWN_USE)
            )
            assert told.on_evicted(keys_of(number)) == untold.on_evicted(keys_of(number))

    def test_answers_are_some_of_the_keys_in_their_order_and_none_that_is_admitted(self) -> None:
        """Random lives of chunks, with the sets of resident and admitted keys as the model."""

        # Not a decorated method: Hypothesis refuses one that several subclasses inherit.
        @given(
            steps=st.lists(
                st.tuples(
                    st.sampled_from(["come", "come", "promote", "touch", "leave", "withdraw"]),
                    st.lists(st.integers(0, _COUNT), min_size=1, max_size=_COUNT, unique=True),
                    st.integers(0, _COUNT),
                ),
                max_size=40,
            )
        )
        @settings(max_examples=150, deadline=None)
        def check(steps: Sequence[tuple[str, list[int], int]]) -> None:
            _compare_with_sets(self.make(), steps)

        check()


def _compare_with_sets(admission: Admission, steps: Sequence[tuple[str, list[int], int]]) -> None:
    resident: set[OffloadKey] = set()
    admitted: set[OffloadKey] = set()

    def take(asked: Sequence[OffloadKey], keys: Sequence[OffloadKey], room: int) -> None:
        chosen = set(asked)
        assert list(asked) == [key for key in keys if key in chosen]
        assert not chosen & admitted, "asked for twice"
        admission.on_admitted(asked[:room])
        admitted.update(asked[:room])

    for action, numbers, room in steps:
        keys = [key for key in keys_of(*numbers) if (key in resident) != (action in _ARRIVING)]
        if action == "come":
            resident.update(keys)
            take(admission.on_resident(keys, _USE), keys, room)
        elif action == "promote":
            resident.update(keys)
            admitted.update(keys)
            admission.on_promoted(keys, _USE)
        elif action == "touch":
            take(admission.on_touched(keys, _USE), keys, room)
        elif action == "withdraw":
            admission.on_withdrawn(keys)
            admitted.difference_update(keys)
        else:
            take(admission.on_victims(keys), keys, room)
            unasked_count = sum(key not in admitted for key in keys)
            assert 0 <= admission.on_evicted(keys) <= unasked_count
            resident.difference_update(keys)
            admitted.difference_update(keys)
        known = admission.admitted(sorted(resident))
        assert known == sorted(known)
        assert admitted <= set(known) <= resident


_ARRIVING = ("come", "promote")
