"""Sleep mode unmaps the KV caches: when the worker half says that it is done, nothing copies.

Method: a real worker half over an executor that stands still, which no real one does on demand.
"""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tierstore.config import load_config
from tierstore.key import OffloadKey
from tierstore.transfer import (
    Command,
    Demote,
    FailureReason,
    JobId,
    Load,
    LoadPart,
    Offload,
    StepPlan,
    TransferDone,
)
from tierstore_vllm.messages import StepMetadata
from tierstore_vllm.worker import WorkerHalf

pytestmark = pytest.mark.vllm

JOB = JobId(1)
LOAD = Load(
    job_id=JOB, parts=(LoadPart(group_idx=0, block_ids=np.array([[1]]), slots=np.array([0])),)
)
OFFLOAD = Offload(job_id=JOB, group_idx=0, block_ids=np.array([[1]]), slots=np.array([0]))
DEMOTE = Demote(
    job_id=JOB,
    tier_idx=0,
    group_idx=0,
    keys=(OffloadKey(b"k" * 44),),
    slots=np.array([0]),
    places=(),
    owner=1,
)
LATE = TransferDone(job_id=JOB, ok=False, failed={0: FailureReason.DEADLINE})


class StandingExecutor:
    """Accepts commands and answers what it is told to."""

    def __init__(self, answers: list[TransferDone]) -> None:
        self.answers = answers
        self.is_closed = False

    def submit(self, commands: list[Command]) -> None:
        """Accept."""

    def drain(self, timeout_seconds: float) -> list[TransferDone]:
        answers, self.answers = self.answers, []
        return answers

    def close(self, timeout_seconds: float) -> None:
        self.is_closed = True


def submitted(command: Command, answers: list[TransferDone]) -> tuple[WorkerHalf, StandingExecutor]:
    config = load_config({"primary": {"capacity": "1MiB"}})
    engine = SimpleNamespace(max_concurrent_batches=1)
    half = WorkerHalf(cast("Any", engine), cast("Any", None), config)
    executor = StandingExecutor(answers)
    half._executor = cast("Any", executor)
    step = StepMetadata(
        StepPlan(commands=(command,)), {JOB: "r"} if isinstance(command, Load) else {}
    )
    half.start_transfers(step)
    half.start_offloads(step)
    return half, executor


@pytest.mark.parametrize("command", [LOAD, OFFLOAD])
def test_a_copy_that_does_not_end_before_sleep_is_stopped_and_answered_once(command) -> None:
    half, executor = submitted(command, [])
    half.suspend()
    half.suspend()
    assert executor.is_closed
    report = half.take_report()
    assert report is not None
    assert report.has_given_up
    assert list(report.answers) == [JOB]
    results = half.take_results()
    assert results.finished_recving == results.failed_recving
    assert results.finished_recving == ({"r"} if command is LOAD else set())
    assert not half.take_results().finished_recving


@pytest.mark.parametrize(("command", "answers"), [(DEMOTE, []), (LOAD, [LATE])])
def test_what_no_longer_touches_the_kv_caches_outlives_sleep(command, answers) -> None:
    half, executor = submitted(command, answers)
    half.suspend()
    half.suspend()
    assert not executor.is_closed
    assert not (report := half.take_report()) or not report.has_given_up
