"""The engine-independent part of an offline warm-up: prompts from JSON lines, and a configuration.

The adapter of an engine turns prompts into token ids and prefills them.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from tierstore.config import WRITE_QUEUE_BYTES_MAX, StoreConfig
from tierstore.errors import ConfigError, MissingExtraError, PromptError
from tierstore.quoting import escaped, quoted
from tierstore.tier.admission import make_admission

__all__ = [
    "ChatPrompt",
    "Prompt",
    "TextPrompt",
    "TokenPrompt",
    "distinct_prefixes",
    "parse_prompt",
    "patient_config",
    "read_prompts",
]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenised as the engine's completion interface does."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, rendered with the model's chat template as the start of an answer."""

    messages: tuple[tuple[str, str], ...]
    """Pairs of role and content."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


def patient_config(config: StoreConfig) -> StoreConfig:
    """Return a configuration that drops no chunks; a warm-up may wait for the disk instead.

    Raises:
        ConfigError: the configuration has no tier on disk.
    """
    if not config.secondary:
        raise ConfigError("a warm-up needs a tier on disk: add one to 'secondary'")
    queue_bytes = min(config.primary.capacity_bytes, WRITE_QUEUE_BYTES_MAX)
    tiers = [
        replace(tier, io=replace(tier.io, write_queue_bytes=queue_bytes))
        for tier in config.secondary
    ]
    if not any(
        make_admission(tier.cascade, tier.cascade_options).admits_arrivals for tier in tiers
    ):
        tiers[0] = replace(tiers[0], cascade="write_through")
    return replace(config, secondary=tuple(tiers))


async def read_prompts(path: Path) -> AsyncIterator[tuple[int, Prompt]]:
    """Yield (line number, prompt) for every line that is not blank.

    Raises:
        PromptError: the file cannot be read, or a line is not a prompt; names file and line.
        MissingExtraError: aiofiles is not installed.
    """
    try:
        import aiofiles
    except ImportError as error:
        raise MissingExtraError("aiofiles is missing: pip install 'tierstore[warmup]'") from error
    number = 0
    try:
        async with aiofiles.open(path, encoding="utf-8") as lines:
            async for line in lines:
                number += 1
                if line.strip():
                    yield number, parse_prompt(line)
    except PromptError as error:
        raise PromptError(f"{escaped(path)}:{number}: {error}") from error
    except (OSError, ValueError) as error:  # not text, or a zero byte in the path
        raise PromptError(f"{escaped(path)}: cannot be read: {escaped(error)}") from error


def parse_prompt(line: str) -> Prompt:
    """Return the prompt that one JSON object describes.

    Raises:
        PromptError: the line is not a prompt; the message says why.
    """
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise PromptError(f"not JSON: {escaped(error)}") from None
    if not isinstance(raw, dict) or len(raw) != 1 or not raw.keys() <= _PARSERS.keys():
        got = quoted(sorted(raw)) if isinstance(raw, dict) else type(raw).__name__
        raise PromptError(
            f"expected an object with one of the keys {', '.join(_PARSERS)}, got {got}"
        )
    ((key, value),) = raw.items()
    return _PARSERS[key](value)


def distinct_prefixes(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the prompts that are not a prefix of another one.

    In sorted order, so that prompts with a common beginning are neighbours; of equal prompts, only
    the first is returned. O(n log n) comparisons.
    """
    # As big-endian bytes, the order of strings is the order of token lists, at the speed of C.
    packed = [np.asarray(tokens, ">u4").tobytes() for tokens in prompts]
    order = sorted(range(len(prompts)), key=lambda index: (packed[index], -index))
    # In this order, all prompts that begin with a prompt follow it directly: comparing neighbours
    # is enough.
    kept = [one for one, after in pairwise(order) if not packed[after].startswith(packed[one])]
    return kept + order[-1:]


def _parse_text(value: object) -> Prompt:
    if not isinstance(value, str) or not value:
        raise PromptError(f"text: expected a string that is not empty, got {quoted(value)}")
    _require_unicode(value)
    return TextPrompt(value)


def _parse_messages(value: object) -> Prompt:
    messages = value if isinstance(value, list) else []
    pairs = [
        (message["role"], message["content"])
        for message in messages
        if isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in message.values())
    ]
    if not pairs or len(pairs) != len(messages):
        raise PromptError(
            "messages: expected a list of objects with the strings 'role' and 'content'"
        )
    for _, content in pairs:
        _require_unicode(content)
    return ChatPrompt(tuple(pairs))


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can express it, no tokenizer accepts it
        raise PromptError(f"not valid Unicode: {quoted(text)}") from None


def _parse_token_ids(value: object) -> Prompt:
    ids = value if isinstance(value, list) else []
    if not ids or not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        raise PromptError("token_ids: expected a list of token ids, at least one")
    return TokenPrompt(tuple(ids))


_PARSERS = {"text": _parse_text, "messages": _parse_messages, "token_ids": _parse_token_ids}
