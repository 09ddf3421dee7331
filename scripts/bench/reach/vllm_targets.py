"""The targets of `bench_vllm.py` beside what was measured."""

from dataclasses import dataclass
from statistics import median

__all__ = ["Reached", "Samples", "reached"]

NO_HITS_MIN = {
    "tiny": {"memory": 0.98, "memory and disk": 0.95},
    "larger": {"memory": 0.99, "memory and disk": 0.99},
}
"""Tokens per second over those without connector, by model and tiers."""
HIT_MAX = {
    "memory": ("tierstore: from memory", 1.2),
    "disk": ("tierstore: from disk, new process", 1.3),
}
"""The samples of a first token, and their greatest multiple of the floor, by source."""

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A target and what was measured."""

    what: str
    target: str
    measured: float
    met: bool


def reached(model: str, first_token: Samples, no_hits: Samples) -> list[Reached]:
    """Hold the samples of a model against its targets; those missed come first."""
    found = []
    for tiers, least in NO_HITS_MIN[model].items():
        ratio = median(no_hits[f"{tiers}, ratio"])
        found.append(
            Reached(
                what=f"no hits, {tiers}: tokens/s over those without connector",
                target=f">= {least}",
                measured=ratio,
                met=ratio >= least,
            )
        )
    for source, (name, most) in HIT_MAX.items():
        (floor,) = (
            median(values)
            for floor_name, values in first_token.items()
            if floor_name.startswith("floor: ") and f" from {source} " in floor_name
        )
        multiple = median(first_token[name]) / floor
        found.append(
            Reached(
                what=f"hit, {name.removeprefix('tierstore: ')}: first token over its floor",
                target=f"<= {most}",
                measured=multiple,
                met=multiple <= most,
            )
        )
    return sorted(found, key=lambda one: one.met)
