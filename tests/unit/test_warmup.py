import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import load_config, to_mapping
from tierstore.errors import PromptError
from tierstore.warmup import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    distinct_prefixes,
    parse_prompt,
    patient_config,
    read_prompts,
)


def read_all(path: Path) -> list[tuple[int, Prompt]]:
    async def collect() -> list[tuple[int, Prompt]]:
        return [numbered async for numbered in read_prompts(path)]

    return asyncio.run(collect())


def test_the_three_kinds_of_lines_are_read_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "grüße"}]
    lines = [{"text": "a b"}, {"messages": messages}, {"token_ids": [1, 0]}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    assert read_all(path) == [
        (1, TextPrompt("a b")),
        (3, ChatPrompt((("system", ""), ("user", "grüße")))),
        (5, TokenPrompt((1, 0))),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "a"', "not JSON: "),
        ('"a"', "expected an object with one of the keys text, messages, token_ids, got str"),
        ('{"prompt": "a"}', "got ['prompt']"),
        ('{"text": "a", "token_ids": [1]}', "got ['text', 'token_ids']"),
        ("{}", "got []"),
        ('{"text": ""}', "text: expected a string that is not empty, got ''"),
        ('{"text": 5}', "text: expected a string"),
        ('{"messages": []}', "messages: expected a list of objects"),
        ('{"messages": [{"role": "user"}]}', "messages: expected a list of objects"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages: expected a list of objects"),
        ('{"messages": {"role": "user"}}', "messages: expected a list of objects"),
        ('{"token_ids": []}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [1, -1]}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [true]}', "token_ids: expected a list of token ids"),
        ('{"token_ids": [4294967296]}', "token_ids: expected a list of token ids"),
        ('{"token_ids": "12"}', "token_ids: expected a list of token ids"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(PromptError) as caught:
        read_all(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[" * 100_000, "not JSON: "),
        ('{"text":' * 100_000, "not JSON: "),
        (json.dumps({"x" * 1_000_000: 1}), "(1,000,000 characters)"),
        (json.dumps(dict.fromkeys(map(str, range(10_000)))), "(10,000 items)"),
        (json.dumps({"text": ["x" * 1_000_000]}), "expected a string"),
        ('{"token_ids": [' + "9" * 5_000 + "]}", "not JSON: "),
        ('{"text": "\\ud800"}', "not valid Unicode"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "not valid Unicode"),
    ],
    ids=lambda text: text[:20],
)
def test_a_line_out_of_all_bounds_is_told_in_few_words(line: str, expected: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompt(line)
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 2_000


def test_a_warm_up_of_a_huge_memory_tier_has_a_configuration_that_loads() -> None:
    tier = {"name": "a", "backend": "file", "path": "/a", "capacity": "8MiB"}
    config = load_config({"primary": {"capacity": "2TiB"}, "secondary": [tier]})
    assert load_config(to_mapping(patient_config(config))) == patient_config(config)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"absent\.jsonl: cannot be read"):
        read_all(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match=r"cannot be read"):
        read_all(tmp_path / "a\0b")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe4"}\n')
    with pytest.raises(PromptError, match=r"latin\.jsonl: cannot be read"):
        read_all(tmp_path / "latin.jsonl")


def test_a_prefix_of_another_prompt_needs_no_prefill_of_its_own() -> None:
    prompts = [[1, 2], [1, 2, 3], [1, 3], [1, 2, 3], [1], [300, 1], [255, 9, 9], [1, 2, 4]]
    assert distinct_prefixes(prompts) == [1, 7, 2, 6, 5]


def test_nothing_is_made_of_nothing() -> None:
    assert distinct_prefixes([]) == []


@given(st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), min_size=1, max_size=5)))
def test_every_prompt_begins_exactly_one_kept_prompt_or_is_kept(prompts: list[list[int]]) -> None:
    kept = distinct_prefixes(prompts)
    assert [prompts[index] for index in kept] == sorted(prompts[index] for index in kept)
    for prompt in prompts:
        assert any(prompts[index][: len(prompt)] == prompt for index in kept)
    for one in kept:
        for other in kept:
            longer, shorter = prompts[one], prompts[other]
            assert one == other or longer[: len(shorter)] != shorter


@given(st.text())
def test_any_line_is_a_prompt_or_an_error(line: str) -> None:
    try:
        parsed = parse_prompt(line)
    except PromptError:
        return
    assert isinstance(parsed, TextPrompt | ChatPrompt | TokenPrompt)
