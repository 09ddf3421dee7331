"""One engine of the shared path: `python sharing_process.py`, driven by `shared_path`.

Reads a job (JSON) from the first line of standard input, then commands, one per line, and answers
each with a line of JSON. Between commands it puts, gets, asks and now and then resets, at random;
every byte that it gets is compared. Anything that must not happen is an answer `{"broken": ...}`,
after which it ends.
"""

import faulthandler
import json
import random
import select
import signal
import sys

from store_kit import Chunks

PREFIX_COUNT = 40
PREFIX_CHUNKS = 24
ACTIONS = {"put": 10, "get": 10, "match": 3, "check": 0.3}


class InvariantError(Exception):
    """An invariant does not hold."""


def check(store):
    problems = store.check()
    if problems:
        raise InvariantError(f"check is clean: {problems}")


class Engine:
    def __init__(self, job):
        self.chunks = Chunks(job["chunk_bytes"], model=job["model"])
        self.dice = random.Random(job["seed"])
        self.store = self.chunks.open(job["config"])
        self.weights = ACTIONS | {"reset": job["resets"]}
        self.hit_count = 0

    def act(self):
        """Do one thing at random."""
        (action,) = self.dice.choices(list(self.weights), list(self.weights.values()))
        first = self.dice.randrange(PREFIX_COUNT) * PREFIX_CHUNKS
        numbers = range(first, first + self.dice.randint(1, PREFIX_CHUNKS))
        if action == "put":
            self.chunks.put(self.store, numbers)
        elif action == "get":
            self.hit_count += len(self.get(numbers))
        elif action == "match":
            count = self.store.match_prefix(self.chunks.keys(numbers)).chunk_count
            if not 0 <= count <= len(numbers):
                raise InvariantError(f"a prefix of {len(numbers)} chunks matches {count}")
        elif action == "check":
            check(self.store)
        else:
            self.store.reset()

    def get(self, numbers):
        try:
            return self.chunks.found(self.store, numbers)
        except AssertionError as error:
            raise InvariantError(f"no wrong byte: {error}") from error

    def serve(self, numbers):
        """Store chunks of its own and find them."""
        accepted = self.chunks.put(self.store, numbers)
        if accepted != len(numbers):
            raise InvariantError(
                f"every engine serves: put took {accepted} of {len(numbers)} chunks"
            )
        self.store.flush()
        self.find(numbers, "its own")

    def find(self, numbers, whose="another engine's"):
        """Find what this or another engine has stored."""
        missing = sorted(set(numbers) - set(self.get(numbers)))
        if missing:
            recorded = self.store.match_prefix(self.chunks.keys(numbers)).chunk_count
            raise InvariantError(
                f"every engine serves: get finds {len(numbers) - len(missing)} of {len(numbers)} "
                f"of {whose} chunks, of which {recorded} match now"
            )

    def obey(self, command):
        """Carry out a command; False: it was the last."""
        name, numbers = command["do"], command.get("numbers", [])
        if name == "serve":
            self.serve(numbers)
        elif name == "find":
            self.find(numbers)
        elif name == "check":
            check(self.store)
        elif name == "close":
            self.store.close()
            return False
        return True


def main():
    faulthandler.register(signal.SIGUSR1)
    engine = None
    try:
        engine = Engine(json.loads(sys.stdin.readline()))
        print(json.dumps({"done": "open"}), flush=True)
        is_resting = False
        while True:
            if is_resting or select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                command = json.loads(line)
                is_resting = True  # the first command ends the random part
                goes_on = engine.obey(command)
                print(json.dumps({"done": command["do"], "hits": engine.hit_count}), flush=True)
                if not goes_on:
                    return
            else:
                engine.act()
    except Exception as error:
        words = str(error) if isinstance(error, InvariantError) else f"no call raises: {error!r}"
        print(json.dumps({"broken": words}), flush=True)
        raise


if __name__ == "__main__":
    main()
