"""The use that a batch of chunks is told with: the request's, from where the batch begins."""

from tierstore.policy.use import UseContext

__all__ = ["at_depth", "use_by"]


def use_by(request_id: str, use: UseContext) -> UseContext:
    """Return what was said of a request, under the name that the planner knows it by."""
    return _of(request_id, use, 0)


def at_depth(use: UseContext, depth: int) -> UseContext:
    """Return the use of a batch before which `depth` chunks of the prefix lie."""
    return _of(use.request_id, use, depth)


def _of(request_id: str, use: UseContext, depth: int) -> UseContext:
    # Through `of`, so that equal uses are one object.
    return UseContext.of(
        request_id,
        parent_id=use.parent_id,
        turn=use.turn,
        depth=depth,
        priority=use.priority,
        hints=use.hints,
        cost_seconds=use.cost_seconds,
    )
