"""LoRA adapters that change in a running engine: `python adapting.py job result`. See `lab`."""

from pathlib import Path
from typing import Any

from engine import adapter_request
from lab import Lab, main
from tiny_adapters import write_adapter

_STEPS_BEFORE_RELOAD = 2


def loaded_beforehand(lab: Lab) -> dict[str, Any]:
    """Load an adapter, as vLLM's server does, before its first request."""
    _write(lab, seed=1)
    _load(lab, adapter_request("a", str(_folder(lab))))
    return _asked_twice(lab)


def read_again(lab: Lab) -> dict[str, Any]:
    """Let the worker drop the adapter, and read the same files again."""
    _drop(lab)
    return _asked(lab)


def files_changed_while_dropped(lab: Lab) -> dict[str, Any]:
    """Put other weights below the path before the worker reads them again."""
    _drop(lab)
    _write(lab, seed=2)
    return _asked_twice(lab)


def after_a_reset(lab: Lab) -> dict[str, Any]:
    """Empty all caches, vLLM's and tierstore's."""
    lab.idle()
    assert lab.llm.reset_prefix_cache(reset_connector=True)
    return _asked_twice(lab)


def reloaded_in_place(lab: Lab) -> dict[str, Any]:
    """Load other weights under the same name and path while the engine is idle."""
    _write(lab, seed=3)
    _load(lab, adapter_request("a", str(_folder(lab)), load_inplace=True))
    return _asked_twice(lab)


def reloaded_and_reset(lab: Lab) -> dict[str, Any]:
    """Load other weights while the engine is idle, and empty all caches before its next step."""
    _write(lab, seed=6)
    _load(lab, adapter_request("a", str(_folder(lab)), load_inplace=True))
    return after_a_reset(lab)


def reloaded_from_a_new_path(lab: Lab) -> dict[str, Any]:
    """Load other weights under the same name from another folder, as vLLM advises."""
    _write(lab, seed=4, name="a-2")
    _load(lab, adapter_request("a", str(_folder(lab, "a-2")), load_inplace=True))
    return _asked_twice(lab, "a-2")


def reloaded_while_a_request_runs(lab: Lab) -> dict[str, Any]:
    """Let one request be computed by old weights at first and by new ones then."""
    after_a_reset(lab)
    adapter = adapter_request("a", str(_folder(lab, "a-2")))
    assert lab.llm.reset_prefix_cache(reset_connector=True)
    lab.submit("mixed", lab.prompts[-1], adapter=adapter)
    for _ in range(_STEPS_BEFORE_RELOAD):
        lab.engine.step()
    _write(lab, seed=5, name="a-2")
    _load(lab, adapter_request("a", str(_folder(lab, "a-2")), load_inplace=True))
    lab.finish()
    return _asked_twice(lab, "a-2")


def _folder(lab: Lab, name: str = "a") -> Path:
    return lab.tier_path.parent / "adapters" / name


def _write(lab: Lab, *, seed: int, name: str = "a") -> None:
    write_adapter(Path(lab.model), _folder(lab, name), seed=seed)


def _load(lab: Lab, adapter: Any) -> None:
    assert lab.engine.add_lora(adapter)


def _drop(lab: Lab) -> None:
    lab.idle()
    assert lab.engine.remove_lora(adapter_request("a", "any").lora_int_id)


def _asked(lab: Lab, name: str = "a") -> dict[str, Any]:
    """Ask with vLLM's own cache empty: with what tierstore has, then without it."""
    adapter = adapter_request("a", str(_folder(lab, name)))
    found: dict[str, Any] = {}
    lab.forget_gpu()
    found["first"] = lab.ask(lab.prompts, adapter=adapter)
    lab.forget_gpu()
    found["without tierstore"] = lab.ask(lab.prompts, adapter=adapter, is_cached=False)
    return found


def _asked_twice(lab: Lab, name: str = "a") -> dict[str, Any]:
    found = _asked(lab, name)
    return found | {"second": _asked(lab, name)["first"]}


if __name__ == "__main__":
    phases = (
        loaded_beforehand,
        read_again,
        files_changed_while_dropped,
        after_a_reset,
        reloaded_in_place,
        reloaded_and_reset,
        reloaded_from_a_new_path,
        reloaded_while_a_request_runs,
    )
    main({phase.__name__: phase for phase in phases})
