"""What an engine goes through while a strict listener hears its events.

Run as a script by the tests, `lab` explains how. After each phase the listener is compared with the
tiers themselves.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from kv_listener import DISK, MEMORY, StrictListener
from lab import Lab
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tierstore.key import make_offload_keys
from tierstore.tier.reservation import ChunkState

_GPU_BLOCKS = 130
"""Little more than one request may need, so that vLLM's own cache forgets."""
_FIRST, _LAST = b"first", b"last"
_POLL_MILLISECONDS = 60_000
_CONNECT_MILLISECONDS = 100
_CONNECT_COUNT_MAX = 1200


class Ear:
    """A subscriber of vLLM's publisher."""

    def __init__(self, socket: Any, hash_tokens: int) -> None:
        self.listener = StrictListener(hash_tokens)
        self._socket = socket

    def connect(self, lab: Lab) -> None:
        """Wait until the publisher knows its subscriber: what it says before goes nowhere."""
        for _ in range(_CONNECT_COUNT_MAX):
            self._publish(lab, _FIRST)
            if self._socket.poll(_CONNECT_MILLISECONDS):
                return
        raise AssertionError("the publisher is silent")

    def hear(self, lab: Lab) -> None:
        """Apply all that was published so far."""
        lab.idle()
        lab.metrics()  # its steps publish what the tiers have noted
        self._publish(lab, _LAST)
        while True:
            assert self._socket.poll(_POLL_MILLISECONDS), "the publisher is silent"
            payload = self._socket.recv_multipart()[-1]
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            for event in batch.events:
                if isinstance(event, BlockRemoved) and event.block_hashes == [_LAST]:
                    return
                if event != _marker(_FIRST):
                    self.listener.take(event)

    def _publish(self, lab: Lab, name: bytes) -> None:
        batch = KVEventBatch(ts=time.time(), events=[_marker(name)])
        lab.scheduler.kv_event_publisher.publish(batch)

    def differences(self, lab: Lab) -> dict[str, Any]:
        """Compare what was heard with what the tiers hold."""
        self.hear(lab)
        stack = lab.half._stack
        hashes = self.listener.hashes()
        keys = make_offload_keys(lab.half._manifest.namespace, 0, hashes)
        blocks = [(0, maybe_convert_block_hash(BlockHash(h))) for h in hashes]
        states = zip(blocks, stack.states(keys), strict=True)
        places = zip(blocks, stack.secondaries[0].locate(keys), strict=True)
        memory = {block for block, state in states if state is ChunkState.RESIDENT}
        disk = {block for block, place in places if place is not None}
        return {
            "in memory": len(memory),
            "on disk": len(disk),
            "wrong in memory": len(memory ^ self.listener.blocks(MEMORY)),
            "wrong on disk": len(disk ^ self.listener.blocks(DISK)),
        }


def _marker(name: bytes) -> BlockRemoved:
    return BlockRemoved(block_hashes=[name], medium=None)


def evictions(lab: Lab, ear: Ear) -> None:
    """Ask for more than memory holds, and than vLLM's own cache does."""
    lab.ask([[9, *prompt] for prompt in lab.prompts])


def promotions(lab: Lab, ear: Ear) -> None:
    """Ask again: what memory has lost comes from disk."""
    lab.idle()
    ear.listener.stored.clear()
    lab.ask(lab.prompts)


def salted(lab: Lab, ear: Ear) -> None:
    lab.ask(lab.prompts[:1], salt="s")


def reset(lab: Lab, ear: Ear) -> None:
    """Reset all caches, and fill them again."""
    lab.idle()
    assert lab.llm.reset_prefix_cache(reset_connector=True)
    lab.ask(lab.prompts[:1])


def restart(lab: Lab, ear: Ear) -> None:
    """Start both halves anew: the disk is as it was."""
    ear.hear(lab)
    lab.reopen()
    ear.listener.restart()
    ear.listener.stored.clear()
    lab.ask([[8, *prompt] for prompt in lab.prompts])
    lab.ask(lab.prompts)


PHASES: list[Callable[[Lab, Ear], None]] = [evictions, promotions, salted, restart, reset]


def main() -> None:
    """Run all phases against one engine; write what they found."""
    job = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        job["engine"] = {
            "num_gpu_blocks_override": _GPU_BLOCKS,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://127.0.0.1:{port}",
            },
        }
        lab = Lab(job)
        ear = Ear(socket, job["hash_tokens"])
        ear.connect(lab)
        lab.ask(lab.prompts)
        found["cold"] = ear.differences(lab)
        for phase in PHASES:
            print(f"--- {phase.__name__}", flush=True)
            phase(lab, ear)
            found[phase.__name__] = ear.differences(lab)
            told = [event.medium for event in ear.listener.stored]
            found[phase.__name__]["told"] = {medium: told.count(medium) for medium in set(told)}
        found["problems"] = lab.check()
        lab.close()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
