"""An interruption of the main thread leaves no lock that other threads then wait for for ever.

Method: a signal is handled where a function of `threading` begins, the n-th that a call comes to;
for each n. Then another thread does what takes the same lock.
"""

import contextlib
import itertools
import os
import sys
import threading

import numpy as np
from test_dma_host import offload_reversed, one_layer
from test_dma_pinning import SIZE, make_pinner

from tierstore.dma.host import HostCopyEngine
from tierstore.embedded.call_gate import Gate
from tierstore.embedded.idle_carrier import IdleCarrier
from tierstore.host_pool import HostPool
from tierstore.io_pool import IoPool
from tierstore.layout import PAGE_BYTES
from tierstore.testing.fake_cuda import FakeCuda

SECONDS_MAX = 60


def interrupted_at_each(prepare):
    """Prepare a subject and a call, and interrupt the call at its n-th function of `threading`.

    For n = 1, 2, ...; yields the subjects.
    """
    for n in itertools.count(1):
        subject, call = prepare()
        counter = itertools.count(1)
        is_over = True

        def enter(frame, event, _argument, n=n, counter=counter):
            nonlocal is_over
            is_chosen = event == "call" and frame.f_code.co_filename == threading.__file__
            if is_chosen and next(counter) == n:
                sys.setprofile(None)
                is_over = False
                raise KeyboardInterrupt

        sys.setprofile(enter)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call()
        finally:
            sys.setprofile(None)
        yield subject
        if is_over:
            assert n > 1, "nothing was interrupted: the test tests nothing"
            return


def ends(call):
    """Return whether a call in a thread of its own comes back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    return not thread.is_alive()


class BusyLoop:
    """Has something to carry, always."""

    def has_messages(self):
        return True

    def pump(self):
        return False


def test_an_idle_carrier_whose_stop_is_interrupted_can_be_closed():
    def prepare():
        carrier = IdleCarrier(BusyLoop(), Gate(), lambda: None)
        carrier.open()
        carrier.wake()
        return carrier, carrier.stop

    for carrier in interrupted_at_each(prepare):
        assert ends(carrier.close)
        assert not carrier._mailbox._thread.is_alive()


def test_helpers_of_a_copy_that_is_interrupted_do_not_hang(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    blocks = np.zeros((64, PAGE_BYTES), np.uint8)
    pool = np.zeros_like(blocks)

    def prepare():
        threads = IoPool(2, "copies")
        threads.open()
        engine = HostCopyEngine(threads.submit_urgent, share_bytes_min=0, share_run_bytes_min=0)
        engine.register(one_layer(blocks), 1, pool.ctypes.data, pool.nbytes)
        return threads, lambda: offload_reversed(engine, blocks)

    for threads in interrupted_at_each(prepare):
        assert threads.close(SECONDS_MAX)


def test_threads_that_pin_go_on_after_their_close_was_interrupted():
    with HostPool(SIZE) as pool:

        def prepare():
            threads = IoPool(2, "pinning")
            threads.open()
            pinner = make_pinner(FakeCuda(), pool)
            pinner.open(threads.submit_urgent)
            return (pinner, threads), pinner.close

        for pinner, threads in interrupted_at_each(prepare):
            assert ends(pinner.close)
            assert threads.close(SECONDS_MAX)
