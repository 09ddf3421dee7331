"""The warm-up script, and what a fresh engine then finds.

Goal: after `scripts/warmup.py` over 40 prompts of all three kinds, a new process loads at least
99 % of their full blocks from disk and computes none of them.
Method: the script in a process of its own, a fresh engine without the script's help, vLLM's own
count of cached tokens.
"""

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from engine import EngineJob, Round, engine_environment, run_engine

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclass
class Setting:
    folder: Path
    model: Path
    config: Path
    prompts: Path
    token_lists: list[list[int]]


def words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(["cache", "prefix", "warm", "cold", "tier"], k=count))


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    from tiny_llama import make_tiny_llama
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("warmup")
    model = make_tiny_llama(folder / "model", hidden_size=128, layer_count=2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    source = random.Random(5)
    head = words(source, 60)
    lines, token_lists = [], []
    for number in range(12):
        text = head + words(source, 10 * number + 1)
        lines.append({"text": text})
        token_lists.append(tokenizer.encode(text))
    lines.append(lines[3])
    lines.append({"text": head})
    token_lists += [token_lists[3], tokenizer.encode(head)]
    for number in range(13):
        messages = [{"role": "system", "content": head}, {"role": "user", "content": str(number)}]
        messages[1]["content"] += words(source, 40)
        lines.append({"messages": messages})
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        token_lists.append(tokenizer.encode(rendered, add_special_tokens=False))
    for number in range(13):
        tokens = source.choices(range(256), k=1 + 70 * number)
        lines.append({"token_ids": tokens})
        token_lists.append(tokens)
    assert len(lines) == 40
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = folder / "store.yaml"
    tier = {"name": "disk", "backend": "file", "path": "cache", "capacity": "256MiB"}
    # A small memory and a rule that writes late: the script has to see to it that all is written.
    tier["cascade"] = "second_touch"
    config.write_text(yaml.safe_dump({"primary": {"capacity": "16MiB"}, "secondary": [tier]}))
    return Setting(folder, model, config, prompts, token_lists)


def run_script(setting: Setting, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "warmup.py", "--prompts", setting.prompts]
    command += ["--config", setting.config, "--model", setting.model, "--dtype", "float32"]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enforce-eager"]
    return subprocess.run(
        [*map(str, command), *more],
        check=False,
        env=engine_environment(separate_process=True),
        capture_output=True,
        text=True,
        timeout=600,
    )


def number_after(report: str, word: str) -> int:
    match = re.search(rf"^ *{word} +([0-9,]+)", report, re.MULTILINE)
    assert match, report
    return int(match[1].replace(",", ""))


def test_a_fresh_engine_loads_what_the_warm_up_stored(setting: Setting) -> None:
    done = run_script(setting)
    assert done.returncode == 0, done.stderr[-4000:]
    assert number_after(done.stdout, "prompts") == 40
    # One prompt stands twice, and one is the beginning of others.
    assert number_after(done.stdout, "prefilled") == 38
    assert number_after(done.stdout, "already there") == 0
    assert number_after(done.stdout, "computed") <= number_after(done.stdout, "tokens")

    again = run_script(setting)
    assert again.returncode == 0, again.stderr[-4000:]
    assert number_after(again.stdout, "computed") < 38 * (BLOCK_TOKENS + 1)

    tier = yaml.safe_load(setting.config.read_text())["secondary"][0]
    tier["path"] = str(setting.folder / "cache")
    job = EngineJob(
        model=str(setting.model),
        dtype="float32",
        rounds={
            "fresh": Round(prompts=setting.token_lists, max_tokens=1, reset=False, one_by_one=True)
        },
        config={"primary": {"capacity": "16MiB"}, "secondary": [tier]},
    )
    result = run_engine(job, setting.folder / "runs")
    full = [(len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in setting.token_lists]
    cached = [answer.cached for answer in result.rounds["fresh"]]
    assert sum(cached) >= 0.99 * sum(full)
    assert result.metrics["tierstore_promoted_chunks"] > 0


def test_a_wrong_line_is_named_before_any_model_is_loaded(setting: Setting, tmp_path: Path) -> None:
    setting.prompts.with_name("bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    done = run_script(setting, "--prompts", str(setting.prompts.with_name("bad.jsonl")))
    assert done.returncode == 1
    assert "bad.jsonl:2: expected an object with one of the keys" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_without_a_disk_is_refused(setting: Setting, tmp_path: Path) -> None:
    config = tmp_path / "memory.yaml"
    config.write_text("primary: {capacity: 16MiB}\n")
    done = run_script(setting, "--config", str(config))
    assert done.returncode == 1
    assert "a warm-up needs a tier on disk" in done.stderr
    assert "Traceback" not in done.stderr
