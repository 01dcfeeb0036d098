"""The only telemetry call. Layers below say what happened; sinks attach from above.

A sink is a callable ``sink(name, fields)``. It runs on the thread that emits, often a background
one and several at a time, so it must be quick and guard what it shares. ``fields`` is its own
copy; ``docs/events.md`` lists what is in it.

Decision: a sink that raises an ``Exception`` is detached, and a ``SinkFailed`` warning says so at
once. It is not raised to the program: most events come from the background half of a save, where
an exception would turn a version that is committed into a save that failed. It is not passed over
either, and a disk that is full is told once, not at every save. Where warnings are made errors,
the warning goes to ``threading.excepthook`` instead, as from a thread of the sink's own.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from holdfast.errors import HoldfastError, SinkFailed

Sink = Callable[[str, dict[str, Any]], object]

# No lock: each use is one operation of a dict, so neither a sink that attaches another nor a
# fork in the middle of it can find it held.
_attached: dict[object, Sink] = {}


def emit(name: str, **fields: Any) -> None:
    """Tell every attached sink that ``name`` happened. Raises nothing that a sink raises, except
    what is no ``Exception``: Ctrl-C and the like."""
    for key, sink in list(_attached.items()):
        try:
            sink(name, dict(fields))
        except Exception as e:  # noqa: BLE001  (told, not raised: see the module)
            if _attached.pop(key, None) is not None:  # the first of several threads tells it
                with suppress(Exception):  # stderr is closed: nothing is left to tell it by
                    _warn_detached(sink, name, e)


def attach(sink: Sink) -> ExitStack:
    """Attach a sink at once. Leaving the returned context, or its ``close()``, detaches it.

    Raises ``HoldfastError`` for what is no sink, such as the class of one.
    """
    if isinstance(sink, type) or not callable(sink):
        name = sink.__name__ if isinstance(sink, type) else repr(sink)[:100]
        raise HoldfastError(
            f"{name} is no sink",
            expected="a callable: sink(name, fields)",
            found="a class" if isinstance(sink, type) else None,
            todo=f"Call it: attach({name}())" if isinstance(sink, type) else None,
        )
    key = object()
    _attached[key] = sink
    detach = ExitStack()
    detach.callback(_attached.pop, key, None)
    return detach


def _warn_detached(sink: Sink, name: str, error: Exception) -> None:
    of = getattr(sink, "__qualname__", type(sink).__qualname__)
    cause = "".join(traceback.format_exception_only(error)).strip()
    warning = SinkFailed(
        f"The sink {of} is detached: it failed at the event {name!r} ({cause}). "
        "What is saved is not touched by this; attach it again once it works."
    )
    warning.__cause__ = error
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        trace = trace.tb_next  # the sink's own frame, for the line that the warning shows
    file = __file__ if trace is None else trace.tb_frame.f_code.co_filename
    line = 1 if trace is None else trace.tb_lineno
    try:
        # without a registry: the second time it is told as well
        warnings.warn_explicit(warning, SinkFailed, file, line)
    except SinkFailed as e:
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(e), e, e.__traceback__, thread)))
