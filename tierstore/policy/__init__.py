"""Eviction policies: which chunk leaves the primary tier next."""

from collections.abc import Mapping
from typing import cast

from tierstore.config.plug_ins import PlugInGroup, load_plug_in, require_members
from tierstore.errors import ConfigError, TierStoreError
from tierstore.policy.arc import ArcPolicy
from tierstore.policy.checked import CheckedPolicy
from tierstore.policy.lru import LruPolicy
from tierstore.policy.protocol import EvictionPolicy
from tierstore.quoting import named, quoted

__all__ = ["make_policy"]


def make_policy(
    name: str, capacity_chunks: int, options: Mapping[str, object] | None = None
) -> EvictionPolicy:
    """Return a new policy for a tier that holds about `capacity_chunks` chunks.

    The capacity bounds the ghosts of `arc`; `lru` only sizes its tables by it. A plug-in is given
    the capacity, and the options as keyword arguments.

    Raises:
        ConfigError: there is no such policy, or the plug-in makes none of these options.
    """
    if name == "arc":
        return ArcPolicy(capacity_chunks)
    if name == "lru":
        return LruPolicy(capacity_chunks)
    make = load_plug_in(PlugInGroup.POLICIES, name)
    what = f"primary.eviction: {quoted(name)}"
    try:
        policy = make(capacity_chunks, **(options or {}))
    except TierStoreError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: the plug-in makes no policy: {named(error)}; see primary.eviction_options"
        ) from error
    require_members(policy, EvictionPolicy, what)
    return CheckedPolicy(cast("EvictionPolicy", policy), name)
