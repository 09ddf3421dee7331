"""What the halves tell each other, over ranks and steps."""

import itertools
import pickle

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st

from tierstore.transfer import FailureReason, JobId, Load, StepPlan, TransferDone
from tierstore_vllm.messages import (
    Adapter,
    AdapterClaim,
    RankAnswer,
    RankTally,
    StepMetadata,
    WorkerHello,
    WorkerReport,
)

pytestmark = pytest.mark.vllm

JOB = JobId(7)


def answer(failed: dict[int, FailureReason], *, again: bool = False) -> WorkerReport:
    done = TransferDone(job_id=JOB, ok=not failed, failed=failed)
    return WorkerReport({JOB: RankAnswer.of(done, again=again)})


def test_a_job_is_done_when_the_last_rank_has_answered():
    tally = RankTally(3)
    assert tally.add(answer({})) == []
    assert tally.add(answer({2: FailureReason.CORRUPT})) == []
    assert tally.add(answer({})) == [
        TransferDone(job_id=JOB, ok=False, failed={2: FailureReason.CORRUPT})
    ]
    assert tally.add(WorkerReport()) == []


def test_a_late_job_is_answered_when_all_have_answered_and_again_when_all_have_settled():
    tally = RankTally(2)
    assert tally.add(answer({1: FailureReason.DEADLINE, 4: FailureReason.ABSENT})) == []
    late = {1: FailureReason.DEADLINE, 4: FailureReason.ABSENT}
    assert tally.add(answer({})) == [TransferDone(job_id=JOB, ok=False, failed=late)]
    assert tally.add(answer({4: FailureReason.ABSENT}, again=True)) == [
        TransferDone(job_id=JOB, ok=False, failed={4: FailureReason.ABSENT})
    ]


def test_a_chunk_that_is_late_on_one_rank_is_late_even_if_another_rank_lost_it():
    tally = RankTally(2)
    tally.add(answer({0: FailureReason.DEADLINE}))
    first = tally.add(answer({0: FailureReason.CORRUPT}))
    assert first[0].failed == {0: FailureReason.DEADLINE}
    final = tally.add(answer({}, again=True))
    assert final[0].failed == {0: FailureReason.CORRUPT}


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=3, max_size=3), st.data())
def test_every_order_of_answers_gives_one_final_answer(order, lateness, data):
    # Each rank says one or two things; they may arrive in one step or in several.
    said = {
        rank: ([answer({rank: FailureReason.DEADLINE})] if late else [])
        + [answer({9: FailureReason.ABSENT} if rank == 0 else {}, again=late)]
        for rank, late in enumerate(lateness)
    }
    tally, dones = RankTally(3), []
    step = WorkerReport()
    for rank in (number % 3 for number in itertools.chain(order, range(6))):
        if said[rank]:
            step.aggregate(said[rank].pop(0))
            if data.draw(st.booleans()):
                dones += tally.add(step)
                step = WorkerReport()
    dones += tally.add(step)
    assert [d.failed for d in dones if FailureReason.DEADLINE not in d.failed.values()] == [
        {9: FailureReason.ABSENT}
    ]
    assert len(dones) <= (2 if any(lateness) else 1)
    assert FailureReason.DEADLINE not in dones[-1].failed.values()


def test_an_empty_step_is_small():
    assert len(pickle.dumps(StepMetadata())) < 100


@pytest.mark.parametrize(
    "step",
    [
        StepMetadata(),
        StepMetadata(failed_requests=("r",)),
        StepMetadata(asks_for_adapters=True),
        StepMetadata(asks_for_hello=True),
        StepMetadata(StepPlan(fence_job_ids=(JobId(3),))),
        StepMetadata(
            StepPlan(commands=(Load(job_id=JobId(1), parts=()),)),
            {JobId(1): "r"},
            claims={JobId(1): AdapterClaim(Adapter("a", "p"), 1, {0: b"digest"})},
        ),
    ],
)
def test_a_step_says_the_same_in_another_process(step):
    assert pickle.loads(pickle.dumps(step)) == step
    assert step.is_empty() == (step == StepMetadata())


def test_what_ranks_say_of_themselves_is_kept_apart_when_reports_are_merged():
    hellos = {rank: WorkerHello(None, f"why {rank}") for rank in range(3)}
    reports = [WorkerReport(hellos={rank: hello}) for rank, hello in hellos.items()]
    assert not any(report.is_empty() for report in reports)
    merged = WorkerReport()
    for report in reports:
        merged = merged.aggregate(pickle.loads(pickle.dumps(report)))
    assert merged.hellos == hellos


def test_one_rank_that_gave_up_is_heard_among_many():
    report = WorkerReport().aggregate(WorkerReport(has_given_up=True)).aggregate(WorkerReport())
    assert report.has_given_up
