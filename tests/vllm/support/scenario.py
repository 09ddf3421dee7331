"""The prompts of the end-to-end tests, what must be cached of them, and how runs are compared."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import Answer, EngineJob, EngineResult, Round

__all__ = [
    "ANSWER_TOKENS",
    "Scenario",
    "assert_same_answer",
    "assert_same_answers",
    "tier_config",
]

ANSWER_TOKENS = 40
_LENGTHS = (1, 31, 32, 33, 64, 65, 129, 320, 321, 500, 560, 900)
_SHARED_LENGTHS = (210, 250, 300, 333)
_SHARED_TOKENS = 200
_VARIED_LENGTH = 320
_VARIED_AT = (3, 160, 315)
_MORE_TOKENS = 40
_CROWD_LENGTH = 576
_CROWD_MISSING_TOKENS = 32
_CROWD_SHARED = range(210, 334)
"""Lengths of the first prompts that the crowd continues: within what is left of it when it is cut
to whole blocks of up to 288 tokens."""


@dataclass(frozen=True)
class Scenario:
    """Rounds of prompts for one model, and the cached tokens they shall show."""

    model: Path
    dtype: str
    alignment_tokens: int = 0
    """Hits end at multiples of this. The engine says it; 0: it was not asked yet."""
    keeps_decoded: bool = True
    """Whether what an answer adds can be found again; vLLM keeps no state that decoding passes."""

    @property
    def first(self) -> list[list[int]]:
        """Prompts of many lengths, and a few that share a prefix which ends inside a block."""
        prefix = self._tokens("prefix", _SHARED_TOKENS)
        return [self._tokens(str(length), length) for length in _LENGTHS] + [
            prefix + self._tokens(f"shared-{length}", length - _SHARED_TOKENS)
            for length in _SHARED_LENGTHS
        ]

    @property
    def varied(self) -> list[list[int]]:
        """One of the first prompts with one token changed: early, in the middle, late."""
        base = self._tokens(str(_VARIED_LENGTH), _VARIED_LENGTH)
        return [[*base[:at], 2 + (base[at] - 1) % 250, *base[at + 1 :]] for at in _VARIED_AT]

    @property
    def more(self) -> list[list[int]]:
        """What a user says after the answers to the first prompts."""
        return [self._tokens(f"more-{i}", _MORE_TOKENS) for i in range(len(self.first))]

    @property
    def crowd(self) -> list[list[int]]:
        """Prompts that begin like first ones, as far as a hybrid model keeps their state."""
        return [
            prompt[:-1] + self._tokens(f"crowd-{i}", _CROWD_LENGTH - len(prompt) + 1)
            for i, prompt in enumerate(self.first)
            if len(prompt) in _CROWD_SHARED
        ]

    def crowd_round(self, **changes: Any) -> Round:
        """Let the crowd's answers outgrow their blocks, however large."""
        return Round(
            prompts=self.crowd,
            max_tokens=2 * _CROWD_MISSING_TOKENS,
            ends_before_block=_CROWD_MISSING_TOKENS,
            **changes,
        )

    def expected_first(self) -> list[int]:
        """Cached tokens of the first prompts once they were computed: all but the last token's."""
        return [self._aligned(len(prompt) - 1) for prompt in self.first]

    def expected_varied(self) -> list[int]:
        """Cached tokens of the varied prompts: nothing past the difference."""
        return [self._aligned(at) for at in _VARIED_AT]

    def expected_crowd(self) -> list[int]:
        """Cached tokens of the crowd once the first prompts were computed."""
        lengths = [len(prompt) for prompt in self.first if len(prompt) in _CROWD_SHARED]
        return [self._aligned(length - 1) for length in lengths]

    def expected_second_turn(self) -> list[int]:
        """Cached tokens of the second turn: the answer's last token was never computed."""
        added = ANSWER_TOKENS if self.keeps_decoded else 0
        return [self._aligned(len(prompt) + added - 1) for prompt in self.first]

    def rounds(self) -> dict[str, Round]:
        """One life of an engine: cold, hits in memory, then prompts that hit in part."""
        return {
            "cold": Round(prompts=self.first, max_tokens=ANSWER_TOKENS),
            "warm": Round(prompts=self.first, max_tokens=ANSWER_TOKENS),
            "varied": Round(prompts=self.varied),
            "second turn": Round(prompts=self.more, continues="cold"),
        }

    def job(self, rounds: dict[str, Round], **changes: Any) -> EngineJob:
        """Build the job of one engine."""
        return EngineJob(model=str(self.model), dtype=self.dtype, rounds=rounds, **changes)

    def _aligned(self, token_count: int) -> int:
        return token_count // self.alignment_tokens * self.alignment_tokens

    def _tokens(self, name: str, count: int) -> list[int]:
        chosen = random.Random(f"{self.model.name}/{name}")
        return [chosen.randrange(3, 259) for _ in range(count)]


def tier_config(backend: str, path: Path, **offload: Any) -> dict[str, Any]:
    """Build a configuration with memory and one tier below it."""
    tier = {"name": "disk", "backend": backend, "path": str(path), "capacity": "512MiB"}
    return {
        "version": 1,
        "primary": {"capacity": "96MiB"},
        "secondary": [tier],
        **({"offload": offload} if offload else {}),
    }


def assert_same_answers(
    result: EngineResult, name: str, reference: EngineResult, reference_name: str, noise: float
) -> int:
    """Compare one round with one of a run without a connector; count the tokens compared.

    `noise` is what the logprobs of two runs without a connector differ by, as their batches differ.
    Where the reference chose by less than that, either choice is right, and what follows in that
    answer says nothing.
    """
    pairs = zip(result.rounds[name], reference.rounds[reference_name], strict=True)
    token_count = 0
    for number, (ours, theirs) in enumerate(pairs):
        where = f"round {name!r}, prompt {number}"
        assert ours.finish_reason == theirs.finish_reason, where
        token_count += assert_same_answer(ours, theirs, noise, where)
    return token_count


def assert_same_answer(ours: Answer, theirs: Answer, noise: float, where: str) -> int:
    """Compare one answer; return its tokens up to a near tie (see `assert_same_answers`)."""
    for position, token in enumerate(theirs.tokens):
        at = f"{where}, token {position}"
        if ours.tokens[position] != token:
            assert theirs.margins[position] <= noise, at
            return position
        assert abs(ours.logprobs[position] - theirs.logprobs[position]) <= noise, at
    return len(theirs.tokens)
