"""Python's cycle collector, held off while a state is taken apart or put together."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
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
