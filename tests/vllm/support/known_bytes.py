"""KV caches of which every byte is known: what a position holds follows from the tokens up to it.

An attention layer holds a digest of the prefix per token, a state layer one per block. The layers
of a draft model look one token ahead, as those of EAGLE and MTP do: half of the digest is that of
the next prefix. vLLM names a block by its own tokens, so what follows its last one may be another
request's text; that half is not compared there. (It decides how good a guess is, no answer.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.layout import GroupKind

__all__ = ["Chain", "KnownGroup", "KnownLayer", "WrongByteError", "open_groups"]

Bytes = npt.NDArray[np.uint8]

DIGEST_BYTES = 16
_ROWS_MIN = 256
_REPORTED_MAX = 6
_NEXT_FROM = 8
_IS_NEXT = np.arange(1 << 12) % DIGEST_BYTES >= _NEXT_FROM


class WrongByteError(AssertionError):
    """What the engine is about to read is not what its tokens say."""


class Chain:
    """Digests of all prefixes of one request's tokens, under one set of weights."""

    def __init__(self, name: str, weights: int, known: "dict[bytes, str]") -> None:
        """`known` says what each digest stands for, for error messages; all chains share it."""
        self.name = name
        self.weights = weights
        self.known = known
        self._start = xxhash.xxh3_128_digest(f"weights {weights}".encode())
        self._rows = np.zeros((_ROWS_MIN, DIGEST_BYTES), np.uint8)
        self.count = 0

    def extend(self, tokens: Sequence[int], *, settled: bool = True) -> None:
        """Digest all prefixes of `tokens`, of which the first `count` are known."""
        while len(self._rows) < len(tokens):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        last = self._rows[self.count - 1].tobytes() if self.count else self._start
        for i in range(self.count, len(tokens)):
            last = xxhash.xxh3_128_digest(last + tokens[i].to_bytes(4, "little", signed=True))
            self._rows[i] = np.frombuffer(last, np.uint8)
            what = "" if settled else "guess "
            self.known.setdefault(last, f"{what}{self.name}[:{i + 1}] weights {self.weights}")
        self.count = len(tokens)

    def cut(self, count: int) -> None:
        """Forget the tokens from `count` on."""
        self.count = min(self.count, count)

    def rows(self, start: int, end: int) -> Bytes:
        """Return the digests of the prefixes that end with tokens start .. end - 1."""
        assert end <= self.count, (end, self.count)
        return self._rows[start:end]

    def next_token(self, vocabulary: int) -> int:
        """Sample what follows."""
        return int(self._rows[self.count - 1][0]) % vocabulary + 1


