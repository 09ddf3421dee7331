"""Resets of an engine's cache: `python resetting.py job result`. See `lab`."""

from typing import Any

from lab import Lab, main


def reset(lab: Lab) -> dict[str, Any]:
    """Reset at rest and ask again: at once, and when memory has it again."""
    found: dict[str, Any] = {"counts": {}}
    lab.idle()
    found["is reset"] = bool(lab.llm.reset_prefix_cache(reset_connector=True))
    with lab.counting(found["counts"]):
        found["after"] = lab.ask(lab.prompts)
    lab.forget_gpu()
    found["again"] = lab.ask(lab.prompts)
    return found


def sleep(lab: Lab) -> dict[str, Any]:
    """Let vLLM do what it does before it sleeps, or pauses and clears its caches."""
    lab.idle()
    lab.engine.engine_core.engine_core._reset_caches()
    return {"after": lab.ask(lab.prompts)}


if __name__ == "__main__":
    main({"reset": reset, "sleep": sleep})
