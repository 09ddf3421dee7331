"""The names of what a tier keeps below its path: directories of ranks, files of segments."""

import re

from tierstore.device.directory import Directory

__all__ = [
    "RANK_PATTERN",
    "SEGMENT_LIMIT",
    "SEGMENT_PATTERN",
    "rank_directories",
    "segment_name",
    "segment_number",
]

SEGMENT_LIMIT = 1 << 31
"""Segments are counted from 1 and are below this; a damaged key or name may say anything."""

SEGMENT_PATTERN = re.compile(r"[0-9a-f]{8}\.seg", re.ASCII)
RANK_PATTERN = re.compile(r"rank(0|[1-9][0-9]{0,4})", re.ASCII)


def segment_name(segment: int) -> str:
    """Return the name of a segment's file."""
    return f"{segment:08x}.seg"


def segment_number(name: str) -> int:
    """Return the segment whose file has a name; 0: it is the name of none."""
    if not SEGMENT_PATTERN.fullmatch(name):
        return 0
    number = int(name.removesuffix(".seg"), 16)
    return number if number < SEGMENT_LIMIT else 0


def rank_directories(base: Directory) -> dict[int, str]:
    """Return the names of the directories of ranks, by rank.

    Raises:
        OSError: the path cannot be read.
    """
    return {
        int(found[1]): entry.name
        for entry in base.entries()
        if (found := RANK_PATTERN.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    }
