"""What a request says of itself for policies: bounded, checked, and told with its chunks."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from hooked import HookedEngine, make_request, scheduled

from tierstore.policy.use import UNKNOWN_USE, UseContext
from tierstore.tier.stack import TierStack
from tierstore_vllm.scheduler.request_params import (
    HINT_CHARS_MAX,
    HINT_COUNT_MAX,
    PARENT_CHARS_MAX,
    TURN_MAX,
    RequestParams,
)


def use_of(params, **fields) -> UseContext:
    return RequestParams().use_of(SimpleNamespace(kv_transfer_params=params, **fields))


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"tierstore.cache": True}])
def test_of_a_request_that_says_nothing_nothing_is_known(params) -> None:
    assert use_of(params) is UNKNOWN_USE
    assert use_of(params, priority=-2) == UseContext(priority=-2)


def test_a_use_has_what_the_request_says_in_the_order_of_names() -> None:
    hints = {"z": "1", "a": "2"}
    params = {"tierstore.parent": "p", "tierstore.turn": 3, "tierstore.hints": hints}
    found = use_of(params, priority=1)
    assert found == UseContext(parent_id="p", turn=3, priority=1, hints=(("a", "2"), ("z", "1")))
    assert found is use_of(params, priority=1)


LARGEST = {
    "tierstore.parent": "p" * PARENT_CHARS_MAX,
    "tierstore.turn": TURN_MAX,
    "tierstore.hints": {
        f"{i:0{HINT_CHARS_MAX}}": "v" * HINT_CHARS_MAX for i in range(HINT_COUNT_MAX)
    },
}


def test_the_largest_words_are_taken() -> None:
    found = use_of(LARGEST)
    assert found.parent_id == LARGEST["tierstore.parent"]
    assert found.turn == TURN_MAX
    assert dict(found.hints) == LARGEST["tierstore.hints"]


class Text(str):
    """A class that could do anything when it is read."""

    __slots__ = ()


WRONG = [
    ("tierstore.parent", "p" * (PARENT_CHARS_MAX + 1)),
    ("tierstore.parent", 7),
    ("tierstore.parent", None),
    ("tierstore.parent", Text("p")),
    ("tierstore.turn", -1),
    ("tierstore.turn", TURN_MAX + 1),
    ("tierstore.turn", True),
    ("tierstore.turn", "1"),
    ("tierstore.hints", "kind=agent"),
    ("tierstore.hints", [("kind", "agent")]),
    ("tierstore.hints", {"kind": 1}),
    ("tierstore.hints", {1: "agent"}),
    ("tierstore.hints", {"kind": "v" * (HINT_CHARS_MAX + 1)}),
    ("tierstore.hints", {"k" * (HINT_CHARS_MAX + 1): "agent"}),
    ("tierstore.hints", {str(i): "v" for i in range(HINT_COUNT_MAX + 1)}),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_word_that_is_not_understood_is_left_out_and_told_of_once(name, value, caplog) -> None:
    params = RequestParams()
    request = SimpleNamespace(kv_transfer_params=LARGEST | {name: value})
    with caplog.at_level(logging.WARNING):
        found = {params.use_of(request) for _ in range(3)}
    expected = {key: word for key, word in LARGEST.items() if key != name}
    assert found == {use_of(expected)}
    (record,) = caplog.records
    assert f"kv_transfer_params.{name}=" in record.getMessage()
    assert len(record.getMessage()) < 2_000


@pytest.fixture
def told(monkeypatch):
    """Let the tiers go by uses, and keep what they are told with offloads."""
    uses = []
    reserve_offload = TierStack.reserve_offload

    def reserve(stack, group_idx, keys, *, use=UNKNOWN_USE):
        uses.append((use, len(keys)))
        return reserve_offload(stack, group_idx, keys, use=use)

    monkeypatch.setattr(TierStack, "needs_use", True)
    monkeypatch.setattr(TierStack, "reserve_offload", reserve)
    return uses


@pytest.fixture
def engine(tmp_path):
    config = {"version": 1, "primary": {"capacity": "8MiB"}}
    opened = HookedEngine(
        {
            "kv_connector": "TierStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tierstore.config": config},
        }
    )
    yield opened
    opened.close()


def compute(engine, *requests) -> None:
    for request in requests:
        engine.scheduler.on_new_request(request)
    engine.step(
        scheduled(
            *((request, [10 * n + i for i in (1, 2, 3)]) for n, request in enumerate(requests))
        )
    )


def test_the_chunks_of_each_request_are_told_with_what_it_says(told, engine) -> None:
    params = {"tierstore.parent": "a", "tierstore.turn": 1, "tierstore.hints": {"kind": "agent"}}
    says = make_request("b", 2, kv_transfer_params=params, priority=4)
    compute(engine, make_request("a", 2), says)
    hints = (("kind", "agent"),)
    assert told == [
        (UseContext("a"), 2),
        (UseContext("b", parent_id="a", turn=1, priority=4, hints=hints), 2),
    ]


def test_where_tiers_do_not_go_by_uses_words_are_not_even_looked_at(
    told, engine, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(TierStack, "needs_use", False)
    wrong = {"tierstore.turn": "first"}
    with caplog.at_level(logging.WARNING):
        compute(engine, make_request("a", 2), make_request("b", 2, kv_transfer_params=wrong))
    assert told == [(UNKNOWN_USE, 4)]
    assert not caplog.records
