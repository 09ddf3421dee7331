"""One row of a data file that nobody has verified: by the few pages on the way, which are."""

import numpy as np
import numpy.typing as npt

from tierstore.lmdb_env.image import Image
from tierstore.lmdb_env.page import BRANCH, DB_DTYPE, LEAF, NAMED, ImageDamagedError, nodes_of

__all__ = ["peek_row"]

_PAGE_COUNT_MAX = 1 << 32
_DEPTH_MAX = 32
_PLAIN = 0


def peek_row(descriptor: int, database: bytes, key: bytes) -> bytes | None:
    """Return a short value of a named database; None: there is none, or a page is damaged.

    Reads a page per level of two trees, and maps nothing. Others may write to the file meanwhile:
    then the value may be an older one.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        image = Image(descriptor, _PAGE_COUNT_MAX)
        named = _find(image, image.meta["main"], database, NAMED)
        if named is None or len(named) != DB_DTYPE.itemsize:
            return None
        return _find(image, np.frombuffer(named, DB_DTYPE)[0], key, _PLAIN)
    except ImageDamagedError:
        return None


def _find(image: Image, tree: npt.NDArray[np.void], key: bytes, flags: int) -> bytes | None:
    """Return the value of a key in a tree, if its node has these flags."""
    page = min(int(tree["root"]), image.page_count)
    for level in range(min(int(tree["depth"]), _DEPTH_MAX), 0, -1):
        kind = LEAF if level == 1 else BRANCH
        ((block, words),) = image.pages(np.array([page], np.int64))
        nodes = nodes_of(block, words, kind)
        content = words.tobytes()
        ends = (nodes.key_at + nodes.key_bytes).tolist()
        keys = [content[at:end] for at, end in zip(nodes.key_at.tolist(), ends, strict=True)]
        if kind == LEAF:
            if key not in keys or nodes.flags[keys.index(key)] != flags:
                return None
            at = keys.index(key)
            return content[ends[at] : ends[at] + int(nodes.size[at])]
        # The first key of a branch is empty: whatever is less than the second lies below it.
        at = sum(least <= key for least in keys[1:])
        page = min(int(nodes.size[at]) | int(nodes.flags[at]) << 32, image.page_count)
    return None
