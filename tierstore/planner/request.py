"""What the planner remembers of one request: its block tables and how far it was offloaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.layout import GroupKind
from tierstore.planner.groups import GroupOffloadConfig
from tierstore.planner.wait import Wait
from tierstore.policy.use import UseContext
from tierstore.transfer import JobId

__all__ = ["RequestGroupState", "RequestOffloadState"]

_NEVER = 1 << 62

_LOAD_RETRY_COUNT_MAX = 1
"""Loads of one request after one that failed."""


@dataclass(slots=True)
class RequestGroupState:
    """One group's copy of the engine's block table (append-only between full tables)."""

    config: GroupOffloadConfig
    block_ids: list[int] = field(default_factory=list)
    """Null blocks are 0. Blocks that slid out of the window since are not marked."""
    next_chunk: int = 0
    """The first chunk that was not offered to the tiers yet."""


@dataclass(slots=True)
class RequestOffloadState:
    """One request, from its arrival until the engine finishes it."""

    block_hashes: Sequence[bytes]
    """The engine's live list; it grows as tokens come."""
    groups: Mapping[int, RequestGroupState]
    """By group index; groups whose blocks are handed over one by one (STATE) are left out."""
    state_lengths: dict[int, int]
    """Of those left out, by group index: how many entries the engine's table has."""
    use: UseContext | None = None
    """Of its first chunk; None: the tiers do not go by uses."""
    next_ready_tokens: int = _NEVER
    """So many computed tokens complete the next chunk of some group."""
    wait: Wait | None = None
    """None: it was not told to ask again."""
    load_job: JobId | None = None
    loaded_tokens: int = 0
    """The load brought everything before this token, from the first on; for the next table."""
    failed_load_count: int = 0
    is_suppressed: bool = False
    """Too many loads failed: this request is recomputed, and never asks the tiers again."""
    has_kv: bool = False
    """Something was computed for it, or is being loaded."""
    is_scheduled: bool = False
    """Its table was given to a step, and it was not preempted since."""
    is_outdated: bool = False
    """The cache was reset under the request: what it computes comes after KV of the old weights."""

    @classmethod
    def build(
        cls,
        block_hashes: Sequence[bytes],
        configs: Sequence[GroupOffloadConfig],
        use: UseContext | None = None,
    ) -> "RequestOffloadState":
        """Start with empty tables; nothing is offloaded before the first full table."""
        groups = {
            config.spec.group_idx: RequestGroupState(config)
            for config in configs
            if config.spec.kind is not GroupKind.STATE
        }
        states = [c.spec.group_idx for c in configs if c.spec.kind is GroupKind.STATE]
        return cls(block_hashes, groups, dict.fromkeys(states, 0), use)

    def replace_tables(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> None:
        """Take full tables (admission, resumption): every chunk is offered again.

        Those that were just loaded for this table are not. Chunks that the tiers still hold cost
        one lookup; those evicted since come back. An outdated request is offered again only if it
        starts from nothing.
        """
        self.has_kv = self.is_scheduled = True
        self.is_outdated &= computed_tokens > 0
        loaded_tokens = self.loaded_tokens if self.loaded_tokens <= computed_tokens else 0
        self.loaded_tokens = 0
        for group_idx, group in self.groups.items():
            group.block_ids = list(tables[group_idx])
            group.next_chunk = loaded_tokens // group.config.tokens_per_chunk
        for group_idx in self.state_lengths:
            self.state_lengths[group_idx] = len(tables[group_idx])
        self.expect_next_chunk()

    def append_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        """Take the blocks that this step added."""
        for group_idx, group in self.groups.items():
            group.block_ids.extend(tables[group_idx])
        for group_idx in self.state_lengths:
            self.state_lengths[group_idx] += len(tables[group_idx])

    def note_failed_load(self) -> None:
        """Take note that a promised hit was not loaded.

        The engine asks again at once. What arrived is resident, and what failed is absent unless
        another tier has it, so one more answer is worth it. Were all hits answered alike, the
        request would never be computed.
        """
        self.failed_load_count += 1
        self.is_suppressed |= self.failed_load_count > _LOAD_RETRY_COUNT_MAX

    def outdate(self, configs: Sequence[GroupOffloadConfig]) -> None:
        """Name chunks by `configs`, and offer none that comes after KV from before.

        The request stays outdated until it starts from nothing: being scheduled again is no such
        start, since a load that was under way at the reset would then be offered as new.
        """
        for config in configs:
            if config.spec.group_idx in self.groups:
                self.groups[config.spec.group_idx].config = config
        if self.has_kv:
            self.is_outdated = True
            self.next_ready_tokens = _NEVER

    def expect_next_chunk(self) -> None:
        """Recompute `next_ready_tokens` after chunks were offered."""
        if self.is_outdated:
            self.next_ready_tokens = _NEVER
            return
        self.next_ready_tokens = _NEVER
        for group in self.groups.values():
            config = group.config
            ready_tokens = (group.next_chunk + 1) * config.tokens_per_chunk + config.is_draft
            self.next_ready_tokens = min(self.next_ready_tokens, ready_tokens)
