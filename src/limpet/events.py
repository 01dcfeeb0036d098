"""Events: all telemetry of Limpet goes through ``emit``, and sinks receive it.

A sink is a callable ``sink(name, fields)``; ``docs/events.md`` lists the fields. It runs on the
thread that emits, often a background thread, and on several at once. One that raises is detached,
with a ``SinkFailed`` warning: its error must not turn a committed version into a failed save.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from limpet.errors import LimpetError, SinkFailed
from limpet.text import hide_in_urls

Sink = Callable[[str, dict[str, Any]], object]

# There is no lock because each access is a single dict operation. A sink that attaches another
# sink therefore cannot deadlock, and a forked child cannot inherit a locked lock.
_attached: dict[object, Sink] = {}
_defaults: dict[object, Sink] = {}
"""At most one sink, which receives events while no sink is attached."""


def emit(name: str, **fields: Any) -> None:
    """Send an event to every attached sink, or to the default sink if there is none. An
    ``Exception`` of a sink does not propagate; others, such as ``KeyboardInterrupt``, do."""
    receivers = _attached or _defaults
    fields = {k: hide_in_urls(v) if isinstance(v, str) else v for k, v in fields.items()}
    for key, sink in list(receivers.items()):
        try:
            sink(name, dict(fields))
        except Exception as e:  # noqa: BLE001  (reported, not raised: see the module docstring)
            if receivers.pop(key, None) is not None:  # only the first of several threads warns
                with suppress(Exception):  # stderr is closed, so the warning cannot be shown
                    _warn_detached(sink, name, e)


def attach(sink: Sink) -> ExitStack:
    """Attach a sink, and return a context manager that detaches it.

    The sink is attached at once. Leaving the context or calling its ``close()`` detaches the sink.

    Raises ``LimpetError`` if ``sink`` is not a sink, for example if it is the class of a sink.
    """
    if isinstance(sink, type) or not callable(sink):
        name = sink.__name__ if isinstance(sink, type) else repr(sink)[:100]
        raise LimpetError(
            f"{name} is not a sink",
            expected="a callable: sink(name, fields)",
            found="a class" if isinstance(sink, type) else None,
            todo=f"Call it: attach({name}())" if isinstance(sink, type) else None,
        )
    key = object()
    _attached[key] = sink
    detach = ExitStack()
    detach.callback(_attached.pop, key, None)
    return detach


def set_default(sink: Sink) -> None:
    """Let ``sink`` receive the events while no sink of ``attach`` does."""
    _defaults[None] = sink


def _warn_detached(sink: Sink, name: str, error: Exception) -> None:
    sink_name = getattr(sink, "__qualname__", type(sink).__qualname__)
    cause = "".join(traceback.format_exception_only(error)).strip()
    warning = SinkFailed(
        f"The sink {sink_name} was detached because it failed on the event {name!r} ({cause}). "
        "Saved versions are not affected. Attach the sink again after you fix the cause."
    )
    warning.__cause__ = error
    # the line in the sink, or the call in ``emit`` if the sink is not written in Python
    line = traceback.extract_tb(error.__traceback__, 2)[-1]
    try:
        # without a registry, the same warning is also shown the second time
        warnings.warn_explicit(warning, SinkFailed, line.filename, line.lineno or 1)
    except SinkFailed as e:
        threading.excepthook(
            threading.ExceptHookArgs((type(e), e, e.__traceback__, threading.current_thread()))
        )
