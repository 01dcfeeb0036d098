"""Short tracebacks: a ``LimpetError`` that leaves a public call has at most three frames of Limpet.

They say where it and its first cause were raised. ``python -X dev`` shows all frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from inspect import isfunction, isgeneratorfunction
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from limpet.errors import LimpetError
from limpet.other_words import add_advice

T = TypeVar("T")

SHORTENS = "shortens"
"""The attribute of a function that calls ``shorten`` itself, and needs no wrapper."""

_BETWEEN = {__name__, "contextlib"}
"""Modules whose frames only lie between others, and say nothing."""

_SPECIAL = {"__init__", "__enter__", "__exit__", "__iter__", "__getitem__"}


def short_tracebacks(target: T) -> T:
    """Decorate a public function or generator, or the public methods of a class."""
    found: Any = target
    if not isinstance(found, type):
        return cast(T, _wrap(found)) if isfunction(found) else target
    for name, member in list(vars(found).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if isinstance(member, classmethod):
            setattr(found, name, classmethod(_wrap(member.__func__)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(found, name, member.getter(_wrap(member.fget)))
        elif isfunction(member):
            setattr(found, name, _wrap(member))
    return target


def _wrap(function: Callable[..., Any]) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (LimpetError, TypeError) as error:
            prepare(error, function, kwargs)
            raise

    @wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Any:
        try:
            return (yield from function(*args, **kwargs))
        except LimpetError as error:
            prepare(error, function, kwargs)
            raise

    if SHORTENS in vars(function):
        return function
    wrapper = generate if isgeneratorfunction(function) else call
    vars(wrapper)[SHORTENS] = True
    return wrapper


def prepare(error: LimpetError | TypeError, function: Any, keywords: Mapping[str, Any]) -> None:
    """Prepare an error that leaves a public call. A ``TypeError`` gets Limpet's words for unknown
    keywords. From the tracebacks of a ``LimpetError`` and its causes, drop Limpet's frames, but for
    the last two, and the last one of the first cause. If Limpet itself has called the wrapper that
    calls this, keep everything: only the outermost public call drops frames."""
    if isinstance(error, TypeError):
        add_advice(error, function, keywords)
        return
    caller = sys._getframe(1).f_back
    if sys.flags.dev_mode or (caller is not None and _module(caller).startswith("limpet.")):
        return
    chain: list[BaseException] = []
    shown: BaseException | None = error
    while shown is not None and not any(shown is each for each in chain):
        chain.append(shown)
        shown = shown.__cause__ if shown.__suppress_context__ else shown.__context__
    for each in chain:
        kept = 2 if each is error else int(each is chain[-1])
        with suppress(Exception):  # a user's exception may be frozen
            each.__traceback__ = _without_own(each.__traceback__, kept)


def _without_own(trace: TracebackType | None, kept: int) -> TracebackType | None:
    """Return a traceback with only the last ``kept`` of Limpet's frames."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):
        module = _module(entry.tb_frame)
        is_own = module.startswith("limpet.")
        if module not in _BETWEEN and (kept or not is_own):
            line = -1 if entry.tb_lineno is None else entry.tb_lineno  # an interrupt has none
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, line)
            kept -= is_own
    return trace


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
