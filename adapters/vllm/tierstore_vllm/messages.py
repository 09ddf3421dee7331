"""What the two halves of the connector tell each other.

    scheduler -> worker, every step  StepMetadata   commands, and the requests that wait for loads
    worker -> scheduler, every step  WorkerReport   answers and LoRA adapters, merged over the ranks
                                                    by vLLM; where it is asked for, a WorkerHello
                                                    of each: whose bytes these are

All of them are pickled by vLLM, so they hold plain data and stay small.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierstore.manifest import Manifest
from tierstore.transfer import FailureReason, JobId, StepPlan, TransferDone

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = [
    "Adapter",
    "AdapterClaim",
    "AdapterUse",
    "RankAnswer",
    "RankTally",
    "StepMetadata",
    "WorkerHello",
    "WorkerReport",
]


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """One rank's description of its KV caches.

    Only the worker sees the real strides, and with per-layer specs only the worker knows the page
    of every layer; so the manifest is made there and the scheduler adopts it. It travels in a
    report, since of vLLM's own handshake `MultiConnector` passes on one connector's part alone.
    """

    manifest: Manifest | None
    """None: this rank caches nothing."""
    refusal: str = ""
    """Why not, for the scheduler's log."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM's block hashes know it: not by its weights."""

    name: str
    path: str

    @classmethod
    def of(cls, lora_request: "LoRARequest") -> Self:
        """Name the adapter of a request."""
        return cls(lora_request.lora_name, lora_request.lora_path)


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """From now on a rank computes the requests of an adapter with other weights than before."""

    rank: int
    adapter: Adapter
    digest: bytes
    """Of the weights in the rank's memory; empty: it cannot tell."""


@dataclass(frozen=True, slots=True)
class AdapterClaim:
    """The weights that computed the chunks of a load, for the ranks to compare with their own."""

    adapter: Adapter
    lora_int_id: int
    """Under which the request that waits for the load will be computed."""
    digests: dict[int, bytes]
    """By rank."""


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One engine step's work for every rank. Empty in most steps, never None."""

    plan: StepPlan = field(default_factory=StepPlan)
    load_requests: dict[JobId, str] = field(default_factory=dict)
    """The request that waits for each `Load` of the plan."""
    failed_requests: tuple[str, ...] = ()
    """Requests whose load was announced to vLLM but could not be planned. The worker reports them
    as finished and failed, which makes vLLM compute them."""
    claims: dict[JobId, AdapterClaim] = field(default_factory=dict)
    """Of those loads whose requests name an adapter."""
    asks_for_adapters: bool = False
    """The ranks shall tell of all adapters, not only of those that changed."""
    asks_for_hello: bool = False
    """The scheduler half does not know yet whose bytes the ranks hold."""

    def is_empty(self) -> bool:
        """Return whether there is nothing to do; a request that waits for a load comes with one."""
        return not (
            self.plan or self.failed_requests or self.asks_for_adapters or self.asks_for_hello
        )

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Leave out the fields where all of them are empty."""
        if self.is_empty():
            return type(self), ()
        return type(self), (
            self.plan,
            self.load_requests,
            self.failed_requests,
            self.claims,
            self.asks_for_adapters,
            self.asks_for_hello,
        )


@dataclass(slots=True)
class RankAnswer:
    """What ranks have said about one job.

    A rank answers once, or twice if reads of a load missed their deadline (see `TransferDone`):
    first that they are late, then how they ended.
    """

    answered_count: int
    """Ranks that have answered at least once."""
    settled_count: int
    """Ranks that have nothing more to say."""
    ok: bool
    failed: dict[int, FailureReason]
    """What failed on any rank, and no later answer changes."""
    late: dict[int, FailureReason]
    """What was late on any rank."""

    @classmethod
    def of(cls, done: TransferDone, *, again: bool) -> Self:
        """Wrap one answer of one rank; `again` if the rank has answered before."""
        late: dict[int, FailureReason] = {
            i: why for i, why in done.failed.items() if why is FailureReason.DEADLINE
        }
        return cls(
            answered_count=0 if again else 1,
            settled_count=0 if late else 1,
            ok=done.ok,
            failed={i: why for i, why in done.failed.items() if i not in late},
            late=late,
        )

    def merge(self, other: Self) -> None:
        """Add what other ranks, or the same rank later, have said."""
        self.answered_count += other.answered_count
        self.settled_count += other.settled_count
        self.ok = self.ok and other.ok
        self.failed = other.failed | self.failed
        self.late = other.late | self.late


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The answers of one step, of one rank or merged over several."""

    answers: dict[JobId, RankAnswer] = field(default_factory=dict)
    has_given_up: bool = False
    """Some rank moves no bytes any more."""
    adapter_uses: list[AdapterUse] = field(default_factory=list)
    """In the order in which each rank came to know them, before the answers."""
    hellos: dict[int, WorkerHello] = field(default_factory=dict)
    """By rank, as far as the scheduler half has asked for them."""

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        return not (self.answers or self.has_given_up or self.adapter_uses or self.hellos)

    def add(self, job_id: JobId, answer: RankAnswer) -> None:
        """Merge what was said about one job."""
        known = self.answers.setdefault(job_id, answer)
        if known is not answer:
            known.merge(answer)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge another rank's report of the same step into this one."""
        assert isinstance(other, WorkerReport), type(other)
        for job_id, answer in other.answers.items():
            self.add(job_id, answer)
        self.has_given_up |= other.has_given_up
        self.adapter_uses += other.adapter_uses
        self.hellos |= other.hellos
        return self


class RankTally:
    """Collects reports over steps until every rank has answered (scheduler side).

    Ranks answer in different steps. Holds one small object per job that some ranks still work on.
    """

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._open = WorkerReport()
        self._late: set[JobId] = set()
        """Jobs whose first answer was given out."""
        self._last: WorkerReport | None = None

    def missed(self, reports: Sequence[WorkerReport]) -> Sequence[WorkerReport]:
        """Return those reports, of the last ones of all steps, that were not added."""
        added = [i for i, report in enumerate(reports) if report is self._last]
        return reports[added[-1] + 1 if added else 0 :]

    def add(self, report: WorkerReport) -> list[TransferDone]:
        """Add one step's report; return the answers that now hold for all ranks.

        A job is answered once, or twice if it was late on some rank: first when every rank has
        answered, then when every rank has settled.
        """
        self._last = report
        dones = []
        for job_id, answer in report.answers.items():
            self._open.add(job_id, answer)
            total = self._open.answers[job_id]
            if total.settled_count == self._rank_count:
                dones.append(TransferDone(job_id=job_id, ok=total.ok, failed=total.failed))
                del self._open.answers[job_id]
                self._late.discard(job_id)
            elif total.answered_count == self._rank_count and job_id not in self._late:
                # A slot that some rank still reads into is late, whatever other ranks answered.
                failed = total.failed | total.late
                dones.append(TransferDone(job_id=job_id, ok=False, failed=failed))
                self._late.add(job_id)
        return dones
