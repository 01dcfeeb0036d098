"""The background half of an asynchronous save."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import TYPE_CHECKING

from holdfast.errors import CommitError, HoldfastError

if TYPE_CHECKING:
    from holdfast.engine.snapshot.snapshot import Snapshot

_unawaited: set[Pending] = set()
_finalizer_pid: int | None = None


class Pending:
    """A save that goes on in the background, on a thread of its own.

    The thread is no daemon: a process that leaves normally finishes the save first.
    """

    def __init__(
        self,
        finish: Callable[[], Snapshot],
        url: str,
        after: Callable[[], None] | None = None,
        staged: Event | None = None,
    ) -> None:
        self.url = url
        self._staged = staged
        self._finish = finish
        self._after = after
        self._snapshot: Snapshot | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._start_failed = False
        # Not Thread.join: before Python 3.13 a join that Ctrl-C interrupts takes the thread for
        # ended, and then the process no longer waits for it when it leaves.
        self._ended = Event()
        self._thread = Thread(target=self._run, name="holdfast-save")
        self._start_lock = Lock()  # taken once: by the thread, or by who gave up starting it

    @property
    def begun(self) -> bool:
        """Whether the save has been left to the thread. If not, it will never begin."""
        return self._start_lock.locked() and not self._start_failed

    def start(self) -> None:
        """Start the thread. Raises ``CommitError`` if there is none to be had. If this is
        interrupted, the save either goes on (``begun``), or will never begin."""
        _unawaited.add(self)
        _register_worker_finalizer()
        try:
            self._thread.start()
        except BaseException as e:
            if self._start_lock.acquire(blocking=False):
                self._start_failed = True
                _unawaited.discard(self)
            if not isinstance(e, RuntimeError):
                raise
            raise CommitError(
                f"Nothing was committed to {self.url}: no thread can be started",
                found=str(e),
                todo="Raise the limit on processes and threads (ulimit -u), or use save()",
            ) from e

    @property
    def done(self) -> bool:
        """Whether the save has been committed or has failed."""
        return self._ended.is_set()

    def wait_staged(self) -> None:
        """Return when all of the state may be changed, parameters and slots too."""
        if self._staged is not None and self._pid == os.getpid():
            self._staged.wait()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The committed snapshot. Raises what made the save fail, or ``TimeoutError`` after
        ``timeout`` seconds; the save then still goes on."""
        if self._pid != os.getpid():
            raise HoldfastError(
                f"The save to {self.url} goes on in the process that this one was forked from",
                todo="Wait for it there",
            )
        if current_thread() is self._thread:
            raise HoldfastError(
                f"The save to {self.url} cannot wait for itself",
                expected="a wait in another thread",
                found="one in the save's own, by a sink of events",
                todo="Leave it to the training to wait",
            )
        if self._ended.wait(timeout):
            self._thread.join()
        else:
            raise TimeoutError(f"The save to {self.url} is not done after {timeout} s")
        _unawaited.discard(self)
        if self._error is not None:
            raise self._error
        if self._snapshot is None:
            raise RuntimeError(f"The save to {self.url} ended without a result")
        return self._snapshot

    def _run(self) -> None:
        if not self._start_lock.acquire(blocking=False):
            return
        try:
            try:
                self._snapshot = self._finish()
            finally:
                if self._after is not None:
                    self._after()
            _unawaited.discard(self)
        except BaseException as e:  # noqa: BLE001  (top of a thread: raised by wait)
            self._error = e
        finally:
            # the closure holds the whole state's copy
            del self._finish, self._after
            self._ended.set()


class _ExitOnDelete:
    """Ends the process with code 1 when it is deleted. Kept in ``sys``, which the interpreter
    takes apart last: an exit from a handler of ``atexit`` would keep the other handlers (logs
    that are flushed, children that are ended) from running, and an exception there is ignored."""

    def __del__(self, end: Callable[[int], object] = os._exit) -> None:
        end(1)


def _report_unawaited() -> bool:
    """Tell of failed saves that nobody waited for; whether there were any."""
    failed = [p for p in _unawaited if p.done and p._error is not None]
    for pending in failed:
        _unawaited.discard(pending)
        with suppress(Exception):  # there may be no stderr: the exit code tells it all the same
            sys.stderr.write(f"holdfast: the save to {pending.url} failed:\n")
            traceback.print_exception(pending._error)
    return bool(failed)


def _at_exit() -> None:
    """A failed save that nobody waited for must not look like success to whoever started us."""
    if _report_unawaited():
        vars(sys)["_holdfast_exit"] = _ExitOnDelete()


def _register_worker_finalizer() -> None:
    """The same in a worker of ``multiprocessing``: a forked one runs no ``atexit``, but finalizers
    of that module's, which are told at the end, and its exit code is settled after them."""
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
# in a forked child the saves are its parent's
os.register_at_fork(after_in_child=_unawaited.clear)
