"""Run a command, forward signals to it, and leave none of its processes behind.

It also works as process 1 of a container, for which the kernel drops a signal that is neither
handled nor blocked: the signals are blocked, and ``sigtimedwait`` receives them, as in tini. So
none is lost, and ``si_code`` says whether the terminal sent it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from limpet.notices.final_code import STOP_SIGNALS, Ended, find_signals, signal_name
from limpet.notices.process_tree import adopt_orphans, descendants

FORWARDED_SIGNALS = (*STOP_SIGNALS, *find_signals("SIGUSR1", "SIGUSR2", "SIGXCPU"))
"""The signals that are passed on to the command."""

_SI_KERNEL = 0x80
"""``si_code`` of a signal from the kernel. The terminal's go to its whole foreground group."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    grace: float,
    report: Callable[[str], None],
    *,
    find_requesting: Callable[[int], Sequence[int]] = lambda number: (),
    stdout: int | None = None,
) -> Ended:
    """Run a command until none of its processes is left, and return how it ended. Main thread only.
    ``grace``: seconds from the first stop signal to SIGKILL for all descendants. ``report`` gets
    lines for people. ``find_requesting(number)``: the processes that alone receive a signal that
    asks for no end. The signals stay blocked afterward: none can keep the caller from reporting.
    Raises ``OSError`` if the command cannot start."""
    supervision = _Supervision(grace, report, find_requesting)
    supervision.start(command, environment, stdout)
    supervision.wait_for_command()
    supervision.end_rest()
    return supervision.ended()


class _Supervision:
    """One command and its processes."""

    def __init__(
        self,
        grace: float,
        report: Callable[[str], None],
        find_requesting: Callable[[int], Sequence[int]],
    ) -> None:
        self._grace, self._report, self._find_requesting = grace, report, find_requesting
        self._pid = 0
        self._wait_status: int | None = None
        self._received: list[int] = []
        self._forwarded: list[int] = []
        self._killed: set[int] = set()
        self._deadline: float | None = None
        self._missed: list[int] = []
        self._signals = {signal.SIGCHLD}
        self._foreign: frozenset[int] = frozenset()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None
    ) -> None:
        # a signal that the caller ignores, as nohup does, stays ignored, in the command too
        ignored = {s for s in FORWARDED_SIGNALS if signal.getsignal(s) == signal.SIG_IGN}
        self._signals |= {*FORWARDED_SIGNALS} - ignored
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel drops exit codes
        self._foreign = descendants().all  # of the shell that replaced itself by this one
        try:
            adopt_orphans()
        except OSError as e:
            self._report(f"processes that the command leaves behind may survive: {e}")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        handlers = {s: signal.signal(s, self._on_missed) for s in self._signals - {signal.SIGCHLD}}
        # Python ignores these, and the command must not inherit that
        reset = find_signals("SIGPIPE", "SIGXFSZ")
        actions = [] if stdout is None else [(os.POSIX_SPAWN_DUP2, stdout, 1)]
        try:
            self._pid = os.posix_spawnp(
                command[0], list(command), environment,
                file_actions=actions, setsigmask=before, setsigdef=reset,
            )  # fmt: skip
        except BaseException:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise

    def wait_for_command(self) -> None:
        while not self._reap():
            self._wait(1.0)  # no signal reports some changes
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()

    def end_rest(self) -> None:
        """End what the command has left running: ask it to stop, and kill it after the grace."""
        asked: set[int] = set()
        while (left := descendants(self._foreign)).all:
            if self._deadline is None:
                self._deadline = time.monotonic() + self._grace
            if not asked:
                self._report(f"the command ended and left {len(left.all)} processes running")
            # Not their children, such as the workers of a data loader: those are for them to end.
            # If they do not, their children become ours.
            for pid in left.children - asked:
                _send(pid, signal.SIGTERM)
            asked |= left.children
            if time.monotonic() >= self._deadline:
                self._kill()
                return
            self._wait(0.1)
            self._reap()

    def ended(self) -> Ended:
        code = None if self._wait_status is None else os.waitstatus_to_exitcode(self._wait_status)
        if code is None:  # it ignores even SIGKILL: it is in uninterruptible sleep
            code = -signal.SIGKILL
        return Ended(
            exit_code=code if code >= 0 else None,
            killed_by=-code if code < 0 else None,
            forwarded=tuple(self._forwarded),
            killed=frozenset(self._killed),
            pid=self._pid,
        )

    def _wait(self, longest: float) -> None:
        """Wait for a signal for at most ``longest`` seconds, or until the deadline."""
        if self._deadline is not None:
            longest = min(longest, max(0.0, self._deadline - time.monotonic()))
        received = signal.sigtimedwait(self._signals, longest)
        if received is not None and received.si_signo != signal.SIGCHLD:
            self._on_signal(received.si_signo, received.si_code == _SI_KERNEL)
        while self._missed:
            self._on_signal(self._missed.pop(0), False)

    def _on_missed(self, number: int, _: FrameType | None) -> None:
        # A library may have started a thread before, in which the signals are not blocked. The
        # kernel may choose that thread for a signal.
        self._missed.append(number)

    def _on_signal(self, number: int, from_terminal: bool) -> None:
        if number not in STOP_SIGNALS and (requesting := self._find_requesting(number)):
            for pid in requesting:
                _send(pid, number)
            return
        again = number in self._received
        self._received.append(number)
        if self._wait_status is None:
            self._forwarded.append(number)  # otherwise, it is not why the command ended
        if number not in STOP_SIGNALS:
            self._forward(number)
            return
        name, now = signal_name(number), time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._grace
            self._report(f"{name}: the command has {self._grace:g} s to stop")
        elif again and number == signal.SIGINT:
            self._report("interrupted again: the command is killed")
            self._deadline = now
        else:
            self._report(f"{name}: the command has {max(0, self._deadline - now):.0f} s left")
        # A second SIGTERM is not passed on: the third that torchrun receives ends it without its
        # workers. One from the terminal has reached the command already.
        if not again and not from_terminal:
            self._forward(number)

    def _forward(self, number: int) -> None:
        if self._wait_status is None:
            _send(self._pid, number)

    def _reap(self) -> bool:
        """Collect the processes that have ended. Return True if the command has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                return self._wait_status is not None
            if pid == self._pid:
                self._wait_status = status

    def _kill(self) -> None:
        """Kill all processes, also those that appear meanwhile, for a bounded time."""
        end = time.monotonic() + 10.0  # one in uninterruptible sleep may never end
        while True:
            alive = {*descendants(self._foreign).all}
            if self._wait_status is None:
                alive.add(self._pid)
            if not alive:
                return
            if time.monotonic() >= end:
                self._report(f"processes that SIGKILL does not end: {sorted(alive)}")
                self._wait_status = (
                    signal.SIGKILL if self._wait_status is None else self._wait_status
                )
                return
            for pid in alive:
                _send(pid, signal.SIGKILL)
            self._killed |= alive
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        pass  # it runs as another user, as under sudo, which ends its own child
