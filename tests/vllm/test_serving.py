"""A server launched as the README says, asked over HTTP: what one computed, the next one loads."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm")

from engine import engine_environment
from openai import APIConnectionError, OpenAI
from scenario import tier_config
from waiting import within_seconds

pytestmark = pytest.mark.vllm

STARTUP_SECONDS = 600
TEXT = "the cache keeps the prefix of every prompt that came before " * 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(model: Path, config: Path, log: Path) -> Iterator[OpenAI]:
    """Run a server; yield a client; end it with SIGTERM, as a service manager does."""
    port = free_port()
    transfer = {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tierstore.config": str(config)},
    }
    command = [
        # What `vllm serve` runs; the command itself looks for a distribution named vllm, and the
        # build for CPUs has another name.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
        # Without it vLLM kills its engine at once, in the middle of the last writes.
        *("--shutdown-timeout", "30"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=engine_environment(separate_process=True),
        )
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        try:
            wait_until_ready(client, process, log)
            yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(180) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            process.kill()


def wait_until_ready(client: OpenAI, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < until:
        try:
            client.models.list()
        except APIConnectionError:
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


def ask(client: OpenAI) -> tuple[str, int]:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, temperature=0)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details else 0


def tier_states(client: OpenAI) -> list[float]:
    """Return what `/metrics` says of the state of the tier."""
    with urlopen(str(client.base_url).removesuffix("v1/") + "metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:tierstore_tier_state{")]
    assert all('tier="disk"' in line for line in found)
    return [float(line.rpartition(" ")[2]) for line in found]


def test_a_restarted_server_loads_what_the_one_before_computed(tmp_path: Path) -> None:
    from tiny_models import build_model

    model = build_model("llama", tmp_path)
    config = tmp_path / "tierstore.yaml"
    config.write_text(json.dumps(tier_config("file", tmp_path / "tier")))
    with server(model, config, tmp_path / "first.log") as client:
        text, cached = ask(client)
        assert cached == 0
        assert within_seconds(lambda: tier_states(client) == [0])
    with server(model, config, tmp_path / "second.log") as client:
        again, cached = ask(client)
    assert again == text
    # One token per byte: all whole blocks but that of the last token.
    assert cached == (len(TEXT) - 1) // 32 * 32
