"""The same work on many items, by a few threads that take the next item each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TypeVar


@contextmanager
def gc_paused() -> Iterator[None]:
    """Hold the collector off for the time of a ``with`` block.

    A state of many leaves makes many small dicts that all live until the end; looking through
    them again and again, with every object that torch has made, costs several times what the
    load itself does (2,000 leaves: 25 ms against 95 ms). Nothing is leaked: cycles made
    meanwhile are found by the next collection.
    """
    if not gc.isenabled():
        yield
        return
    try:
        try:
            gc.disable()
            yield
        finally:
            gc.enable()
    finally:
        gc.enable()  # again, for Ctrl-C right before the line above: it must not stay off


T = TypeVar("T")


def in_parallel(
    items: Iterable[T],
    work: Callable[[T], None],
    threads: int,
    advance: Callable[[], object] = bool,
) -> None:
    """Call ``work`` on every item, and ``advance`` after each. Returns when all are done.

    After the first failure no further item is begun, and it is raised here once all threads have
    come to rest. With one thread, all happens on the calling one.
    """
    if threads <= 1:
        for item in items:
            work(item)
            advance()
        return
    source = iter(items)
    lock = Lock()
    failures: list[BaseException] = []

    def run() -> None:
        while True:
            with lock:
                if failures:
                    return
                try:
                    item = next(source)
                except StopIteration:
                    return
            try:
                work(item)
                advance()
            except BaseException as e:  # noqa: BLE001  (top of a thread: raised by the caller)
                failures.append(e)
                return

    crew: list[_Worker] = []
    try:
        for i in range(threads - 1):
            crew.append(_Worker(run, f"holdfast-{i}"))
            try:
                crew[-1].start()
            except RuntimeError:  # the system gives no more threads: those there are do the work
                crew.pop()
                break
        run()
    except BaseException as e:
        failures.append(e)
        raise
    finally:
        for hand in crew:
            hand.join_despite_interrupts(failures)
    if failures:
        raise failures[0]


class _Worker(Thread):
    """A thread that can be waited for in spite of Ctrl-C, unlike by ``join``: what it works on
    must not be given back, nor the state changed, before it has come to rest."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        super().__init__(name=name)
        self._work = run
        self._ended = Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def join_despite_interrupts(self, failures: list[BaseException]) -> None:
        """Wait until it has ended. An interrupt is put with the failures, so it ends soon."""
        while self.ident is not None and (self.is_alive() or not self._ended.is_set()):
            try:
                self._ended.wait()
                self.join()
            except BaseException as e:  # noqa: BLE001  (raised by the caller once all rest)
                failures.append(e)
