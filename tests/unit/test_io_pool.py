import threading

from tierstore.io_pool import IoPool


def test_reads_go_before_writes_that_were_queued_earlier() -> None:
    pool = IoPool(1, "test")
    done: list[str] = []
    may_go_on = threading.Event()
    pool.submit_write(may_go_on.wait)  # while it runs, the others gather
    pool.open()
    for number in range(2):
        pool.submit_write(lambda number=number: done.append(f"write {number}"))
        pool.submit_read(lambda number=number: done.append(f"read {number}"))
    may_go_on.set()
    assert pool.close(60)
    assert done == ["read 0", "read 1", "write 0", "write 1"]


def test_a_task_that_raises_is_logged_and_ends_no_thread(caplog) -> None:
    pool = IoPool(1, "test")
    pool.open()
    done: list[str] = []
    pool.submit_read(lambda: 1 // 0)
    pool.submit_read(lambda: done.append("after"))
    assert pool.close(60)
    assert done == ["after"]
    assert "I/O task failed: pool=test" in caplog.text
