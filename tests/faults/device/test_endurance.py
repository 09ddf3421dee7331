"""One store under load through one fault of each kind: nothing wrong, nothing lost, and it is back.

Method: `endurance`, in a process of its own, once per fault and backend, with a short fault. By
hand it runs as long and as often as one likes.
"""

import json
import subprocess
import sys

import pytest
from broken_devices import FAULTS, why_not_here
from python_paths import FAULT_SUPPORT, environment

SECONDS_MAX = 600
BROKEN_SECONDS = 1.5
STALL_SECONDS_MAX = 5
"""What a memory hit may not take even on a busy machine; what it takes is measured by a script."""
REFUSING = {"EIO", "ENOSPC", "EROFS", "full", "RLIMIT_FSIZE"}
HANGING = {"hung calls", "hung mount", "stopped"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS_MAX)]


def endured(fault, backend, seed):
    arguments = ["--backend", backend, "--seed", str(seed), "--broken-seconds", str(BROKEN_SECONDS)]
    run = subprocess.run(
        [sys.executable, FAULT_SUPPORT / "endurance.py", fault, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", ["file", "lmdb"])
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_wrong_or_lost_and_the_tier_is_back(fault, backend):
    if why := why_not_here(fault):
        pytest.skip(why)
    outcome = endured(fault, backend, seed=1)
    assert outcome["problems"] == []
    assert outcome["is_back"]
    assert (outcome["wrong"], outcome["lost"], outcome["over_quota_bytes"]) == (0, 0, 0)
    assert outcome["memory_stall_seconds"] < STALL_SECONDS_MAX
    # A run that stored and loaded nothing would pass all of this.
    assert outcome["acknowledged"] > 100
    assert outcome["hits"] > 0
    if fault in REFUSING:
        assert outcome["refused"] > 0
        assert outcome["retried"] > 0
    if fault in HANGING:  # a flush waits for longer than that, in vain or not
        assert outcome["stall_seconds"] > BROKEN_SECONDS / 2
