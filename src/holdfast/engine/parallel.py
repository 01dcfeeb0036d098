"""The same work on many items, by a few threads that take the next item each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")


def in_parallel(items: Iterable[T], work: Callable[[T], None], threads: int) -> None:
    """Call ``work`` on every item. Returns when all are done.

    After the first failure no further item is begun, and it is raised here once all threads have
    come to rest. With one thread, all happens on the calling one.
    """
    if threads <= 1:
        for item in items:
            work(item)
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
            except BaseException as e:  # noqa: BLE001  (top of a thread: raised by the caller)
                failures.append(e)
                return

    crew = [Thread(target=run, name=f"holdfast-{i}") for i in range(threads - 1)]
    try:
        for thread in crew:
            thread.start()
        run()
    except BaseException as e:
        failures.append(e)
        raise
    finally:
        for thread in crew:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
