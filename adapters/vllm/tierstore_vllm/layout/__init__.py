"""vLLM's KV caches in tierstore's words: groups, pages, byte regions.

A registered layer is a view `[block, head, state, content]` (blocks perhaps split into kernel
blocks) of one allocation that all layers share. Nothing is assumed about its strides: the pages of
different layers may be far apart (LBHNC), adjacent (BLHNC), padded (mamba), interleaved by head
(LHBNC), or overlay those of other groups.
"""

from tierstore_vllm.layout.description import (
    EngineShape,
    WorkerLayout,
    describe_engine,
    describe_worker,
)

__all__ = ["EngineShape", "WorkerLayout", "describe_engine", "describe_worker"]
