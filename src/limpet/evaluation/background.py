"""An evaluation that runs on a thread of the training job, next to the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

_STOP_SECONDS = 10.0
"""The time that an evaluation gets to end when the training has ended with an exception."""

_POLL = 0.5


@contextmanager
def running(
    run: Callable[[], object],
    finish: Callable[[], object],
    stop: Callable[[], object],
    report: Callable[[Exception], object],
) -> Iterator[None]:
    """Call ``run`` on a thread of its own while the block runs.

    ``finish`` lets it end when its work is done; ``stop`` ends it at once, which is what an
    exception does. ``report`` gets the error that ends it, as soon as it does. A normal end of the
    block raises that error.
    """
    errors: list[Exception] = []

    def run_and_report() -> None:
        try:
            run()
        except Exception as e:  # noqa: BLE001  (top of a thread: reported, and raised at the end)
            errors.append(e)
            report(e)

    thread = Thread(target=run_and_report, name="limpet-evaluation", daemon=True)
    thread.start()
    try:
        yield
        finish()
        while thread.is_alive():  # in parts, so that an interrupt is noticed
            thread.join(_POLL)
    except BaseException:
        stop()
        thread.join(_STOP_SECONDS)
        raise
    if errors:
        raise errors[0]