@dataclass(slots=True)
class KnownLayer:
    """The pages of one layer."""

    name: str
    pages: Bytes
    """Attention: [block, head, token, content]; state: [block, content]."""
    mask: Bytes
    is_draft: bool

    def fill(self, digests: Bytes) -> Bytes:
        """Return what the layer holds for each digest."""
        repeats = -(-self.pages.shape[-1] // DIGEST_BYTES)
        return np.tile(digests ^ self.mask, (1, repeats))[:, None, : self.pages.shape[-1]]


@dataclass(slots=True)
class KnownGroup:
    """One KV cache group: where its layers keep what, and what they should."""

    group_idx: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int
    """How far the next token looks back, itself excluded; 0: to the first."""
    layers: list[KnownLayer] = field(default_factory=list)

    def first_read(self, computed_tokens: int) -> int:
        """Return the first position that the next token reads."""
        if self.kind is GroupKind.SLIDING_WINDOW:
            return max(0, computed_tokens - self.window_tokens)
        return 0

    def write_tokens(
        self, table: Sequence[int], start: int, end: int, chain: Chain, *, draft: bool
    ) -> None:
        """Write what the layers compute for tokens start .. end - 1; the draft's or the others'."""
        if start >= end:
            return
        blocks, offsets = self._where(table, start, end)
        for layer in self.layers:
            if layer.is_draft is draft:
                layer.pages[blocks, :, offsets] = layer.fill(_digests(chain, start, end, draft))

    def spoil_tokens(self, table: Sequence[int], start: int, end: int) -> None:
        """Write what the draft's layers leave behind for tokens that nobody has accepted."""
        end = min(end, len(table) * self.block_tokens)
        if start < end:
            blocks, offsets = self._where(table, start, end)
            for layer in self.layers:
                if layer.is_draft:
                    layer.pages[blocks, :, offsets] = 0xDF

    def verify_tokens(
        self, table: Sequence[int], end: int, chain: Chain, what: str, *, draft: bool
    ) -> int:
        """Compare all that the token at `end` reads, of the draft's layers or of the others.

        Returns how many positions that is.
        """
        start = self.first_read(end)
        if start >= end:
            return 0
        blocks, offsets = self._where(table, start, end)
        if 0 in blocks:
            position = start + int(np.flatnonzero(blocks == 0)[0])
            raise WrongByteError(f"{what}: group {self.group_idx} has no block for {position}")
        for layer in self.layers:
            if layer.is_draft is not draft:
                continue
            found = layer.pages[blocks, :, offsets]
            is_wrong = found != layer.fill(_digests(chain, start, end, draft))
            if draft:
                is_last = offsets == self.block_tokens - 1
                is_wrong &= ~(is_last[:, None, None] & _IS_NEXT[: found.shape[-1]])
            wrong = np.flatnonzero(is_wrong.any(axis=(1, 2)))
            if len(wrong):
                found_at = {(start + i, int(blocks[i])): found[i, 0] for i in wrong.tolist()}
                self._report(layer, what, found_at, chain)
        return end - start

    def clear(self, block: int) -> None:
        """Fill one block with zeros."""
        for layer in self.layers:
            layer.pages[block] = 0

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another one."""
        for layer in self.layers:
            layer.pages[target] = layer.pages[source]

    def write_state(self, block: int, length: int, chain: Chain) -> None:
        """Write the state after `length` tokens."""
        for layer in self.layers:
            layer.pages[block] = layer.fill(chain.rows(length - 1, length))[0, 0]

    def verify_state(self, block: int, length: int, chain: Chain, what: str) -> None:
        """Compare the state that a forward pass starts from."""
        if not block:
            raise WrongByteError(f"{what}: group {self.group_idx} has no state at {length}")
        for layer in self.layers:
            found = layer.pages[block]
            if not np.array_equal(found, layer.fill(chain.rows(length - 1, length))[0, 0]):
                self._report(layer, what, {(length - 1, block): found}, chain)

    def _where(
        self, table: Sequence[int], start: int, end: int
    ) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]":
        positions = np.arange(start, end)
        return np.array(table, np.int64)[positions // self.block_tokens], (
            positions % self.block_tokens
        )

    def _report(
        self, layer: KnownLayer, where: str, wrong: dict[tuple[int, int], Bytes], chain: Chain
    ) -> None:
        """Say what the wrong positions hold instead, by position and block."""
        lines = []
        for (position, block), found in list(wrong.items())[:_REPORTED_MAX]:
            digest = (found[:DIGEST_BYTES] ^ layer.mask).tobytes()
            holds = chain.known.get(digest, f"bytes {found[:8].tobytes().hex()}")
            lines.append(f"[{position}] in block {block} holds {holds}")
        raise WrongByteError(
            f"{where}: group {self.group_idx} ({self.kind.name}), layer {layer.name}, weights "
            f"{chain.weights}: {len(wrong)} wrong positions: {'; '.join(lines)}"
        )


def _digests(chain: Chain, start: int, end: int, draft: bool) -> Bytes:  # noqa: FBT001
    """Return what tells the tokens start .. end - 1 apart, for one kind of layer."""
    if not draft:
        return chain.rows(start, end)
    here, there = chain.rows(start, end), chain.rows(start + 1, end + 1)
    return np.concatenate([here[:, :_NEXT_FROM], there[:, _NEXT_FROM:]], axis=1)


def open_groups(
    groups: Sequence[Any], views: "dict[str, Any]", draft_layers: Sequence[str] = ()
) -> list[KnownGroup]:
    """Describe vLLM's KV cache groups over its own views of the memory."""
    from vllm.v1 import kv_cache_interface as specs

    known = []
    for group_idx, group in enumerate(groups):
        spec = group.kv_cache_spec
        kind, window = GroupKind.FULL, 0
        if isinstance(spec, specs.SlidingWindowSpec):
            kind, window = GroupKind.SLIDING_WINDOW, spec.sliding_window - 1
        elif isinstance(spec, specs.MambaSpec):
            kind = GroupKind.STATE
        found = KnownGroup(group_idx, kind, spec.block_size, window)
        for name in group.layer_names:
            pages = views[name].view(_uint8()).numpy()
            if kind is GroupKind.STATE:
                pages = pages[:, 0, 0]
            mask = np.frombuffer(xxhash.xxh3_128_digest(f"{group_idx} {name}".encode()), np.uint8)
            found.layers.append(KnownLayer(name, pages, mask, name in draft_layers))
        known.append(found)
    return known


def _uint8() -> Any:
    import torch

    return torch.uint8
