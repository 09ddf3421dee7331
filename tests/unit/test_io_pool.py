import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable

import pytest
from waiting import within_seconds

from tierstore import io_pool
from tierstore.errors import ConfigError
from tierstore.io_pool import URGENT_IN_A_ROW_MAX, IoPool, Mailbox, TaskOrder, run_side_by_side


def test_urgent_tasks_go_before_deferred_ones_that_were_queued_earlier() -> None:
    pool = IoPool(1, "test")
    done: list[str] = []
    may_go_on = threading.Event()
    pool.submit_deferred(may_go_on.wait)  # while it runs, the others gather
    pool.open()
    for number in range(2):
        pool.submit_deferred(lambda number=number: done.append(f"write {number}"))
        pool.submit_urgent(lambda number=number: done.append(f"read {number}"))
    may_go_on.set()
    assert pool.close(60)
    assert done == ["read 0", "read 1", "write 0", "write 1"]


def test_a_deferred_task_does_not_wait_for_all_the_urgent_ones_that_come_after_it() -> None:
    pool = IoPool(1, "test")
    done: list[str] = []
    may_go_on = threading.Event()
    pool.submit_urgent(may_go_on.wait)
    pool.open()
    pool.submit_deferred(lambda: done.append("write"))
    for _ in range(600):
        pool.submit_urgent(lambda: done.append("read"))
    may_go_on.set()
    assert pool.close(60)
    assert done.index("write") <= URGENT_IN_A_ROW_MAX
    assert len(done) == 601


@pytest.mark.parametrize("seed", range(20))
def test_both_kinds_keep_their_order_and_deferred_tasks_have_their_share(seed: int) -> None:
    dice = random.Random(seed)
    order: TaskOrder[str] = TaskOrder()
    reads: deque[str] = deque()
    writes: deque[str] = deque()
    overtaken = 0  # reads in a row, all of them taken while a write waited
    for number in range(2000):
        move = dice.choices(["read", "write", "take"], weights=[5, 1, 6 - seed % 3])[0]
        if move == "read":
            order.add_urgent(f"read {number}")
            reads.append(f"read {number}")
        elif move == "write":
            order.add_deferred(f"write {number}")
            writes.append(f"write {number}")
        elif not reads and not writes:
            assert order.take() is None
        else:
            is_write_due = not reads or (bool(writes) and overtaken == URGENT_IN_A_ROW_MAX)
            overtaken = 0 if is_write_due or not writes else overtaken + 1
            assert order.take() == (writes if is_write_due else reads).popleft()
        assert len(order) == len(reads) + len(writes)


def test_the_last_step_of_a_task_queues_others_that_all_threads_take(monkeypatch) -> None:
    """One of them is left to its own thread: nobody is woken for it."""
    woken = []
    notify = threading.Condition.notify
    monkeypatch.setattr(
        threading.Condition, "notify", lambda self, n=1: (woken.append(n), notify(self, n))[1]
    )
    pool = IoPool(3, "test")
    pool.open()
    together = threading.Barrier(3)
    names: list[str] = []

    def meet() -> None:
        together.wait(60)
        names.append(threading.current_thread().name)

    def begin(next_tasks: list[Callable[[], object]]) -> None:
        woken.clear()
        pool.submit_next(next_tasks)
        counts.append(sum(woken))

    counts: list[int] = []
    pool.submit_urgent(lambda: begin([meet] * 3))
    assert within_seconds(lambda: len(names) == 3), "no thread sleeps while a task is queued"
    pool.submit_urgent(lambda: begin([lambda: names.append("alone")]))
    assert within_seconds(lambda: "alone" in names)
    assert pool.close(60)
    assert len(set(names)) == 4
    assert counts == [2, 0]


def test_a_task_that_raises_is_logged_and_ends_no_thread(caplog) -> None:
    pool = IoPool(1, "test")
    pool.open()
    done: list[str] = []
    pool.submit_urgent(lambda: 1 // 0)
    pool.submit_urgent(lambda: done.append("after"))
    assert pool.close(60)
    assert done == ["after"]
    assert "I/O task failed: pool=test" in caplog.text


def test_a_pool_that_is_closed_twice_or_was_never_opened_ends_at_once() -> None:
    pool = IoPool(1, "test")
    assert pool.close(60)
    pool = IoPool(2, "test")
    pool.open()
    assert pool.close(60)
    assert pool.close(60)


@pytest.mark.parametrize("make", [lambda: IoPool(1, "late"), lambda: Mailbox("late", print)])
def test_a_thread_that_begins_too_late_is_an_error_of_ours(make, monkeypatch) -> None:
    may_begin = threading.Event()
    begun = []
    step = threading.Thread._set_native_id

    def begin_late(thread: threading.Thread) -> None:
        if thread.name.startswith("late"):  # it has its number by now
            begun.append(thread)
            may_begin.wait()
        step(thread)

    def open_in_vain() -> weakref.ref[object]:
        made = make()
        with pytest.raises(ConfigError, match="starts no thread"):
            made.open()
        return weakref.ref(made)

    monkeypatch.setattr(threading.Thread, "_set_native_id", begin_late)
    monkeypatch.setattr(io_pool, "_BEGIN_SECONDS_MAX", 1.0)
    try:
        made = open_in_vain()
        gc.collect()
        assert made() is None, "a thread that has not begun keeps it alive"
    finally:
        may_begin.set()
    for thread in begun:
        assert thread._started.wait(60)
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_without_threads_tasks_run_one_after_the_other_and_none_is_left_out(
    error, monkeypatch
) -> None:
    done: list[str] = []

    def begin_none(_thread: threading.Thread) -> None:
        raise error

    def fail() -> None:
        done.append("failed")
        raise ValueError("a bug")

    monkeypatch.setattr(threading.Thread, "start", begin_none)
    assert run_side_by_side([fail, lambda: done.append("closed")], "test", 60)
    assert done == ["failed", "closed"]


def test_tasks_side_by_side_wait_for_none_that_hangs() -> None:
    may_go_on, done = threading.Event(), threading.Event()
    try:
        assert not run_side_by_side([may_go_on.wait, done.set], "test", 0.2)
        assert done.wait(60)
    finally:
        may_go_on.set()
