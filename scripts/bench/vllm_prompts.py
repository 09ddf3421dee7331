"""Prompts for `bench_vllm.py`: token ids of a byte-level vocabulary, the same in every run."""

import gzip
import json
import random
from pathlib import Path

__all__ = ["conversations", "long_prompts", "requests_of_trace", "unseen_prompts"]

VOCABULARY = 250
TRACE_BLOCK_TOKENS = 64
"""Tokens that stand for one block of a recorded trace, whose own are too long for two cores."""
REQUEST_TOKENS_MAX = 3900
TURNS, ADDITION_TOKENS, LIVE_CONVERSATIONS = 6, 300, 10


def _tokens(source: random.Random, count: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=count)


def long_prompts(count: int, token_count: int) -> list[list[int]]:
    """Return prompts that share nothing."""
    return [_tokens(random.Random(f"long {i}"), token_count) for i in range(count)]  # noqa: S311 - repeatable


def unseen_prompts(batch: int, count: int, token_count: int) -> list[list[int]]:
    """Return prompts that no other batch has."""
    return [
        _tokens(random.Random(f"unseen {batch} {i}"), token_count)  # noqa: S311 - repeatable
        for i in range(count)
    ]


def conversations(source: random.Random, count: int) -> list[list[int]]:
    """Return requests of conversations that take turns; each turn extends the one before."""
    requests: list[list[int]] = []
    live: list[list[int]] = []
    while len(requests) < count:
        if len(live) < LIVE_CONVERSATIONS:
            live.append([])
        prompt = source.choice(live)
        prompt += _tokens(source, ADDITION_TOKENS)
        requests.append(list(prompt))
        if len(prompt) >= TURNS * ADDITION_TOKENS:
            live.remove(prompt)
    return requests


def requests_of_trace(path: Path, count: int) -> list[list[int]]:
    """Turn the first requests of a trace (gzip JSON lines, `hash_ids`) into prompts.

    A block id always becomes the same tokens, so requests share exactly the prefixes they shared
    when they were recorded. Requests that are too long are left out.
    """
    requests: list[list[int]] = []
    blocks_max = REQUEST_TOKENS_MAX // TRACE_BLOCK_TOKENS
    with gzip.open(path, "rt") as lines:
        for line in lines:
            block_ids = json.loads(line)["hash_ids"]
            if 0 < len(block_ids) <= blocks_max:
                requests.append(
                    [
                        token
                        for block_id in block_ids
                        for token in _tokens(random.Random(block_id), TRACE_BLOCK_TOKENS)  # noqa: S311 - repeatable
                    ]
                )
            if len(requests) == count:
                return requests
    raise SystemExit(f"{path}: has only {len(requests)} requests of at most {blocks_max} blocks")
