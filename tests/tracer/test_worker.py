import threading
import time
from types import SimpleNamespace

import pytest
from tim_trace.schemas.errors import StorageStalled
from tim_trace.tracer import worker as worker_module
from tim_trace.tracer.patience import Patience
from tim_trace.tracer.worker import Worker


def test_tasks_run_in_order_and_all_of_them():
    done = []
    worker = Worker(max_bytes=10)
    for number in range(200):
        worker.submit(lambda number=number: done.append(number), 3)
    worker.close()
    assert done == list(range(200))


def test_a_full_queue_makes_the_caller_wait_and_counts_the_time():
    gate, started, second_in = threading.Event(), threading.Event(), threading.Event()
    worker = Worker(max_bytes=10)

    def slow():
        started.set()
        gate.wait()

    worker.submit(slow, 10)
    started.wait()

    def caller():
        worker.submit(lambda: None, 1)
        second_in.set()

    thread = threading.Thread(target=caller)
    thread.start()
    assert not second_in.wait(0.2)
    gate.set()
    thread.join()
    worker.close()
    assert worker.patience.waited_s > 0.1


def test_a_task_larger_than_the_queue_goes_in_alone():
    worker = Worker(max_bytes=1)
    done = []
    for number in range(3):
        worker.submit(lambda number=number: done.append(number), 1000)
    worker.close()
    assert done == [0, 1, 2]


def test_after_an_error_the_caller_is_not_held_up():
    worker = Worker(max_bytes=1)
    worker.submit(lambda: 1 / 0, 1)
    for _ in range(100):
        worker.submit(lambda: None, 1000)
    worker.close()
    assert isinstance(worker.error, ZeroDivisionError)


def test_a_caller_who_is_faster_waits_before_what_it_adds_would_come_too_late(monkeypatch):
    """The clock goes on by what tasks take, and stands still while a busy machine runs something else."""
    now = [0.0]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time))
    worker, late = Worker(max_bytes=1 << 30, max_wait_s=0.4), []

    def task(submitted):
        late.append(now[0] - submitted[0] if submitted else 0.0)
        time.sleep(0.002)  # so that the caller is faster
        now[0] += 0.03

    for number in range(61):
        submitted = []
        worker.submit(lambda submitted=submitted: task(submitted), 100)
        submitted.append(now[0])
        if not number:
            worker.drain()  # so that the pace is known
    worker.close()
    assert len(late) == 61
    assert sorted(late)[-5] < 0.9, "without it the last ones come 1.8 s later"


def test_a_caller_waits_while_others_are_behind():
    behind = threading.Event()
    behind.set()
    worker, entered = Worker(max_bytes=1 << 30, is_behind=behind.is_set), threading.Event()
    thread = threading.Thread(target=lambda: (worker.submit(lambda: None, 1), entered.set()))
    thread.start()
    assert not entered.wait(0.2)
    behind.clear()
    thread.join()
    worker.close()
    assert worker.patience.waited_s > 0.1


def test_a_task_that_waits_for_a_device_is_no_slow_disk(monkeypatch):
    """A caller who comes while the device is busy neither waits nor has the wait counted, and the pace is the disk's."""
    busy, waits = threading.Event(), threading.Event()
    worker, done = Worker(max_bytes=1 << 30, max_wait_s=0.05), []

    def ready():
        waits.set()
        busy.wait()

    worker.submit(lambda: done.append(0), 1 << 20, ready=ready)
    assert waits.wait(240)
    threading.Timer(0.5, busy.set).start()
    while not busy.is_set():  # longer than anything may be late
        worker.submit(lambda: done.append(1), 1, ready=lambda: None)
        time.sleep(0.01)
    worker.drain()
    assert worker._pace.expected_s(1, 1 << 20) < 0.4
    worker.close()
    assert worker.patience.waited_s < 0.4


def test_a_device_that_is_busy_does_not_end_the_patience_with_the_disk():
    busy, disk, done = threading.Event(), threading.Event(), []
    worker = Worker(max_bytes=1, patience=Patience("run", 1.0))
    threading.Timer(3.0, busy.set).start()
    worker.submit(lambda: done.append(0), 1, ready=busy.wait)
    worker.submit(lambda: done.append(1), 1)
    worker.drain()
    assert done == [0, 1]
    worker.submit(disk.wait, 1)
    with pytest.raises(StorageStalled, match=r"run did not respond within 1 s"):
        worker.drain()
    disk.set()
    worker.close()
