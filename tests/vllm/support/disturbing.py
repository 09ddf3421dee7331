"""What is done to a running engine: `python disturbing.py job result`. See `lab`."""

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lab import SEAMS, Lab, main
from slow import SlowConnector

from tierstore.device.system import SystemCalls

_PAGE_BYTES = 4096
_ANSWER_SECONDS_MAX = 30
_USED_AGAIN_SECONDS_MAX = 120


def hit_sources(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {"memory_counts": {}, "disk_counts": {}}
    lab.forget_gpu()
    with lab.counting(found["memory_counts"]):
        found["memory"] = lab.ask(lab.prompts)
    lab.forget_memory()
    with lab.counting(found["disk_counts"]):
        found["disk"] = lab.ask(lab.prompts)
    return found


def salts(lab: Lab) -> dict[str, Any]:
    found = {"first": lab.ask(lab.prompts, salt="a")}
    lab.forget_gpu()
    found["same"] = lab.ask(lab.prompts, salt="a")
    found["other"] = lab.ask(lab.prompts, salt="b")
    lab.forget_memory()
    found["same from disk"] = lab.ask(lab.prompts, salt="a")
    return found


def questions(lab: Lab) -> dict[str, Any]:
    """Ask 32 times for one request, as vLLM does while it finds no blocks; then abort it."""
    lab.forget_memory()
    answers, pins = set(), []
    for number in range(2):
        lab.submit(f"asked-{number}", lab.prompts[-1])
        (request,) = lab.scheduler.requests.values()
        for _ in range(32):
            answers.add(_answer(lab, request))
        stack = lab.half._stack
        pins.append(len(stack.primary._pins) + sum(len(t.pins) for t in stack.secondaries))
        lab.engine.abort_request([f"asked-{number}"])
        lab.finish()
        lab.idle()
        lab.ask([lab.prompts[-1]])  # the second time its chunks are in memory
        lab.forget_gpu()
    return {"answers": sorted(answers), "pins": pins}


def _answer(lab: Lab, request: Any) -> tuple[int, bool]:
    """Ask until the records of a long prompt have been looked up."""
    until = time.monotonic() + _ANSWER_SECONDS_MAX
    while time.monotonic() < until:
        tokens, is_async = lab.connector.get_num_new_matched_tokens(request, 0)
        if tokens is not None:
            return tokens, is_async
        time.sleep(0.001)
    raise TimeoutError("no answer")


def leak(lab: Lab) -> dict[str, Any]:
    """A control: pin a chunk as a connector would that forgets to unpin it."""
    lab.idle()
    primary = lab.half._stack.primary
    keys = primary.coldest(1)
    primary.pin(keys)
    noticed = lab.check()
    primary.unpin(keys)
    return {"noticed": noticed}


def flipped(lab: Lab) -> dict[str, Any]:
    """Flip a bit in every second page of every segment, but not in the header pages."""

    def damage() -> None:
        for segment in lab.segments():
            with segment.open("r+b") as file:
                for page in range(1, segment.stat().st_size // _PAGE_BYTES, 2):
                    file.seek(page * _PAGE_BYTES + 77)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 0x10]))

    return _damaged(lab, damage)


def truncated(lab: Lab) -> dict[str, Any]:
    def damage() -> None:
        for segment in lab.segments():
            with segment.open("r+b") as file:
                file.truncate(2 * _PAGE_BYTES)

    return _damaged(lab, damage)


def removed(lab: Lab) -> dict[str, Any]:
    def damage() -> None:
        for segment in lab.segments():
            segment.unlink()
        _close_segments(lab)

    return _damaged(lab, damage)


def _close_segments(lab: Lab) -> None:
    """Forget the open files: they would still give the right bytes."""
    lab.files._open.close()
    lab.files._open.open(mapped=False)


def _damaged(lab: Lab, damage: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"counts": {}}
    lab.forget_memory()
    with lab.counting(found["counts"]):
        damage()
        found["damaged"] = lab.ask(lab.prompts)
    lab.forget_gpu()
    found["again from memory"] = lab.ask(lab.prompts)
    found["all memory free"] = lab.forget_memory()
    found["again from disk"] = lab.ask(lab.prompts)
    return found


