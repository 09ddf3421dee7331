"""Questions to a catalog that come one after the other."""

import threading

import pytest
from waiting import within_seconds

from tierstore.embedded.catalog_reader import CatalogReader
from tierstore.errors import BackendError


def test_a_question_that_fails_takes_no_answer_from_the_next_ones():
    tier, may_go_on = object(), threading.Event()
    reader = CatalogReader([tier])

    def fail(_tier):
        raise MemoryError

    try:
        (held,) = reader.ask(lambda _: may_go_on.wait(60))
        (failed,) = reader.ask(fail)
        (answered,) = reader.ask(lambda asked: asked is tier)
        with pytest.raises(BackendError, match="does not answer"):
            answered.answer()
    finally:
        may_go_on.set()
    assert within_seconds(lambda: answered.is_done, 20)
    assert held.answer()
    assert answered.answer()
    with pytest.raises(MemoryError):
        failed.answer()
    assert reader.close(60)
