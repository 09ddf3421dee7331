"""The table of what was tried: made of findings, and every finding is in it."""

import dataclasses
import json

import reliability
from _reliability_experiments import PARTS, Experiment, Finding, experiments_of
from _reliability_table import HOW, Kept, document_of
from broken_devices import FAULTS


def experiment_of(code, read=lambda lines: [Finding(fault="EIO", backend="file")], seconds=60):
    return Experiment(
        part="endurance",
        fault="EIO",
        backend="file",
        arguments=("-c", code),
        seconds_max=seconds,
        read=read,
    )


def page_of(*findings, **conditions):
    return document_of([Kept(finding=one, conditions=conditions) for one in findings])


def row_of(page, name):
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_sums_what_both_backends_did_and_takes_the_longest_stall():
    first = Finding(fault="EIO", backend="file", recomputed=5, memory_stall_seconds=0.25)
    second = Finding(fault="EIO", backend="lmdb", recomputed=7, lost=1, over_quota_bytes=9)
    cells = row_of(page_of(first, second), "EIO")
    assert cells == ["EIO", "2", "12", "0", "0", "0", "1", "0", "9", "0.25", "-", "-"]


def test_what_went_wrong_and_every_condition_is_told():
    page = page_of(Finding(fault="EIO", backend="file", problems=["a call hangs"]), commit="abc")
    assert "- EIO, file: a call hangs" in page
    assert "- commit: abc" in page
    assert HOW["EIO"] in page
    assert HOW["full"] not in page


def test_a_process_that_fails_says_nonsense_or_hangs_is_a_finding():
    for code, words in {
        "import sys; sys.exit('broken')": "ended with 1: broken",
        "print('nonsense')": "not understood",
    }.items():
        (found,) = reliability.run(experiment_of(code, lambda lines: json.loads(lines[-1])), None)
        assert found.ended == 1
        assert words in found.problems[0]
    (found,) = reliability.run(experiment_of("import time; time.sleep(999)", seconds=0.5), None)
    assert (found.ended, "did not end within" in found.problems[0]) == (1, True)
    assert not reliability.is_sound(found)


def test_the_last_run_of_an_experiment_counts(tmp_path):
    path = tmp_path / "results"
    for lost in (3, 0):
        found = [Finding(fault="EIO", backend="file", lost=lost)]
        reliability.keep(path, experiment_of("pass"), found, tmp_path)
    (kept,) = reliability.read_results(path)
    assert kept.finding == Finding(fault="EIO", backend="file")
    assert kept.conditions["date"]


def test_every_fault_that_is_tried_is_explained_and_named_once():
    for is_quick in (False, True):
        experiments = [
            one for part in PARTS for one in experiments_of(part, is_quick=is_quick, seed=1)
        ]
        names = [one.name for one in experiments]
        assert len(names) == len(set(names))
        page = page_of(
            *[
                dataclasses.replace(
                    Finding(fault=one.fault, backend=one.backend),
                    facts={"chunks": 1, "evicted": 1, "strikes": 1}
                    | {name: [1, 1] for name in ("memory_bytes", "descriptors", "threads")},
                )
                for one in experiments
            ]
        )
        assert [name for name in HOW if f"- **{name}**" not in page] == []
        kinds = {one.fault.partition(",")[0] for one in experiments}
        assert kinds == {name.partition(",")[0] for name in HOW}


def test_every_device_that_can_be_broken_is():
    tried = {one.fault for one in experiments_of("endurance", is_quick=True, seed=1)}
    assert tried == set(FAULTS)
