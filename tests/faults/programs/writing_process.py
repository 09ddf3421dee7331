"""A process that stores as fast as it can until it is killed: `python writing_process.py`.

Reads a JSON object from standard input: configuration, chunk size, first number.
Prints the number of accepted chunks after every put.
"""

import json
import sys

from store_kit import Chunks


def main():
    job = json.load(sys.stdin)
    chunks = Chunks(job["chunk_bytes"])
    first = job["first"]
    arrays = {}
    with chunks.open(job["config"]) as store:
        while True:
            for size in (1, 7, 40):
                # The same few hundred numbers over and over: known, evicted, and new ones.
                numbers = [(first + i) % 700 for i in range(size)]
                for number in numbers:
                    if number not in arrays:
                        arrays[number] = chunks.array([number])[0]
                store.put(chunks.keys(numbers), [arrays[number] for number in numbers])
                first += size
                print(first, flush=True)


if __name__ == "__main__":
    main()
