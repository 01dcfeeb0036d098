"""The threads and buffers of one operation, and a pause of the garbage collector."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from threading import Lock, Thread, local
from typing import ParamSpec, Self, TypeVar

from limpet.buffers import Buffer, BufferPool, shared_pool
from limpet.errors import StoreError
from limpet.settings import read_settings
from limpet.types import MIB

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

BYTES_PER_THREAD = MIB
"""The least amount of data that another thread is started for, which takes about 0.2 ms."""

_LOOKUP_THREADS = 32
"""Largest number of threads that look up files whose store responds slowly."""

SLOW_LOOKUP = 0.001
"""Seconds from which on a lookup waits for a network or a disk rather than for the processor."""


def no_op(*_: object) -> None:
    """Do nothing: the default of a callback."""


def gc_paused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that pauses Python's garbage collector while it runs.

    A state with many leaves creates many small dicts that all live until the end. Scanning them
    repeatedly, together with every object that torch has created, takes several times as long as
    the load itself (2,000 leaves: 25 ms without the scans, 95 ms with them). Nothing leaks: the
    next collection finds the cycles that were created in the call.

    This is not a context manager, because Ctrl-C in the Python code of ``contextlib`` could leave
    the collector disabled for as long as the traceback exists.
    """

    @wraps(function)
    def call_without_gc(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        try:
            try:
                gc.disable()
                return function(*args, **kwargs)
            finally:
                gc.enable()
        finally:
            gc.enable()  # again: Ctrl-C right before the line above must not leave it disabled

    return call_without_gc


@dataclass(frozen=True, slots=True)
class Workers:
    """A few threads that take the next item each, and the buffers that they share.

    ``advance`` is called after each item to show that the operation makes progress. ``check_time``
    raises once the time of the operation is over. It is called while a thread waits for a buffer,
    which another operation may have for longer.
    """

    pool: BufferPool
    threads: int
    advance: Callable[[], object] = no_op
    check_time: Callable[[], object] = no_op

    @classmethod
    def create(
        cls,
        pool: BufferPool | None = None,
        advance: Callable[[], object] = no_op,
        check_time: Callable[[], object] = no_op,
    ) -> Self:
        """Return workers with as many threads as ``LIMPET_THREADS`` says. Without a ``pool``,
        they use the one that the synchronous operations of the process share."""
        pool = shared_pool() if pool is None else pool
        return cls(pool, read_settings().threads, advance, check_time)

    def each(self, items: Sequence[T], work: Callable[[T], None], nbytes: int = 1 << 50) -> None:
        """Call ``work`` on every item. Raises the first error; then no further item is started.

        ``nbytes``: the size of all items, for work that takes less time than the start of a thread.
        """
        threads = min(self.threads, len(items), 1 + nbytes // BYTES_PER_THREAD)
        in_parallel(items, work, threads, self.advance)

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Borrow a buffer for the duration of a ``with`` block."""
        (buffer,) = self.acquire(1)
        try:
            yield buffer
        finally:
            self.pool.release(buffer)

    def acquire(self, count: int) -> list[Buffer]:
        """Return ``count`` buffers of the pool, as ``BufferPool.acquire_many`` does. The wait for
        them ends when the time of the operation is over, or another thread of it has failed."""

        def check() -> None:
            self.check_time()
            if is_canceled():
                raise StoreError("Another thread failed while this one waited for a free buffer")

        return self.pool.acquire_many(count, check) if count else []


def call_with_limit(function: Callable[[], object], name: str, seconds: float) -> None:
    """Call a function on a daemon thread. Return when it has ended, or after ``seconds``: what the
    function waits for may never answer. If no thread can be started, nothing is called."""
    ended = Latch()

    def run() -> None:
        try:
            function()
        finally:
            ended.set()

    if start_thread(Thread(target=run, name=name, daemon=True)):
        ended.wait(seconds)


def in_parallel(
    items: Iterable[T],
    work: Callable[[T], None],
    threads: int,
    advance: Callable[[], object] = no_op,
    failures: list[BaseException] | None = None,
) -> None:
    """Call ``work`` on every item and ``advance`` after each item. Return when all are done.

    After the first failure, no thread starts another item or repeats a request (see
    ``is_canceled``), and the failure is raised here when all threads have ended. With
    ``threads=1``, everything runs on the calling thread. An iterable that waits for its next item
    must stop when there is a failure, which is added to ``failures``.
    """
    if threads <= 1:
        for item in items:
            work(item)
            advance()
        return
    source = iter(items)
    lock = Lock()
    failures = [] if failures is None else failures
    outer: tuple[list[BaseException], ...] = getattr(_current, "failures", ())
    all_failures = (*outer, failures)

    def run() -> None:
        before, _current.failures = getattr(_current, "failures", ()), all_failures
        try:
            while True:
                with lock:
                    if failures:
                        return
                    try:
                        item = next(source)
                    except StopIteration:
                        return
                work(item)
                advance()
        except BaseException as e:  # noqa: BLE001  (the caller raises it)
            failures.append(e)
        finally:
            _current.failures = before

    workers: list[_Worker] = []
    try:
        for i in range(threads - 1):
            workers.append(_Worker(run, f"limpet-{i}"))
            if not start_thread(workers[-1]):
                break  # use those that run
        run()
    except BaseException as e:
        failures.append(e)
        raise
    finally:
        for worker in workers:
            worker.join_despite_interrupts(failures)
    if failures:
        raise failures[0]


def is_canceled() -> bool:
    """Return True in the work of ``in_parallel`` after another thread has failed.

    What repeats a request checks it. Otherwise, an interrupted save would end only when the server
    answers, or when the deadline passes.
    """
    return any(getattr(_current, "failures", ()))


_current = local()


def look_up_each(items: Sequence[T], look_up: Callable[[T], None]) -> None:
    """Call ``look_up``, a few requests to a store, on every item. Raises the first error.

    If two in succession are slow, the others run in threads: the round trips to a store overlap.
    In a local folder, threads would take three times as long as this one alone, because they wait
    for the interpreter.
    """
    slow = 0
    for i, item in enumerate(items):
        began = time.perf_counter()
        look_up(item)
        slow = slow + 1 if time.perf_counter() - began > SLOW_LOOKUP else 0
        if slow == 2:
            rest = items[i + 1 :]
            in_parallel(rest, look_up, min(_LOOKUP_THREADS, len(rest)))
            return


class Latch:
    """An event that happens once, and that threads can wait for, as for a ``threading.Event``.

    An exception that a signal handler raises in an ``Event``, which is written in Python, can leave
    its lock acquired, so that all threads wait forever. This class uses only a lock of the
    interpreter, and an interrupted call can be repeated.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return True if the event has happened."""
        return self._is_set

    def set(self) -> None:
        """Let all waiting and later calls of ``wait`` return."""
        self._is_set = True
        with suppress(RuntimeError):  # it is not acquired any more
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most ``timeout`` seconds, and return whether the event has happened."""
        if not self._is_set:
            seconds = -1 if timeout is None else min(max(0, timeout), threading.TIMEOUT_MAX)
            try:
                self._lock.acquire(timeout=seconds)
            finally:
                if self.is_set():
                    self.set()  # for the next thread that waits
        return self._is_set


def start_thread(thread: Thread) -> bool:
    """Start a thread. Return False if the system cannot start another thread.

    An exception of a signal handler, such as that of Ctrl-C, can come at any point of
    ``Thread.start``, and is raised here. The thread may then run or not, and
    ``threading.enumerate`` may list it although it never runs.
    """
    outer = sys.exception()
    try:
        thread.start()
        return True
    except (KeyError, RuntimeError) as e:
        if str(e) == "can't start new thread":
            return False
        # ``start`` raises these in place of the exception of the handler, when it undoes what the
        # new thread has already undone
        inner = e.__context__
        error = e if inner is None or inner is outer else inner
    raise error


class _Worker(Thread):
    """A thread that the caller can join despite Ctrl-C, which would interrupt ``Thread.join``.

    Until the thread has ended, its memory must not be released and the state must not change.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        super().__init__(target=run, name=name)
        self._claim: dict[str, str] = {}  # who has it: the first one that sets it, atomically
        self._ended = Latch()

    def run(self) -> None:
        if self._claim.setdefault("by", "thread") == "thread":
            try:
                super().run()
            finally:
                self._ended.set()

    def join_despite_interrupts(self, failures: list[BaseException]) -> None:
        """Wait until the thread has ended. A thread that has not begun will do nothing.

        An interrupt is appended to ``failures``, so that the thread does not start another item.
        """
        while True:
            try:
                if self._claim.setdefault("by", "caller") != "caller":
                    self._ended.wait()
                if self.is_alive():
                    self.join()
                return
            except BaseException as e:  # noqa: BLE001  (the caller raises it later)
                failures.append(e)