def reset(lab: Lab) -> dict[str, Any]:
    """Reset the connector while requests load and offload."""
    found: dict[str, Any] = {}
    lab.forget_gpu()
    SlowConnector.steps_per_answer = 1 << 60
    fresh = [[9, *prompt] for prompt in lab.prompts]
    for number, prompt in enumerate([*lab.prompts, *fresh]):
        lab.submit(f"r{number}", prompt)
    lab.engine.step()
    lab.engine.step()
    in_flight = lab.half._planner._in_flight
    found["loads"], found["offloads"] = len(in_flight.loads), len(in_flight.offloads)
    found["while busy"] = bool(lab.llm.reset_prefix_cache(reset_connector=True))
    SlowConnector.steps_per_answer = 1
    lab.finish()
    lab.forget_gpu()
    found["after busy"] = lab.ask([*lab.prompts, *fresh])
    lab.forget_gpu()
    found["kept"] = lab.ask(lab.prompts)
    lab.idle()
    found["at rest"] = bool(lab.llm.reset_prefix_cache(reset_connector=True))
    found["after"] = lab.ask(lab.prompts)
    lab.forget_gpu()
    found["again"] = lab.ask(lab.prompts)
    return found


def vanished(lab: Lab) -> dict[str, Any]:
    """Remove the tier's directory; whoever comes first makes it again, tierstore or the user."""
    found: dict[str, Any] = {"counts": {}}
    lab.forget_memory()
    with lab.counting(found["counts"]):
        shutil.rmtree(lab.tier_path)
        _close_segments(lab)
        found["without"] = lab.ask(lab.prompts)
        lab.forget_memory()
        found["still without"] = lab.ask(lab.prompts)
        lab.idle()
    lab.tier_path.mkdir(exist_ok=True)
    until = time.monotonic() + _USED_AGAIN_SECONDS_MAX
    for attempt in range(256):
        fresh = [[8, 3 + attempt, *prompt] for prompt in lab.prompts]
        lab.forget_memory()
        found["back"] = lab.ask(fresh)
        lab.forget_memory()
        found["used again"] = lab.ask(fresh)
        if min(found["used again"]["cached"]) > 0 or time.monotonic() > until:
            break
        time.sleep(0.2)
    return found


def full(lab: Lab) -> dict[str, Any]:
    """Let the device of the tier have no room for a while."""
    found: dict[str, Any] = {"counts": {}}
    fresh = [[11, *prompt] for prompt in lab.prompts]
    lab.forget_memory()
    files = lab.files
    healthy = files._system
    files._system = _FullDevice()
    with lab.counting(found["counts"]):
        found["full"] = lab.ask(fresh)
        lab.idle()
    files._system = healthy
    lab.forget_memory()
    found["room again"] = lab.ask(fresh)
    lab.forget_memory()
    found["from disk"] = lab.ask(fresh)
    return found


class _FullDevice(SystemCalls):
    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space")


def hooks(lab: Lab) -> dict[str, Any]:
    """Let each hook fail, again and again, while requests load and offload."""
    found: dict[str, Any] = {}
    for number, seam in enumerate(SEAMS):
        print(f"--- {seam}", flush=True)
        lab.reopen()
        fresh = [[20 + number, *prompt] for prompt in lab.prompts]
        lab.llm.reset_prefix_cache()
        with _broken(lab, seam) as strikes:
            before = lab.ask([*lab.prompts, *fresh])
            lab.llm.reset_prefix_cache(reset_connector=seam.endswith("reset"))
            lab.submit(f"batch-{number}-0", lab.prompts[0])
            lab.submit(f"batch-{number}-1", fresh[-1])
            lab.finish()
            lab.connector.has_pending_push_work()  # an engine process asks it between requests
        _rest(lab)
        found[seam] = {
            "strikes": len(strikes),
            "answers": before,
            "freed": bool(lab.llm.reset_prefix_cache()),
            "requests": len(lab.scheduler.requests),
            "waiting loads": len(lab.worker._open.waiting_requests),
            "after": lab.ask(lab.prompts),
        }
    lab.reopen()
    return found


def _rest(lab: Lab) -> None:
    for _ in range(200):
        lab.engine.step()


@contextmanager
def _broken(lab: Lab, seam: str) -> Iterator[list[str]]:
    """Let the function at the end of the path raise whenever it is called."""
    *path, name = seam.split(".")
    owner: Any = lab
    holder: Any = None
    for step in path:
        holder, owner = owner, owner[int(step)] if step.isdigit() else getattr(owner, step)
    strikes: list[str] = []

    def fail(*arguments: Any, **more: Any) -> Any:
        strikes.append(name)
        raise RuntimeError(f"injected into {seam}")

    if isinstance(owner, dict):
        broken = type("Broken", (dict,), {name: fail})(owner)
        setattr(holder, path[-1], broken)
        yield strikes
        setattr(holder, path[-1], dict(broken))
    else:
        setattr(owner, name, fail)
        yield strikes
        delattr(owner, name)


if __name__ == "__main__":
    main(
        {
            phase.__name__: phase
            for phase in (
                hit_sources,
                salts,
                questions,
                leak,
                flipped,
                truncated,
                removed,
                reset,
                vanished,
                full,
                hooks,
            )
        }
    )
