"""The commands of one rank that have no final answer yet, and what is to be told of the others."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tierstore.transfer import (
    Command,
    Demote,
    FailureReason,
    JobId,
    Load,
    Offload,
    Release,
    TransferDone,
)
from tierstore_vllm.messages import RankAnswer, WorkerReport

__all__ = ["OpenCommands"]


class OpenCommands:
    """Answers each command once, or twice if it was late, and each load that a request waits for.

    Answers go into the report for the scheduler half, finished loads into the results for vLLM.
    """

    def __init__(self, kept_report_count: int) -> None:
        """Keep so many of the last reports."""
        self._commands: dict[JobId, Command] = {}
        self._load_requests: dict[JobId, str] = {}
        self._late: set[JobId] = set()
        """Open commands whose first answer said that they are late."""
        self._results = KVConnectorTransferResults()
        self._recent_reports: deque[WorkerReport] = deque(maxlen=kept_report_count)
        self.report = WorkerReport()
        """What the next report says; others may add to it."""

    def __len__(self) -> int:
        """Return how many commands are open."""
        return len(self._commands)

    def __contains__(self, job_id: JobId) -> bool:
        """Return whether a command is open."""
        return job_id in self._commands

    @property
    def waiting_requests(self) -> Collection[str]:
        """The requests that wait for a load."""
        return self._load_requests.values()

    @property
    def recent_reports(self) -> Sequence[WorkerReport]:
        """The last reports, as many as vLLM may not have looked at yet."""
        return tuple(self._recent_reports)

    def accept(self, commands: Iterable[Command]) -> None:
        """Take commands that are about to be submitted."""
        self._commands.update((command.job_id, command) for command in commands)

    def await_loads(self, load_requests: Mapping[JobId, str]) -> None:
        """Note which requests wait for loads that come with this step."""
        self._load_requests.update(load_requests)

    def fail_requests(self, request_ids: Iterable[str]) -> None:
        """Report loads as failed that could not be planned: there is no command for them."""
        failed = set(request_ids)
        self._results.finished_recving.update(failed)
        self._results.failed_recving.update(failed)

    def answer(self, dones: Iterable[TransferDone]) -> None:
        """Take the executor's answers."""
        for done in dones:
            answer = RankAnswer.of(done, again=done.job_id in self._late)
            self.report.add(done.job_id, answer)
            if answer.settled_count:
                del self._commands[done.job_id]
                self._late.discard(done.job_id)
            else:
                self._late.add(done.job_id)
            request_id = self._load_requests.pop(done.job_id, None)
            if request_id is not None:
                self._results.finished_recving.add(request_id)
                if not done.ok:
                    self._results.failed_recving.add(request_id)

    def refuse(self, command: Command, reason: FailureReason) -> None:
        """Answer a command as failed that is never submitted."""
        self.accept((command,))
        self.answer((_failure(command, reason),))

    def fail_all(self) -> None:
        """Answer every open command, and report every load that a request waits for, just once."""
        for job_id, command in self._commands.items():
            again = job_id in self._late
            answer = RankAnswer.of(_failure(command, FailureReason.CLOSED), again=again)
            self.report.add(job_id, answer)
        self.fail_requests(self._load_requests.values())
        self._commands.clear()
        self._late.clear()
        self._load_requests.clear()

    def count_copying(self) -> int:
        """Return how many commands may still copy to or from the KV caches."""
        return sum(
            # A load whose deadline passed copies nothing any more.
            isinstance(command, Load | Offload) and job_id not in self._late
            for job_id, command in self._commands.items()
        )

    def take_results(self) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended since the last call."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def take_report(self) -> WorkerReport | None:
        """Return what is to be told since the last call; None: nothing."""
        report = self.report
        if report.is_empty():
            return None
        self.report = WorkerReport()
        self._recent_reports.append(report)
        return report


def _failure(command: Command, reason: FailureReason) -> TransferDone:
    """Answer a command that was never carried out."""
    match command:
        case Offload():
            chunk_count = len(command.slots)
        case Demote():
            chunk_count = len(command.keys)
        case Load():
            # One without promotes has no chunk that could be lost: the first stands for the load.
            chunk_count = max(1, sum(len(promote.keys) for promote in command.promotes))
        case Release():
            chunk_count = 0
    failed = dict.fromkeys(range(chunk_count), reason)
    return TransferDone(job_id=command.job_id, ok=False, failed=failed)
