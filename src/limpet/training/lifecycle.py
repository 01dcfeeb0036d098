"""Whether a Checkpointer may be used, and may save."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from threading import current_thread, get_ident, main_thread
from typing import Any, TypeVar, cast

from limpet.errors import LimpetError, NoProgress, Preempted
from limpet.tracebacks import SHORTENS, prepare

F = TypeVar("F", bound=Callable[..., Any])


def exclusive(method: F) -> F:
    """Raise ``LimpetError``, before any change, if a call of such a method is running, or if the
    Checkpointer is not open, unless the method is for its end. One operation, ``setdefault``,
    takes the lock, and no handler of a signal interrupts its release."""

    name = method.__name__.lstrip("_")
    needs_open = name not in ("wait", "close", "end_after")

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        running, own = self._lifecycle.running, (name, get_ident())
        found = own
        if current_thread().name == CALLBACK_THREAD:  # the state may be within a step
            raise LimpetError(f"on_best() called {name}() of a Checkpointer: only training may")
        try:
            found = running.setdefault(_CALL, own)
            if found == (_SAVE_FN, get_ident()) and name in ("save", "wait"):
                running[_CALL] = own
            elif found is not own:
                raise self._lifecycle.refusal(name)
            if needs_open:
                self._lifecycle.check_open()
            return method(self, *args, **kwargs)
        except (LimpetError, TypeError) as error:
            prepare(error, method, kwargs)
            raise
        finally:
            # a handler of a signal runs only at calls and jumps, and none is before the release
            if running and running[_CALL] is own:
                if found is own:
                    del running[_CALL]
                else:
                    running[_CALL] = found

    vars(call)[SHORTENS] = True
    return cast(F, call)


CALLBACK_THREAD = "limpet-best"
"""The name of the threads that call ``on_best``."""

_CALL, _SAVE_FN = "call", "save_fn"


def is_process_ending() -> bool:
    """Return True if the main thread has ended. No thread can be started from then on."""
    return not main_thread().is_alive()


class Lifecycle:
    """The states of a Checkpointer. ``was_taken_over``: by a newer one of this process;
    ``is_state_valid``: False after a ``resume`` that may have overwritten a part of the state."""

    def __init__(self) -> None:
        self.is_state_valid = True
        self.is_resumed = self.is_started = self.is_closed = self.was_taken_over = False
        self._pid = os.getpid()
        self._outer_exception = id(None)
        self.made_by = current_thread()
        self.running: dict[str, tuple[str, int]] = {}
        """The name of the running call, and the thread that made it. Empty if there is none."""

    def refusal(self, name: str) -> LimpetError:
        """Return the error for a call of ``name`` during another one."""
        self.check_not_forked()
        callee, where = self.running_call() or ("another method", "another")
        return LimpetError(
            f"{name}() was called while {callee}() of the same Checkpointer was running in {where}"
            " thread: make one call at a time, in the training thread, and to save on a signal, use"
            " SignalNotice(signal.SIGUSR1, stops=False)"
        )

    def running_call(self) -> tuple[str, str] | None:
        """Return the name of the running call, and in which thread it is, or None."""
        found = self.running.get(_CALL)
        if found is None:
            return None
        return found[0], "this" if found[1] == get_ident() else "another"

    def call_save_function(self, save_fn: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call ``Preemption.save_fn``, within a step. It may call ``save`` and ``wait``."""
        outer, self.running[_CALL] = self.running[_CALL], (_SAVE_FN, get_ident())
        try:
            save_fn(*args, **kwargs)
        except SystemExit as e:
            if e.code:  # code 0 would say that the training is complete: it exits with 75 soon
                raise
        finally:
            self.running[_CALL] = outer

    @property
    def is_forked(self) -> bool:
        """True in a forked process: the saves and buffers belong to the parent."""
        return self._pid != os.getpid()

    @property
    def can_save(self) -> bool:
        """True if training has started, the state is valid, and the Checkpointer is open."""
        return self.is_started and self.is_state_valid and not (self.is_closed or self.is_forked)

    def interruption(self) -> BaseException | None:
        """Return the exception that ends the training, such as in ``finally``: not one that was
        already handled at the last step, because the training runs in an ``except`` block."""
        error = sys.exception()
        return None if id(error) == self._outer_exception else error

    @property
    def must_report_end(self) -> bool:
        """True for a training that has begun, if no other event says why it ends."""
        is_named = isinstance(self.interruption(), Preempted | NoProgress)
        return (self.is_started or self.is_resumed) and not (self.was_taken_over or is_named)

    def check_open(self) -> None:
        """Raise ``LimpetError`` if the Checkpointer is closed, or in a forked process."""
        self._outer_exception = id(sys.exception())
        if self.was_taken_over:
            raise LimpetError(
                "The Checkpointer is closed, because a newer one of this process has taken its run"
                " over: use the newer one"
            )
        if self.is_closed:
            raise LimpetError("The Checkpointer is closed: create a new one")
        self.check_not_forked()

    def check_not_forked(self) -> None:
        if self.is_forked:
            raise LimpetError(
                "This Checkpointer was created before this process was forked: use it only in the"
                " process that created it"
            )
