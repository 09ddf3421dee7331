"""The cache of header pages: what it forgets, and that it saves reads of the device."""

import random

from native_library import ScriptedKernel
from opened_backend import opened

from tierstore.backend.segments import header_pages
from tierstore.backend.segments.header_pages import HeaderCache
from tierstore.layout import PAGE_BYTES
from tierstore.testing.extents import Extent

SEGMENTS = range(5)
PAGES = range(0, 40, 4)


def test_the_cache_does_as_a_list_in_the_order_of_use(monkeypatch):
    count_max = 20
    monkeypatch.setattr(header_pages, "_CACHED_PAGES_MAX", count_max)
    dice = random.Random(4)
    cache = HeaderCache()
    model: dict[tuple[int, int], bytes] = {}
    for number in range(5000):
        place = dice.choice(SEGMENTS), dice.choice(PAGES)
        move = dice.choices(["put", "get", "drop", "segments"], weights=[20, 20, 2, 1])[0]
        if move == "put":
            model[place] = page = b"%d" % number
            if len(model) > count_max:
                del model[next(iter(model))]
            cache.put(*place, page)
        elif move == "get":
            page = model.get(place)
            if page is not None:
                model[place] = model.pop(place)
            assert cache.get(*place) == page
        elif move == "drop":
            model.pop(place, None)
            cache.drop(*place)
        else:
            dropped = set(dice.sample(SEGMENTS, 2))
            model = {known: page for known, page in model.items() if known[0] not in dropped}
            cache.drop_segments(dropped)
    left = [place for place in ((s, p) for s in SEGMENTS for p in PAGES) if cache.get(*place)]
    assert sorted(left) == sorted(model)


def test_a_thousand_header_pages_are_read_once(tmp_path):
    """Records in random order, of more extents than a few: the second time one call for each."""
    kernel = ScriptedKernel()
    backend = opened(tmp_path, library=kernel.native, mode="buffered")
    extents = [
        Extent(2, PAGE_BYTES, segment=number // 64, page=number % 64 * 3) for number in range(1000)
    ]
    for extent in extents:
        assert backend.write(extent.to_write()) == {}
    records = [extent.to_read()[1] for extent in extents]
    counts = []
    for _ in range(2):
        random.Random(1).shuffle(records)
        kernel.begin([])
        assert [backend.read([record]) for record in records] == [{}] * 1000
        counts.append(kernel.call_count)
    assert counts == [2000, 1000]
    backend.close()
