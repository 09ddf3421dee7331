"""What an engine says of its KV cache groups: how large blocks are may depend on the processor."""

import math
from typing import Any

__all__ = ["alignment_of", "held_blocks"]


def alignment_of(llm: Any) -> int:
    """Return the tokens at whose multiples a block of every group ends."""
    core = llm.llm_engine.engine_core
    if hasattr(core, "call_utility"):  # the engine has a process of its own
        groups = core.call_utility("get_kv_cache_group_metadata")
    else:
        groups = core.engine_core.get_kv_cache_group_metadata()
    return math.lcm(*(group["block_size"] for group in groups))


def held_blocks(llm: Any, prompt: list[int], sampling: Any) -> int:
    """Return the most blocks that one request holds while it answers, alone in this process."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    engine.add_request("measured", {"prompt_token_ids": prompt}, sampling)
    held = 0
    while engine.has_unfinished_requests():
        engine.step()
        if any(request.num_output_tokens for request in scheduler.requests.values()):
            held = max(held, free_before - pool.get_num_free_blocks())
    return held
