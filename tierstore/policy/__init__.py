"""Eviction policies: which chunk leaves the primary tier next."""

from typing import Literal

from tierstore.policy.arc import ArcPolicy
from tierstore.policy.lru import LruPolicy
from tierstore.policy.protocol import EvictionPolicy

__all__ = ["make_policy"]


def make_policy(name: Literal["lru", "arc"], capacity_chunks: int) -> EvictionPolicy:
    """Return a new policy for a tier that holds about `capacity_chunks` chunks.

    The capacity bounds the ghosts of `arc`; `lru` has none.
    """
    return ArcPolicy(capacity_chunks) if name == "arc" else LruPolicy()
