"""What the data plane of a tier on this machine reads from places: extents and segments.

Tiers elsewhere name their places as they like. Ask here only for places of the catalog.
"""

import numpy as np

from tierstore.codec.record import parse_places
from tierstore.transfer import PlaceArray

__all__ = ["extent_ends", "segments_of"]


def extent_ends(places: PlaceArray) -> list[int]:
    """Return where the extents of adjacent records end: ascending indices, the last is their count.

    Places of a damaged catalog may be anything; every division of them is allowed then.
    """
    fields = parse_places(places)
    extents = fields["segment"].astype(np.int64) << 32 | fields["header_page"]
    return [*(np.flatnonzero(extents[1:] != extents[:-1]) + 1).tolist(), len(places)]


def segments_of(places: PlaceArray) -> list[int]:
    """Return the segments that the records lie in, ascending, each once."""
    segments: list[int] = np.unique(parse_places(places)["segment"]).tolist()
    return segments
