import pytest
from bench.reach.vllm_targets import reached

FIRST_TOKEN = {
    "vLLM's own cache": [8.0],
    "tierstore: from memory": [13.0, 12.0, 11.0],
    "tierstore: from disk, new process": [30.0],
    "floor: one step + 3 MB from memory at 9.9 GB/s": [10.0],
    "floor: one step + 3 MB from disk at 2.0 GB/s": [20.0],
}
NO_HITS = {"memory, ratio": [0.9, 0.985, 1.0], "memory and disk, ratio": [0.96]}


@pytest.mark.parametrize(
    ("model", "missed"),
    [("tiny", ["<= 1.3"]), ("larger", [">= 0.99", ">= 0.99", "<= 1.3"])],
)
def test_medians_are_held_against_targets_and_misses_come_first(model, missed) -> None:
    found = reached(model, FIRST_TOKEN, NO_HITS)
    assert [one.target for one in found if not one.met] == missed
    assert [one.met for one in found] == sorted(one.met for one in found)
    measured = {one.what.partition(":")[0]: one.measured for one in found}
    assert measured == {
        "no hits, memory": 0.985,
        "no hits, memory and disk": 0.96,
        "hit, from memory": 1.2,
        "hit, from disk, new process": 1.5,
    }


def test_a_missed_target_is_marked_in_the_table(capsys) -> None:
    rich = pytest.importorskip("rich.console")
    from bench.reach.vllm_tables import target_table

    found = reached("tiny", FIRST_TOKEN, NO_HITS)
    rich.Console(width=130).print(target_table("tiny: targets", found))
    rows = [line for line in capsys.readouterr().out.splitlines() if "over" in line]
    assert ["missed" in row for row in rows] == [True, False, False, False]
