"""The record: how one chunk lies in a secondary tier. One codec for all backends.

    extent in a segment file (pages of 4 KiB, h = 1 header page):
        | header page: header 0 .. header n-1 | payload 0 | payload 1 | ... | payload n-1 |
          ^ header_page                         ^ header_page + 1 + index * stride_pages
    value in LMDB or in a remote store:
        | header | payload |

A header is 128 bytes, so a header page describes up to 32 adjacent records: a prefix that was
stored together is read with one vectored call, and small chunks do not pay a page each.
"""

import numpy as np

from tierstore.layout import PAGE_BYTES

__all__ = [
    "EXTENT_RECORDS_MAX",
    "HEADER_BYTES",
    "PLACE_BYTES",
    "PLACE_DTYPE",
]

HEADER_BYTES = 128
EXTENT_RECORDS_MAX = PAGE_BYTES // HEADER_BYTES

PLACE_DTYPE = np.dtype(
    [
        ("segment", "<u4"),
        ("header_page", "<u4"),
        ("index", "<u4"),
        ("stride_pages", "<u4"),
        ("payload_bytes", "<u4"),
    ]
)
"""Fields of a `transfer.Place`: record `index` of the extent whose header page is `header_page`."""

PLACE_BYTES = PLACE_DTYPE.itemsize
