"""The background half of an asynchronous save."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Thread, current_thread
from typing import TYPE_CHECKING

from limpet.arguments import check_seconds
from limpet.errors import CommitError, LimpetError
from limpet.machine import after_fork
from limpet.ranks.error_report import format_with_notes
from limpet.threads import Latch, start_thread
from limpet.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from limpet.loading.snapshot import Snapshot

_unawaited: set[Pending] = set()
_finalizer_pid: int | None = None


@short_tracebacks
class Pending:
    """A save that runs in the background on its own thread.

    The thread is not a daemon: a process that exits normally finishes the save first.
    """

    def __init__(
        self,
        finish: Callable[[], Snapshot],
        url: str,
        after: Callable[[], object],
        staged: Latch | None,
    ) -> None:
        self.url = url
        self._staged = staged
        self._finish = finish
        self._after = after
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        # Not Thread.join: before Python 3.13, a join that Ctrl-C interrupts marks the thread as
        # ended, and the process then does not wait for it at exit.
        self._ended = Latch()
        self._thread = Thread(target=self._run, name="limpet-save")
        # Who has it: the thread, or the caller that gave up starting it. The first one sets it,
        # atomically. An interrupt right after the acquisition of a lock would hide who that was.
        self._claim: dict[str, str] = {}

    def __repr__(self) -> str:
        failed = self._error is not None
        state = "in progress" if not self.done else "failed" if failed else "committed"
        return f"<Pending save to {self.url}, {state}>"

    def start(self) -> None:
        """Start the thread. Raises ``CommitError`` if no thread can be started.

        If this call is interrupted, the save may continue (see ``cancel``).
        """
        _unawaited.add(self)
        _register_worker_finalizer()
        if not start_thread(self._thread):
            raise CommitError(
                f"Nothing was committed to {self.url}: no thread can be started",
                todo="Raise the limit on processes and threads (ulimit -u), or use save()",
            )

    def cancel(self) -> bool:
        """Return True if the save will never begin, because its thread has not taken it over."""
        is_cancelled = self._claim.setdefault("by", "caller") == "caller"
        if is_cancelled:
            _unawaited.discard(self)
        return is_cancelled

    @property
    def done(self) -> bool:
        """Return True if the save was committed or failed."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error with which the save failed, or None."""
        return self._error

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the save was committed or failed, and leave its result to ``wait``. Return
        False after ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def forget(self) -> None:
        """Let the process exit with its own code even if this save fails: a newer one counts."""
        _unawaited.discard(self)

    def wait_staged(self) -> None:
        """Wait until all of the state may change, including parameters and optimizer slots."""
        if self._staged is not None and self._pid == os.getpid():
            self._staged.wait()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait for the save and return the committed snapshot.

        Raises the error with which the save failed, or ``TimeoutError`` after ``timeout`` seconds;
        in that case the save continues.
        """
        if timeout is not None:
            timeout = check_seconds("timeout=", timeout, may_be_zero=True)
        if self._pid != os.getpid():
            raise LimpetError(
                f"The save to {self.url} runs in the process from which this one was forked",
                todo="Wait for the save in that process",
            )
        if current_thread() is self._thread:
            raise LimpetError(
                f"The save to {self.url} cannot wait for itself",
                expected="a call to wait() from another thread",
                found="a call from the save's own thread, by an event sink",
                todo="Call wait() in the training thread",
            )
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The save to {self.url} did not finish within {timeout:.3g} s")
        self._thread.join()
        _unawaited.discard(self)
        if self._error is not None:
            raise self._error
        if self._snapshot is None:
            raise RuntimeError(f"The save to {self.url} ended without a result")
        return self._snapshot

    def _run(self) -> None:
        if self._claim.setdefault("by", "thread") != "thread":
            return
        try:
            try:
                self._snapshot = self._finish()
            finally:
                self._after()
            _unawaited.discard(self)
        except BaseException as e:  # noqa: BLE001  (top of a thread: raised by wait)
            self._error = e
        finally:
            # the closure refers to the copy of the whole state
            del self._finish, self._after
            self._ended.set()


class _ExitOnDelete:
    """Ends the process with code 1 when deleted: it is in ``sys``, which the interpreter clears
    last. An exit in ``atexit`` would skip other handlers, and Python ignores an exception there."""

    def __del__(self, exit_process: Callable[[int], object] = os._exit) -> None:
        exit_process(1)


def _report_unawaited() -> bool:
    """Print the failed saves that nothing waited for. Return True if there were any."""
    failed = [p for p in _unawaited if p.done and p._error is not None]
    for pending in failed:
        _unawaited.discard(pending)
        with suppress(Exception):  # without a stderr, the exit code still reports the failure
            error, text = pending._error, f"limpet: the save to {pending.url} failed:"
            if isinstance(error, LimpetError):  # its message says everything
                sys.stderr.write(f"{text} {type(error).__name__}: {format_with_notes(error)}\n")
            else:
                sys.stderr.write(f"{text}\n")
                traceback.print_exception(error)
    return bool(failed)


def _at_exit() -> None:
    """Make the process exit with code 1 if a save failed and nothing waited for it. Otherwise the
    failure would look like success to the parent process."""
    if _report_unawaited():
        vars(sys)["_limpet_exit"] = _ExitOnDelete()


def _register_worker_finalizer() -> None:
    """Register the same check in a ``multiprocessing`` worker. A forked worker runs no ``atexit``
    handlers. It runs the finalizers of ``multiprocessing`` and sets its exit code after them."""
    global _finalizer_pid
    util = sys.modules.get("multiprocessing.util")
    if (
        util is not None
        and _finalizer_pid != os.getpid()
        and util.process.parent_process() is not None
    ):
        _finalizer_pid = os.getpid()
        util.Finalize(None, _finish_worker, exitpriority=-1000)


def _finish_worker() -> None:
    for pending in list(_unawaited):
        pending._ended.wait()
    if _report_unawaited():
        raise SystemExit(1)


atexit.register(_at_exit)
# the saves belong to the parent of a forked child
after_fork(_unawaited.clear)
