"""The demo end to end, with short conversations: real vLLM, three processes, no token different."""

import demo
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_demo_finds_its_hits_and_no_different_token(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    monkeypatch.setattr(demo, "OPENING_TOKENS", 400)
    monkeypatch.setattr(demo, "ADDITION_TOKENS", 100)
    monkeypatch.setattr("sys.argv", ["demo"])
    status = demo.main()
    assert status == 0, capsys.readouterr().out
    assert (tmp_path / "demo" / "demo.png").exists()
