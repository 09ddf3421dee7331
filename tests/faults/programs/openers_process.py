"""Processes that open one environment at about the same time: `python openers_process.py`.

Reads a JSON object from standard input: `path`, `count`, `seed`, `delay_seconds`. Each process
waits at random before it opens, after each lock that it asks for, and before the library's own
opening; then it writes a record, reads it, and closes. Ends with status 1 if one of them fails.
"""

import fcntl
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

import lmdb

from tierstore.lmdb_env.env import LmdbEnv


def main():
    job = json.load(sys.stdin)
    children = []
    for number in range(job["count"]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                open_and_use(job, number)
                status = 0
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(1 if any(statuses) else 0)


def open_and_use(job, number):
    dice = random.Random(job["seed"] * 1000 + number)
    library_open, lock = lmdb.open, fcntl.fcntl

    def wait():
        time.sleep(dice.uniform(0, job["delay_seconds"]))

    def open_late(*args, **kwargs):
        wait()
        return library_open(*args, **kwargs)

    def lock_late(*args):
        answer = lock(*args)
        wait()
        return answer

    lmdb.open, fcntl.fcntl = open_late, lock_late
    wait()
    env = LmdbEnv.open(Path(job["path"]), map_bytes=1 << 22, sealed=True)
    with env.write() as txn:
        txn.put(b"opener %d" % number, b"was here")
    with env.read() as txn:
        assert txn.get(b"opener %d" % number) == b"was here"
    env.close()


if __name__ == "__main__":
    main()
