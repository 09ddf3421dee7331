"""What each block, slot and record of the small engine holds, and whether that is right.

The content of a block is its group, the tokens up to its end, and the weights it was computed with.
"""

from engine_request import BLOCK_TOKENS, FULL, SPECS, STATE, WINDOW, WINDOW_TOKENS

from tierstore.key import get_offload_block_hash, get_offload_group_idx, get_offload_namespace
from tierstore.tier.reservation import ChunkState


class HeldBytes:
    def __init__(self):
        self._blocks = {}
        self._slots = {}
        self._records = {}

    def compute(self, request, start):
        """Fill the blocks from position `start` up to what is computed."""
        for group_idx, size in enumerate(BLOCK_TOKENS):
            for i in range(start // size, -(-request.computed // size)):
                end = min((i + 1) * size, request.computed)
                block = request.tables[group_idx][i]
                if block:
                    self._blocks[block] = (group_idx, request.tokens[:end], request.weights)

    def offload(self, command):
        for row, slot in zip(command.block_ids.tolist(), command.slots.tolist(), strict=True):
            self._slots[slot] = [self._blocks[block] for block in row]

    def load(self, load, *, ok):
        """Promote and copy; not `ok`: what the blocks hold then is worth nothing."""
        for promote in load.promotes:
            for key, slot in zip(promote.keys, promote.slots.tolist(), strict=True):
                self._slots[slot] = self._records[key]
        for part in load.parts:
            for row, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
                for block, content in zip(row, self._slots[slot], strict=True):
                    if block >= 0:
                        self._blocks[block] = content if ok else "torn"

    def verify_hit(self, request):
        """Every position that the next token depends on must hold its own bytes."""
        hit = request.computed
        needed = {
            FULL: range(hit),
            WINDOW: range(max(0, hit - WINDOW_TOKENS), hit),
            STATE: [hit - 1],
        }
        for group_idx, positions in needed.items():
            size = BLOCK_TOKENS[group_idx]
            for i in {position // size for position in positions}:
                block = request.tables[group_idx][i]
                content = (group_idx, request.tokens[: (i + 1) * size], request.weights)
                assert self._blocks[block] == content

    def verify_residents(self, stack, namespace, weights):
        """Every chunk in memory must hold what its key says; its record will hold the same."""
        for key, state in stack.state_by_key.items():
            if state is ChunkState.RESIDENT:
                assert get_offload_namespace(key) == namespace
                group_idx = get_offload_group_idx(key)
                prefix = get_offload_block_hash(key).removeprefix(b"hashed: ")
                size, count = BLOCK_TOKENS[group_idx], SPECS[group_idx].blocks_per_chunk
                ends = range(len(prefix) - size * (count - 1), len(prefix) + 1, size)
                expected = [(group_idx, prefix[:end], weights) for end in ends]
                assert self._slots[stack.slots[key]] == expected, (key, state)
                self._records[key] = expected
