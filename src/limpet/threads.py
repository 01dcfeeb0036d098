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
    """Decorate a function that pauses the garbage collector: scanning the many small dicts of a
    load takes longer than the load (2,000 leaves: 25 ms without, 95 ms with)."""

    # not a context manager: Ctrl-C in the code of ``contextlib`` could leave the collector disabled
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
    """A few threads that take the next item each, and the buffers that they share. ``advance``
    follows each item; ``check_time`` raises once the time is over, also in a wait for a buffer."""

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

    def each(self, items: Sequence[T], work: Callable[[T], object], nbytes: int = 1 << 50) -> None:
        """Call ``work`` on every item; after the first error, which is raised, none is started.
        ``nbytes``: of all items, for work that takes less time than the start of a thread."""
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

        if count == 1:
            return [self.pool.acquire(check)]
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
    work: Callable[[T], object],
    threads: int,
    advance: Callable[[], object] = no_op,
    failures: list[BaseException] | None = None,
) -> None:
    """Call ``work`` on every item, and ``advance`` after each. After the first failure, which is
    raised when all threads have ended, none starts an item or repeats a request (``is_canceled``).

    An iterable that waits for its next item must stop when ``failures`` gets one.
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
    """Return True in the work of ``in_parallel`` after another thread has failed. What repeats a
    request checks it: an interrupted save must not wait for a server."""
    return any(getattr(_current, "failures", ()))


_current = local()


def look_up_each(items: Sequence[T], look_up: Callable[[T], None], requests: int = 1) -> None:
    """Call ``look_up``, so many requests to a store, on every item: in threads once two calls in
    succession are slow. In a local folder, threads would take three times as long."""
    slow = 0
    for i, item in enumerate(items):
        began = time.perf_counter()
        look_up(item)
        slow = slow + 1 if time.perf_counter() - began > requests * SLOW_LOOKUP else 0
        if slow == 2:
            rest = items[i + 1 :]
            in_parallel(rest, look_up, min(_LOOKUP_THREADS, len(rest)))
            return


class Latch:
    """An event that happens once. Unlike ``threading.Event``, it stays usable if a signal handler
    raises in a call of it, because it uses only a lock of the interpreter."""

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
    """Start a thread; return False if the system cannot. An exception of a signal handler is raised
    here: the thread may then run or not, and ``threading.enumerate`` may list it forever."""
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
    """A thread that can be joined despite Ctrl-C: until it ends, its memory and the state stay."""

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
        """Wait until the thread ends, or keep it from beginning. Interrupts go to ``failures``."""
        while True:
            try:
                if self._claim.setdefault("by", "caller") != "caller":
                    self._ended.wait()
                if self.is_alive():
                    self.join()
                return
            except BaseException as e:  # noqa: BLE001  (the caller raises it later)
                failures.append(e)
