"""Callers' objects that raise, lie or are of the wrong kind, and what a refusal looks like."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from store_kit import Chunks

from tierstore.errors import TierStoreError

CHUNKS = Chunks(4096)
NAMESPACE = CHUNKS.manifest.namespace
NUMBERS = range(4)
KEYS = CHUNKS.keys(NUMBERS)
ROWS = CHUNKS.array(NUMBERS)
HUGE = "x\n\x1b[2J" * 200_000
WORDS_MAX = 3_000


class FaultError(RuntimeError):
    """What a caller's own code raises."""


def refused(call, *arguments):
    with pytest.raises((TypeError, ValueError, TierStoreError)) as caught:
        call(*arguments)
    assert not isinstance(caught.value, UnicodeError)
    words = str(caught.value)
    assert words
    assert len(words) <= WORDS_MAX
    assert words.isprintable()
    return words


class Raising:
    """Raises wherever it is asked."""

    def _raise(self, *_):
        raise FaultError(HUGE)

    __iter__ = __len__ = __index__ = __int__ = __float__ = __fspath__ = __getitem__ = _raise
    __repr__ = __str__ = __bool__ = __eq__ = __array__ = __bytes__ = __contains__ = _raise
    __hash__ = object.__hash__

    @property
    def numpy(self):
        raise FaultError(HUGE)


class Keys(Sequence):
    """A sequence that lies."""

    def __init__(self, keys, fault=""):
        self.keys = keys
        self.fault = fault

    def __len__(self):
        return 1 << 40 if self.fault == "long" else -1 if self.fault == "short" else len(self.keys)

    def __getitem__(self, idx):
        if self.fault == "raises":
            raise FaultError(HUGE)
        return self.keys[idx]

    def __iter__(self):
        if self.fault == "ends early":
            return iter(self.keys[:2])
        return super().__iter__()


class ListOfMore(list):
    """Says that it has more than it has."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(list.__getitem__(self, slice(2)))


odd = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=80)
    | st.sampled_from(KEYS)
    | st.sampled_from(
        [Raising, FaultError, lambda: Keys(KEYS, "raises"), lambda: ListOfMore(ROWS)]
    ).map(lambda make: make())
)
odder = odd | st.lists(odd, max_size=4) | st.tuples(odd, odd) | st.dictionaries(st.text(), odd)
