"""The scheduler half: vLLM's scheduler hooks in the planner's words."""

from tierstore_vllm.scheduler.half import SchedulerHalf

__all__ = ["SchedulerHalf"]
