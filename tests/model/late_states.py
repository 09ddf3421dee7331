"""States of the small engine that are known only some steps after they were computed.

An engine with such a lag keeps a state for the next allocation to free, and offers it in the very
step in which that allocation hands its block out.
"""

from engine_request import STATE, STATE_TOKENS

from tierstore.planner import StateBlock


class LateStates:
    def __init__(self, lag):
        self.offered_late_count = 0
        self._lag = lag
        self._step_count = 0
        self._computed = []  # (step in which it is hashed, request's run, state)
        self._hashed = []  # (request's run, state): offered in the next step

    def compute(self, request, end):
        """Note the state of the last boundary up to `end`, if this step computes it."""
        boundary = end - end % STATE_TOKENS
        if boundary > request.computed:
            block = request.tables[STATE][boundary // STATE_TOKENS - 1]
            state = StateBlock(request.name, STATE, block, boundary)
            self._computed.append((self._step_count + self._lag, request.run, state))

    def hash_known(self, requests):
        """Hash what the allocation of this step makes known."""
        self._hash(requests, 0)

    def end_step(self, requests):
        """Hash what the outputs before the next allocation make known."""
        self._step_count += 1
        self._hash(requests, 1)

    def take(self, requests):
        """Return what is offered in this step."""
        taken, self._hashed = self._hashed, []
        offered = []
        for run, state in taken:
            request = requests.get(state.request_id)
            if request and request.run is run:
                offered.append(state)
                self.offered_late_count += state.boundary_tokens <= request.computed
        return offered

    def _hash(self, requests, lag_min):
        for entry in list(self._computed):
            due, run, state = entry
            if self._lag >= lag_min and due <= self._step_count:
                self._computed.remove(entry)
                request = requests.get(state.request_id)
                index = state.boundary_tokens // STATE_TOKENS - 1
                if request and request.run is run and request.tables[STATE][index]:
                    self._hashed.append((run, state))
