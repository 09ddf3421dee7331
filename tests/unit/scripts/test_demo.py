import copy

import demo
import pytest

TURNS = 3


def answer(turn: int, **cached: int) -> dict:
    tokens = dict.fromkeys(("device", "host", "disk"), 0) | cached
    return {
        "turn": turn,
        "prompt_tokens": 100 + 100 * turn,
        "cached_tokens": tokens,
        "first_token_seconds": 1.0,
        "token_ids": [1, 2, 3],
    }


@pytest.fixture
def passes(monkeypatch) -> dict:
    monkeypatch.setattr(demo, "CONVERSATIONS", 1)
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 3)
    # Blocks of 32: of 100 tokens 96 can be loaded, of 200 192, of 300 288.
    full = (96, 192, 288)
    nothing = [answer(turn) for turn in range(TURNS)]
    return {
        "recomputed": nothing,
        "plain": nothing,
        "again": nothing,
        # Of the turn before: 100 + 3 - 1 tokens, then 200 + 3 - 1.
        "cold": [answer(0), answer(1, host=96), answer(2, host=192)],
        "memory": [answer(turn, host=full[turn]) for turn in range(TURNS)],
        "disk": [answer(0, disk=96), answer(1, host=96, disk=96), answer(2, host=192, disk=96)],
    }


def verdict(passes: dict) -> list[str]:
    return [*demo.different_tokens(passes), *demo.missing_hits(passes, 32)]


def test_a_run_with_all_hits_and_the_same_tokens_passes(passes) -> None:
    assert verdict(passes) == []


@pytest.mark.parametrize("name", ["cold", "memory", "disk"])
def test_one_token_that_differs_fails_the_demo(passes, name: str) -> None:
    passes[name] = copy.deepcopy(passes[name])
    passes[name][1]["token_ids"][2] = 9
    assert verdict(passes) == [
        f"{demo.ROWS[name]}: answer 1 differs from the run without tierstore"
    ]


@pytest.mark.parametrize("name", ["cold", "memory", "disk"])
def test_one_block_that_was_not_loaded_fails_the_demo(passes, name: str) -> None:
    passes[name][2]["cached_tokens"]["host"] -= 32
    assert len(verdict(passes)) == 1
    assert "prompt 2" in verdict(passes)[0]


def test_hits_on_the_gpu_do_not_count_as_loaded(passes) -> None:
    passes["memory"][0]["cached_tokens"] = {"device": 96, "host": 0, "disk": 0}
    assert verdict(passes) == ["2 GPU emptied: prompt 0: 0 of 96 loaded"]


def test_a_new_process_must_load_from_disk(passes) -> None:
    passes["disk"] = passes["memory"]
    assert verdict(passes) == ["3 new process: nothing was loaded from disk"]


def test_memory_hits_are_no_disk_hits(passes) -> None:
    passes["memory"][0]["cached_tokens"] = {"device": 0, "host": 0, "disk": 96}
    assert verdict(passes) == ["2 GPU emptied: 96 tokens came from disk"]


def test_the_table_and_the_plot_are_made_of_any_outcome(passes, tmp_path) -> None:
    from rich.console import Console

    console = Console(width=200, record=True)
    console.print(demo.table_of(passes, verdict(passes)))
    text = console.export_text()
    assert all(title in text for title in demo.ROWS.values())
    demo.save_plot(passes, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
