"""The worker half: one rank's data plane behind vLLM's worker hooks."""

from tierstore_vllm.worker.half import DRAIN_SECONDS, WorkerHalf

__all__ = ["DRAIN_SECONDS", "WorkerHalf"]
