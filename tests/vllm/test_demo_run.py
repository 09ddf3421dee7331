"""The demo end to end, with a smaller model and short conversations: no token different."""

from functools import partial

import demo
import pytest
from engine import engine_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_demo_finds_its_hits_and_no_different_token(tmp_path, monkeypatch, capsys) -> None:
    import tiny_llama

    smaller = partial(tiny_llama.make_tiny_llama, hidden_size=128, layer_count=2)
    monkeypatch.setattr(tiny_llama, "make_tiny_llama", smaller)
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    monkeypatch.setattr(demo, "OPENING_TOKENS", 400)
    monkeypatch.setattr(demo, "ADDITION_TOKENS", 100)
    monkeypatch.setattr("sys.argv", ["demo"])
    for name, value in engine_environment(separate_process=False).items():
        monkeypatch.setenv(name, value)
    status = demo.main()
    assert status == 0, capsys.readouterr().out
    assert (tmp_path / "demo" / "demo.png").exists()
