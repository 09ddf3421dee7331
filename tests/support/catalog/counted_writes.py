"""Counts what an LMDB environment is asked to write."""


class CountedWrites:
    """The write transactions of an environment, from now on."""

    def __init__(self, env):
        self.count = 0
        self._write = env.write
        env.write = self

    def __call__(self, database=None):
        self.count += 1
        return self._write(database)
