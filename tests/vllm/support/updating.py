"""Weights that change in a running engine: `python updating.py job result`. See `lab`."""

from typing import Any

from lab import Lab, main

_FACTOR = 1.25


def reset_after(lab: Lab) -> dict[str, Any]:
    """Change the weights, then reset: what a script does between two rounds of training."""
    _change_weights(lab)
    _reset(lab)
    return _asked_three_times(lab)


def reset_before(lab: Lab) -> dict[str, Any]:
    """Reset, then change the weights: the order of sleep, update, wake up."""
    lab.idle()
    _reset(lab)
    _change_weights(lab)
    return _asked_three_times(lab)


def again_as_loaded(lab: Lab) -> dict[str, Any]:
    """Do nothing: the engine has the weights that it loaded."""
    return {}


def _change_weights(lab: Lab) -> None:
    """Scale K and V of every layer, in place, by the norms before them.

    vLLM copies the matrices of linear layers into an order of its own on a CPU.
    """

    def scale(worker: Any) -> None:
        for name, tensor in worker.get_model().named_parameters():
            if name.endswith("input_layernorm.weight"):
                tensor.data.mul_(_FACTOR)

    lab.llm.collective_rpc(scale)


def _reset(lab: Lab) -> None:
    lab.idle()
    assert lab.llm.reset_prefix_cache(reset_connector=True)


def _asked_three_times(lab: Lab) -> dict[str, Any]:
    found = {"computed": lab.ask(lab.prompts)}
    lab.forget_gpu()
    found["from memory"] = lab.ask(lab.prompts)
    lab.forget_memory()
    found["from disk"] = lab.ask(lab.prompts)
    lab.forget_gpu()
    found["without tierstore"] = lab.ask(lab.prompts, is_cached=False)
    return found


if __name__ == "__main__":
    main({phase.__name__: phase for phase in (reset_after, reset_before, again_as_loaded)})
