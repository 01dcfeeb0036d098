"""The only telemetry call. Layers below say what happened; sinks attach from above.

A sink is a callable ``sink(name, fields)``. It runs on the thread that emits, so it must be
quick, and an exception that it raises is an error of the caller's program: it propagates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Sink = Callable[[str, dict[str, Any]], None]

_sinks: tuple[Sink, ...] = ()


def emit(name: str, **fields: Any) -> None:
    """Tell every attached sink that ``name`` happened."""
    for sink in _sinks:
        sink(name, fields)


def attach(sink: Sink) -> AbstractContextManager[None]:
    """Attach a sink at once; leaving the returned context detaches it."""
    global _sinks
    _sinks = (*_sinks, sink)

    @contextmanager
    def attached():  # type: ignore[no-untyped-def]
        global _sinks
        try:
            yield
        finally:
            _sinks = tuple(s for s in _sinks if s is not sink)

    return attached()
