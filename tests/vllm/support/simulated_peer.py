"""A second connector beside tierstore's, as under vLLM's `MultiConnector`.

It knows some prompts and writes their blocks by itself, some steps after vLLM has set them aside,
ordered after nothing but `handle_preemptions` of the step that names them; or in that step, before
its forward pass, where vLLM does not let the request wait. tierstore hears of
these blocks what `MultiConnector` tells a child that was not chosen: `update_state_after_alloc`
with no tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from known_bytes import Chain, KnownGroup

from tierstore.layout import GroupKind
from tierstore_vllm import TierStoreConnector

__all__ = ["Peer", "SharedConnector"]


@dataclass(slots=True)
class _PeerLoad:
    request_id: str
    tokens: list[int]
    tables: list[list[int]]
    start: int
    end: int
    is_bound: bool = False
    """A step has named it to the workers."""


@dataclass(slots=True)
class Peer:
    """What the other connector does, both of its roles."""

    groups: Sequence[KnownGroup]
    runner: Any
    machine: Any
    chance: float
    alignment_tokens: int
    is_sync: bool = False
    """It writes before the forward pass of the step that admits the request."""
    loads: list[_PeerLoad] = field(default_factory=list)
    promised: dict[str, int] = field(default_factory=dict)
    load_count: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """What tierstore's own statistics say."""

    def match(self, request: Any, local_tokens: int) -> int:
        """Offer a prefix of some requests, the same one as often as it is asked."""
        if request.request_id not in self.promised:
            longest = (request.num_tokens - 1) // self.alignment_tokens * self.alignment_tokens
            knows = self.machine.acts(self.chance) and longest > 0
            share = self.machine.random.randrange(1, 4) if knows else 0
            step = self.alignment_tokens
            self.promised[request.request_id] = math.ceil(longest * share / 3 / step) * step
        return max(0, self.promised[request.request_id] - local_tokens)

    def begin(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Remember the blocks that vLLM set aside."""
        tables = [[block.block_id for block in group] for group in blocks.blocks]
        end = self.promised[request.request_id]
        tokens = list(request.all_token_ids)
        load = _PeerLoad(request.request_id, tokens, tables, end - external_tokens, end)
        self.loads.append(load)
        self.load_count += 1

    def bind(self) -> None:
        """Pass on to the workers what was begun; from now on the blocks may be written."""
        for load in self.loads:
            load.is_bound = True

    def take_finished(self) -> set[str]:
        """Write the blocks of some loads; name their requests."""
        if self.is_sync:
            return set()
        done = [load for load in self.loads if load.is_bound and self.machine.acts(0.4)]
        for load in done:
            self.loads.remove(load)
            self._write(load)
        return {load.request_id for load in done}

    def write_at_once(self) -> None:
        """Write the blocks of all loads, if the step waits for them."""
        if self.is_sync:
            for load in self.loads:
                self._write(load)
            self.loads.clear()

    def _write(self, load: _PeerLoad) -> None:
        chain = Chain(f"peer {load.request_id}", self.runner.weights, self.runner.known)
        chain.extend(load.tokens)
        for group in self.groups:
            table = load.tables[group.group_idx]
            if group.kind is GroupKind.STATE:
                group.write_state(table[load.end // group.block_tokens - 1], load.end, chain)
                continue
            first = load.start
            while first < load.end and not table[first // group.block_tokens]:
                first += 1
            for is_draft in (False, True):
                group.write_tokens(table, first, load.end, chain, draft=is_draft)


class SharedConnector(TierStoreConnector):
    """tierstore's connector, and a peer where tierstore finds nothing."""

    peer: ClassVar[Peer | None] = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self.peer is None or tokens is None or tokens:
            if self.peer is not None and tokens:
                self.peer.promised[request.request_id] = 0
            return tokens, is_async
        tokens = self.peer.match(request, num_computed_tokens)
        return tokens, tokens > 0 and not self.peer.is_sync

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.peer is not None and self.peer.promised.get(request.request_id):
            if num_external_tokens:
                self.peer.begin(request, blocks, num_external_tokens)
                self.peer.promised[request.request_id] = 0
            num_external_tokens = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(kv_connector_metadata)
        if self.peer is not None:
            self.peer.bind()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.peer is not None:
            self.peer.write_at_once()
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if self.peer is not None:
            results.finished_recving |= self.peer.take_finished()
        return results

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        if self.peer is not None and stats is not None:
            self.peer.counts.update(stats.data)
        return stats
