"""A control plane alone: `python planning_process.py`, for a data plane in another process.

Reads a JSON object from standard input: configuration, chunk size, count of chunks. Prints the
demotes that it would have carried out, pickled, in one line of hexadecimal; then it waits.
"""

import json
import pickle
import sys

import numpy as np
from store_kit import Chunks

from tierstore.config import load_config
from tierstore.tier.disk.tier import DiskTier
from tierstore.tier.opening import open_tiers
from tierstore.tier_events import Freed, Placed
from tierstore.transfer import Demote, JobId


def main():
    job = json.loads(sys.stdin.readline())
    chunks = Chunks(job["chunk_bytes"])
    (config,) = load_config(job["config"]).secondary
    tier = open_tiers([DiskTier(config, chunks.manifest, tier_idx=0, rank_count=1)])[0]
    keys = chunks.keys(range(job["count"]))
    for ticket in range(0, job["count"], 4):
        tier.request_places(ticket + 1, keys[ticket : ticket + 4], job["chunk_bytes"])
    demotes = []
    while len(demotes) < job["count"] // 4:
        assert tier.wait(60)
        for event in tier.poll():
            assert not isinstance(event, Freed)
            if isinstance(event, Placed):
                demotes.append(
                    Demote(
                        job_id=JobId(event.ticket),
                        tier_idx=0,
                        group_idx=0,
                        keys=event.keys,
                        places=event.places,
                        slots=np.zeros(len(event.keys), np.int64),
                        owner=tier.owner,
                    )
                )
    print(pickle.dumps(demotes).hex(), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
