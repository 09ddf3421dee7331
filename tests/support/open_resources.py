"""What this process has open: descriptors and threads."""

from pathlib import Path

__all__ = ["are_given_back", "open_resources"]


def open_resources() -> list[int]:
    """Count the descriptors and the threads of this process."""
    return [len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")]


def are_given_back(before: list[int]) -> bool:
    """Return whether no more is open than `before`, when a thread may just have been ending."""
    return all(now <= then for now, then in zip(open_resources(), before, strict=True))
