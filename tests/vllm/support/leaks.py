"""What may stay behind in the connector's halves although nothing is in flight any more."""

from typing import Any

__all__ = ["find_leaks"]


def find_leaks(half: Any, worker: Any) -> list[str]:
    """Name what the scheduler half and the worker half still hold; both have come to rest."""
    stack = half._stack
    problems = list(half.check())
    if stack.primary._pins:
        problems.append(f"{len(stack.primary._pins)} chunks stay pinned in memory")
    if stack.primary.arriving:
        problems.append(f"{len(stack.primary.arriving)} chunks stay arriving")
    problems += [f"{len(tier.pins)} records stay pinned" for tier in stack.secondaries if tier.pins]
    if worker._open or worker._open.waiting_requests:
        problems.append("the worker half has jobs that nobody answers")
    return problems
