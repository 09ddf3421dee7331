"""vLLM's model runner without a model: it writes known bytes where a model would write its own.

What it does with blocks is that of vLLM 0.32's V1 runner: block tables that are only appended to,
states of "align" mode that move from column to column, draft tokens that are rejected, and the
connector's hooks in the order of `KVConnectorModelRunnerMixin`. Before a token is computed, all
that it reads is compared with what it must be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from known_bytes import Chain, KnownGroup, WrongByteError
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from tierstore.layout import GroupKind

__all__ = ["SimulatedRunner", "Speculation"]

VOCABULARY = 61
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the engine guesses."""

    token_count: int = 0
    has_draft_layers: bool = False
    is_right: float = 0.6
    """Chance of each guess."""


@dataclass(slots=True)
class _Running:
    """What the worker keeps of one request."""

    name: str
    tokens: list[int]
    chain: Chain
    tables: list[list[int]]
    computed: int
    state_column: int | None = None
    accepted: int = 1
    """How many columns before the first unread one the running state lies, in blocks: see vLLM."""
    guesses: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """One request in one step."""

    request: _Running
    start: int
    count: int
    guesses: list[int]

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def settled_end(self) -> int:
        return self.end - len(self.guesses)


class SimulatedRunner:
    """Executes steps on known bytes; the worker's connector is called as vLLM calls it."""

    def __init__(
        self,
        groups: Sequence[KnownGroup],
        connector: Any,
        speculation: Speculation,
        random: Random,
        known: dict[bytes, str],
    ) -> None:
        self._groups = groups
        self._connector = connector
        self._speculation = speculation
        self._random = random
        self.known = known
        self._requests: dict[str, _Running] = {}
        self.weights = 0
        self.verified_count = 0
        self.preempted_count = 0
        self.is_async = False

    def execute(self, output: Any, machine: Any) -> ModelRunnerOutput:
        """Run one step; the hooks see the machine go on in between."""
        connector = self._connector
        connector.handle_preemptions(output.kv_connector_metadata)
        rows = self._update(output)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        result = KVConnectorOutput()
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        sampled = self._forward(rows)
        if self._random.random() < 0.5:
            machine.turn()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        # With a draft model vLLM saves after the drafter, hence after it has asked for results.
        is_deferred = self._speculation.has_draft_layers and bool(rows)
        if not is_deferred:
            connector.wait_for_save()
        if self._random.random() < 0.5:
            machine.turn()
        self._collect(result, output)
        self._propose(rows)
        if is_deferred:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        if not rows:
            return ModelRunnerOutput.with_kv_conn_output_only(result)
        names = [row.request.name for row in rows]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=result,
        )

    def take_draft_token_ids(self, output: Any) -> DraftTokenIds | None:
        """Return the guesses for the next step, for a scheduler that waits for them."""
        if not self._speculation.token_count or not output.num_scheduled_tokens:
            return None
        names = list(output.num_scheduled_tokens)
        return DraftTokenIds(names, [list(self._requests[name].guesses) for name in names])

    def _collect(self, result: KVConnectorOutput, output: Any) -> None:
        connector = self._connector
        transfers = connector.get_transfer_results(output.finished_req_ids)
        result.finished_sending = transfers.finished_sending
        result.finished_recving = transfers.finished_recving
        result.failed_recving = transfers.failed_recving
        result.invalid_block_ids = connector.get_block_ids_with_load_errors()
        result.kv_connector_stats = connector.get_kv_connector_stats()
        result.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        result.kv_connector_worker_meta = connector.build_connector_worker_meta()

    # Block tables and tokens.

    def _update(self, output: Any) -> list[_Row]:
        cached = output.scheduled_cached_reqs
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        preempted = tuple(output.preempted_req_ids or ())
        self.preempted_count += len(preempted)
        for name in (*preempted, *cached.resumed_req_ids):
            if name in self._requests:
                self._requests[name].state_column = None
                self._requests[name].accepted = 1
        self._prepare_blocks(output)
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens)
        for i, name in enumerate(cached.req_ids):
            self._go_on(cached, i, name)
        return [self._row(output, name) for name in output.num_scheduled_tokens]

    def _prepare_blocks(self, output: Any) -> None:
        """Zero and copy the blocks that vLLM names, all groups' layers, before any is computed."""
        for group in self._groups:
            if group.kind is not GroupKind.STATE:
                for block in output.new_block_ids_to_zero or ():
                    group.clear(block)
        for copy in output.kv_cache_block_copies or ():
            for group in self._groups:
                group.copy_block(copy.src_block_id, copy.dst_block_id)

    def _begin(self, name: str, tokens: Any, tables: Any, computed: int) -> None:
        chain = Chain(name, self.weights, self.known)
        chain.extend(tokens)
        tables = [list(table) for table in tables]
        self._requests[name] = _Running(name, list(tokens), chain, tables, computed)

    def _go_on(self, cached: Any, i: int, name: str) -> None:
        new_blocks = cached.new_block_ids[i]
        if name in cached.resumed_req_ids:
            tokens = cached.all_token_ids[name]
            self._begin(name, tokens, new_blocks, cached.num_computed_tokens[i])
            return
        request = self._requests[name]
        if name in cached.all_token_ids:
            assert request.tokens == list(cached.all_token_ids[name]), f"{name} lost its tokens"
        for table, blocks in zip(request.tables, new_blocks or (), strict=False):
            table.extend(blocks)
        optimistic = cached.num_computed_tokens[i]
        assert request.computed <= optimistic, (name, request.computed, optimistic)
        if not self.is_async:
            assert request.computed == optimistic, (name, request.computed, optimistic)

    def _row(self, output: Any, name: str) -> _Row:
        request = self._requests[name]
        count = output.num_scheduled_tokens[name]
        scheduled = output.scheduled_spec_decode_tokens.get(name, ())
        guesses = list(scheduled)
        if self.is_async and guesses:
            # The scheduler knows only how many; a request that was just admitted has none yet.
            known = request.guesses or [_NO_TOKEN] * len(guesses)
            guesses = (known + [_NO_TOKEN] * len(guesses))[: len(guesses)]
        row = _Row(request, request.computed, count, guesses)
        known_end = len(request.tokens)
        assert row.settled_end <= known_end, (name, row, known_end)
        assert not guesses or row.settled_end == known_end, (name, row, known_end)
        return row

    # Bytes.

    def _forward(self, rows: Sequence[_Row]) -> list[list[int]]:
        for row in rows:
            self._move_states(row)
        for row in rows:
            self._guess(row)
            for group in self._groups:
                if group.kind is not GroupKind.STATE:
                    table, chain = row.request.tables[group.group_idx], row.request.chain
                    group.write_tokens(table, row.start, row.end, chain, draft=False)
        for row in rows:
            self._verify(row, draft=False)
            self._write_states(row)
        return [self._sample(row) for row in rows]

    def _guess(self, row: _Row) -> None:
        request = row.request
        tokens = request.tokens[: row.settled_end] + row.guesses
        if row.guesses:
            request.chain.cut(row.settled_end)
            request.chain.extend(tokens, settled=False)

    def _verify(self, row: _Row, *, draft: bool) -> None:
        request = row.request
        what = f"{request.name} at {row.start}"
        for group in self._groups:
            if group.kind is not GroupKind.STATE:
                table = request.tables[group.group_idx]
                found = group.verify_tokens(table, row.start, request.chain, what, draft=draft)
                self.verified_count += found

    def _move_states(self, row: _Row) -> None:
        """Bring each running state to the column that this step ends in (`preprocess_mamba`)."""
        request = row.request
        for size in self._state_block_tokens():
            before = request.state_column
            if before is None:
                before = (row.start - 1) // size
            now = -(-row.end // size) - 1
            if before not in (-1, now):
                for group in self._state_groups():
                    table = request.tables[group.group_idx]
                    source, target = table[before + request.accepted - 1], table[now]
                    group.verify_state(source, row.start, request.chain, f"{request.name} moves")
                    group.copy_block(source, target)
                request.accepted = 1
            request.state_column = now

    def _write_states(self, row: _Row) -> None:
        request = row.request
        for group in self._state_groups():
            column = request.state_column
            assert column is not None
            table = request.tables[group.group_idx]
            if row.start:
                first = table[column + request.accepted - 1]
                group.verify_state(
                    first, row.start, request.chain, f"{request.name} at {row.start}"
                )
                self.verified_count += 1
            for i in range(len(row.guesses) + 1):
                block = table[column + i]
                if not block:
                    raise WrongByteError(f"{request.name}: no block for its state at {row.end}")
                group.write_state(block, row.settled_end + i, request.chain)

    def _sample(self, row: _Row) -> list[int]:
        """Accept guesses, sample what follows; nothing for a piece of a prompt."""
        request = row.request
        chain = request.chain
        if row.settled_end < len(request.tokens):
            request.computed = row.settled_end
            request.accepted = 1
            return []
        chain.cut(row.settled_end)
        sampled = [chain.next_token(VOCABULARY)]
        for guess in row.guesses:
            if guess != sampled[-1]:
                break
            chain.extend([*request.tokens, *sampled])
            sampled.append(chain.next_token(VOCABULARY))
        request.tokens += sampled
        chain.extend(request.tokens)
        request.computed = len(request.tokens) - 1
        self._settle_states(row, len(sampled))
        return sampled

    def _settle_states(self, row: _Row, accepted: int) -> None:
        """Keep the state at a boundary that guesses ran over (`postprocess_mamba`)."""
        request = row.request
        request.accepted = accepted
        if not self._speculation.token_count:
            return
        for size in self._state_block_tokens():
            column = request.state_column
            assert column is not None
            boundary = (row.settled_end + accepted - 1) // size * size
            if boundary < row.settled_end:
                continue
            bias, target = boundary - row.settled_end, boundary // size - 1
            if target == column:
                request.accepted = 1
            if target != column or bias:
                for group in self._state_groups():
                    table = request.tables[group.group_idx]
                    group.copy_block(table[column + bias], table[target])

    def _propose(self, rows: Sequence[_Row]) -> None:
        """Guess what comes next; a draft model's layers are written on the way."""
        if self._speculation.has_draft_layers:
            for row in rows:
                self._write_draft(row)
            for row in rows:
                self._verify(row, draft=True)
        for row in rows:
            request, chain = row.request, row.request.chain
            request.guesses = []
            for _ in range(self._speculation.token_count):
                is_right = self._random.random() < self._speculation.is_right
                right = chain.next_token(VOCABULARY)
                request.guesses.append(right if is_right else (right + 1) % VOCABULARY + 1)
                chain.extend([*request.tokens, *request.guesses], settled=False)
            chain.cut(len(request.tokens))

    def _write_draft(self, row: _Row) -> None:
        """Write what the draft's layers keep, and garbage where it guessed beyond it."""
        request = row.request
        end = min(row.end, len(request.tokens) - 1)
        for group in self._groups:
            if group.kind is not GroupKind.STATE:
                table = request.tables[group.group_idx]
                group.spoil_tokens(table, end, end + self._speculation.token_count)
                group.write_tokens(table, row.start, end, request.chain, draft=True)

    def _state_groups(self) -> list[KnownGroup]:
        return [group for group in self._groups if group.kind is GroupKind.STATE]

    def _state_block_tokens(self) -> list[int]:
        sizes = {group.block_tokens for group in self._state_groups()}
        assert len(sizes) <= 1, sizes
        return sorted(sizes)
