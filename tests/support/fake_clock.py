"""Time that passes when a test says so."""


class FakeClock:
    """A `Clock`; may be read in any thread."""

    def __init__(self):
        self.now = 1000.0

    def seconds(self):
        return self.now
