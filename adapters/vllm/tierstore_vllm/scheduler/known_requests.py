"""The requests that vLLM has not finished, and which of them the planner may know."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tierstore.planner import OffloadPlanner
from tierstore.policy.use import UNKNOWN_USE
from tierstore.transfer import JobId
from tierstore_vllm.lora.digests import AdapterRequests
from tierstore_vllm.messages import Adapter, AdapterClaim, AdapterUse
from tierstore_vllm.scheduler.request_params import RequestParams

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["KnownRequests"]


class KnownRequests:
    """All of them, without those that say that they must not be cached.

    A request with a LoRA adapter is unknown to the planner until the ranks have told which weights
    stand behind the adapter's name.
    """

    def __init__(self, planner: OffloadPlanner, adapters: AdapterRequests) -> None:
        self._planner = planner
        self._adapters = adapters
        self._params = RequestParams()
        self._requests: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = self._requests
        """A live view."""

    def add(self, request: "Request") -> None:
        """Get to know a request that has arrived, if it may be cached."""
        if self._params.may_be_cached(request):
            self._requests[request.request_id] = request
            self._introduce(request)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; the planner is told by the caller."""
        self._requests.pop(request_id, None)
        self._adapters.forget_request(request_id)

    def learn(self, uses: Sequence[AdapterUse]) -> None:
        """Take what ranks tell of adapters: requests become known to the planner, or unknown."""
        doubtful = self._adapters.learn(uses)
        if doubtful:
            self._planner.drop_offloads()
            for request_id, request in self._requests.items():
                if request.lora_request and Adapter.of(request.lora_request) in doubtful:
                    self._planner.finish_request(request_id)
        for request_id in self._adapters.waiting():
            request = self._requests[request_id]
            if request.num_computed_tokens:  # its first blocks have passed the planner by
                self._adapters.forget_request(request_id)
            else:
                self._introduce(request)

    def claims(self, load_requests: Mapping[JobId, str]) -> dict[JobId, AdapterClaim]:
        """Return which weights computed the chunks of those loads whose requests name an adapter.

        `load_requests` names the request of each load, all of which may be cached.
        """
        return {
            job_id: self._adapters.claim(request.lora_request)
            for job_id, request_id in load_requests.items()
            if (request := self._requests.get(request_id)) and request.lora_request
        }

    def _introduce(self, request: "Request") -> None:
        hashes = self._adapters.hashes(request)
        if hashes is not None:
            use = self._params.use_of(request) if self._planner.needs_use else UNKNOWN_USE
            self._planner.add_request(request.request_id, hashes, use)
