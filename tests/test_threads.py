"""Failures in ``in_parallel``; ``gc_paused`` re-enables the garbage collector at every exit."""

import gc
import inspect
import subprocess
import sys
import threading
import time
from itertools import count

import pytest

from limpet import threads
from limpet.threads import Latch, gc_paused, in_parallel, look_up_each
from tests.interrupts import MOMENTS, InterruptOpcode, SignalError, raise_at_start


@pytest.fixture(autouse=True)
def _reenable_gc():
    yield
    gc.enable()


def test_gc_is_enabled_after_an_interrupt_at_any_opcode():
    """A notebook keeps the last exception, with the frames in its traceback."""
    kept: list[BaseException] = []
    for at in count(1):
        interrupt = InterruptOpcode(at, lambda frame: frame.f_code.co_filename == threads.__file__)
        previous_trace = sys.gettrace()
        sys.settrace(interrupt)
        try:
            gc_paused(int)()
        except KeyboardInterrupt as e:
            kept.append(e)
        finally:
            sys.settrace(previous_trace)
        assert gc.isenabled(), at
        if interrupt.seen < at:
            break
    assert len(kept) > 20


def test_a_failure_of_the_items_in_another_thread_is_raised_in_the_caller():
    def items():
        while threading.current_thread() is threading.main_thread():
            yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_parallel(items(), lambda _: None, 2)


def test_an_iterable_that_waits_for_its_next_item_sees_the_failure_of_another_thread():
    failures: list[BaseException] = []

    def items():
        yield 0
        deadline = time.monotonic() + 10
        while not failures and time.monotonic() < deadline:
            time.sleep(0.001)

    def interrupt(_):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_parallel(items(), interrupt, 2, failures=failures)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("failing", [0, 1, 200])
@pytest.mark.parametrize("in_threads", [False, True])
def test_the_first_error_ends_the_lookups(monkeypatch, in_threads, failing):
    seen: list[int] = []
    clock, failed = count(), threading.Event()
    monkeypatch.setattr("limpet.threads.time.perf_counter", lambda: in_threads * next(clock))

    def look_up(item):
        seen.append(item)
        if item == failing:
            failed.set()
            raise ZeroDivisionError
        if item > failing:
            failed.wait(10)
            time.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        look_up_each(range(1000), look_up)
    assert len(seen) < 1000 if in_threads else seen == [*range(failing + 1)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_thread_works_after_an_error_of_a_signal_handler_while_one_starts(monkeypatch, moment):
    errors: list[BaseException] = []
    busy: set[int] = set()

    def work(_):
        busy.add(threading.get_ident())
        time.sleep(0.001)
        busy.discard(threading.get_ident())

    def call():
        raise_at_start(monkeypatch, "limpet-0", moment)
        try:
            in_parallel(range(1_000_000), work, 3)
        except SignalError as e:
            assert not busy, "a thread still works"
            errors.append(e)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive(), "it waits for a thread that did not begin"
    assert errors


def test_a_latch_is_waited_for_longer_than_a_lock_can_wait():
    """Such as with ``timeout=10**10`` of a store."""
    latch = Latch()
    timer = threading.Timer(0.05, latch.set)
    timer.start()
    assert latch.wait(1e30)
    timer.join()


INTERRUPTED_CALL = """
from limpet import deadline
def interrupt(thread):
    raise KeyboardInterrupt
deadline.start_thread = interrupt
try:
    deadline.Call(print, "call")
except KeyboardInterrupt:
    pass
"""


def test_a_process_ends_after_a_call_whose_start_was_interrupted():
    command = [sys.executable, "-c", INTERRUPTED_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class LockWithSetter:
    """The lock of a latch that another thread sets as soon as a thread waits for the lock."""

    def __init__(self, latch):
        self._latch, self._lock = latch, latch._lock

    def acquire(self, timeout):
        threading.Thread(target=self._latch.set).start()
        return self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()


@pytest.mark.parametrize("method", ["set", "wait"])
def test_an_interrupted_call_of_a_latch_can_be_repeated(method):
    """The exception comes at each opcode in turn, as that of a signal handler."""
    codes = {f.__code__ for f in vars(Latch).values() if inspect.isfunction(f)}
    number, before = 0, sys.gettrace()
    while True:
        latch, number = Latch(), number + 1
        interrupt = InterruptOpcode(number, lambda frame: frame.f_code in codes)
        if method == "wait":
            latch._lock = LockWithSetter(latch)
        sys.settrace(interrupt)
        try:
            getattr(latch, method)()
        except KeyboardInterrupt:
            sys.settrace(before)
            getattr(latch, method)()
        finally:
            sys.settrace(before)
        waiting = threading.Thread(target=latch.wait, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive(), f"another thread waits forever after opcode {number}"
        if interrupt.seen < number:
            break
    assert number > 10
