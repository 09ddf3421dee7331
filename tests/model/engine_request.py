"""A request of the small engine, and the three groups of layers that it has KV in."""

from dataclasses import dataclass, field

from tierstore.layout import GroupKind, GroupSpec

HASH_TOKENS, STATE_TOKENS, ALIGNMENT = 4, 8, 16
FULL, WINDOW, STATE = 0, 1, 2
BLOCK_TOKENS = (4, 4, 8)
WINDOW_TOKENS = 10
STEP_TOKENS_MAX = 16


def _spec(group_idx, kind, blocks_per_chunk, window_tokens=0):
    return GroupSpec(
        group_idx=group_idx,
        kind=kind,
        tokens_per_block=BLOCK_TOKENS[group_idx],
        blocks_per_chunk=blocks_per_chunk,
        chunk_bytes=1,
        window_tokens=window_tokens,
    )


SPECS = (
    _spec(FULL, GroupKind.FULL, 2),
    _spec(WINDOW, GroupKind.SLIDING_WINDOW, 4, WINDOW_TOKENS),
    _spec(STATE, GroupKind.STATE, 1),
)


@dataclass
class Request:
    name: str
    tokens: bytes
    hashes: list = field(default_factory=list)
    computed: int = 0
    tables: list = field(default_factory=lambda: [[], [], []])
    status: str = "waiting"
    is_new: bool = True
    run: object = None
    """Another one each time that the request starts anew."""
    weights: int = 0
    """Of the oldest KV that its KV comes after."""

    def hash_blocks(self):
        for end in range((len(self.hashes) + 1) * HASH_TOKENS, len(self.tokens) + 1, HASH_TOKENS):
            self.hashes.append(b"hashed: " + self.tokens[:end])
