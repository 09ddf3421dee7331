"""What the two halves of the connector tell each other.

    worker -> scheduler, once        WorkerHello    whose bytes these are, as the worker laid them out
    scheduler -> worker, every step  StepMetadata   commands, and the requests that wait for loads
    worker -> scheduler, every step  WorkerReport   answers, merged over the ranks by vLLM

All of them are pickled by vLLM, so they hold plain data and stay small.
"""

from dataclasses import dataclass, field
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierstore.manifest import Manifest
from tierstore.transfer import FailureReason, JobId, StepPlan, TransferDone

__all__ = ["RankAnswer", "RankTally", "StepMetadata", "WorkerHello", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """One rank's description of its KV caches.

    Only the worker sees the real strides, and with per-layer specs only the worker knows the page of
    every layer; so the manifest is made there and the scheduler adopts it.
    """

    manifest: Manifest | None
    """None: this rank caches nothing."""
    refusal: str = ""
    """Why not, for the scheduler's log."""


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One engine step's work for every rank. Empty in most steps, never None."""

    plan: StepPlan = field(default_factory=StepPlan)
    load_requests: dict[JobId, str] = field(default_factory=dict)
    """The request that waits for each `Load` of the plan."""
    failed_requests: tuple[str, ...] = ()
    """Requests whose load was announced to vLLM but could not be planned. The worker reports them
    as finished and failed, which makes vLLM compute them."""


@dataclass(slots=True)
class RankAnswer:
    """How far one job is over the ranks: who answered, and what failed on any of them."""

    rank_count: int = 1
    ok: bool = True
    failed: dict[int, FailureReason] = field(default_factory=dict)

    def merge(self, other: Self) -> None:
        """Add the answers of further ranks; a chunk that failed anywhere has failed."""
        self.rank_count += other.rank_count
        self.ok = self.ok and other.ok
        self.failed = {**other.failed, **self.failed}


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The jobs that were answered in this step, on one rank or merged over several."""

    answers: dict[JobId, RankAnswer] = field(default_factory=dict)

    @classmethod
    def of(cls, dones: list[TransferDone]) -> Self:
        """Wrap one rank's answers."""
        return cls({done.job_id: RankAnswer(1, done.ok, done.failed) for done in dones})

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge another rank's report of the same step into this one."""
        assert isinstance(other, WorkerReport), type(other)
        _merge(self.answers, other.answers)
        return self


class RankTally:
    """Collects reports over steps until every rank has answered a job (scheduler side).

    Ranks answer in different steps. Holds one small object per job that some ranks still work on.
    """

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._partial: dict[JobId, RankAnswer] = {}

    def add(self, report: WorkerReport) -> list[TransferDone]:
        """Add one step's report; return the jobs that all ranks have answered, each once."""
        _merge(self._partial, report.answers)
        complete = {
            job_id: self._partial.pop(job_id)
            for job_id in report.answers
            if self._partial[job_id].rank_count >= self._rank_count
        }
        return [
            TransferDone(job_id=job_id, ok=answer.ok, failed=answer.failed)
            for job_id, answer in complete.items()
        ]


def _merge(into: dict[JobId, RankAnswer], answers: dict[JobId, RankAnswer]) -> None:
    for job_id, answer in answers.items():
        if job_id in into:
            into[job_id].merge(answer)
        else:
            into[job_id] = answer
