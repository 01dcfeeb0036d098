"""The exit code of ``limpet run``, from how its command ended and what its workers said.

A worker's status says more than the exit code of the command, which may be a launcher that hides
codes. But only statuses of *all* workers excuse a command that failed, and a status never hides
that something else failed without being stopped. ``decide`` is the whole rule.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from limpet.notices.exit_status import DONE, FAILED, GIVE_UP, SAVED, UNSAVED, Status, WorkerRecord


def find_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the signals that this system has. Windows has few."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


STOP_SIGNALS = find_signals("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that ask a command to stop."""

_SEVERITY = (DONE, SAVED, UNSAVED, FAILED, GIVE_UP)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the command ended. ``forwarded``: the signals that ``limpet run`` or the terminal sent
    it. ``killed``: the processes that ``limpet run`` killed after the grace period."""

    exit_code: int | None
    killed_by: int | None = None
    forwarded: tuple[int, ...] = ()
    killed: frozenset[int] = frozenset()
    pid: int = 0

    @property
    def overdue(self) -> bool:
        """Whether ``limpet run`` killed the command, because the grace period was over."""
        return self.killed_by == signal.SIGKILL and self.pid in self.killed

    @property
    def stopped(self) -> bool:
        """Whether the command was asked to stop."""
        return any(number in STOP_SIGNALS for number in self.forwarded)


@dataclass(frozen=True, slots=True)
class Decision:
    """The exit code of ``limpet run``, and one line that says why."""

    code: int
    why: str


def decide(ended: Ended, records: Sequence[WorkerRecord]) -> Decision:
    """Return the exit code of ``limpet run``. The first rule that applies decides.

    1. A worker, or the command, says ``GIVE_UP``: ``GIVE_UP``.
    2. The command exits with 0: the worst of its workers' statuses, or ``DONE``. ``FAILED`` does
       not count here: that worker exited with 1, so the command knows of it and went on.
    3. A worker says ``FAILED``: ``FAILED``.
    4. The command exits with ``SAVED`` or ``UNSAVED``: the worst of that and the statuses.
    5. All workers said why they left, and not all of them ``DONE``: the worst of the statuses.
       torchrun returns 1 after any signal, even if all workers exit with 0. Trainings that ended
       before do not matter (see ``is_complete``).
       Not if the command was killed by a signal that ``limpet run`` did not send. But if torchrun
       was asked to stop, SIGABRT counts as 1: its last threads may abort it while it exits.
    6. The command was asked to stop, and did not say more: ``UNSAVED``. But ``DONE`` if it exits
       with 1, torchrun started all workers, and all of them said ``DONE``. Any other code, or one
       of a script, may be that of what followed the training. torchrun stops at SIGUSR1 and
       SIGUSR2 too; any other command may use them otherwise.
    7. ``FAILED``.
    """
    current = last_attempt(records)
    statuses = [record.status for record in current if record.status is not None]
    worst = max((s.code for s in statuses), key=_SEVERITY.index, default=None)
    launched = any(r.launcher is not None for r in current)
    if launched and ended.stopped and ended.killed_by == signal.SIGABRT:
        ended = replace(ended, exit_code=FAILED, killed_by=None)
    code = ended.exit_code
    if GIVE_UP in (worst, code):
        return _decision(GIVE_UP, statuses, ended)
    if code == DONE:
        passed = [s.code for s in statuses if s.code != FAILED]
        if any(r.status is None and r.pid in ended.killed for r in current):
            passed.append(UNSAVED)  # the command left it behind
        return _decision(max(passed, key=_SEVERITY.index, default=DONE), statuses, ended)
    if worst == FAILED:
        return _decision(FAILED, statuses, ended)
    if code in (SAVED, UNSAVED):
        return _decision(max(code, worst or DONE), statuses, ended)
    sent = ended.killed_by is None or ended.killed_by in ended.forwarded or ended.overdue
    complete = worst is not None and is_complete(current)
    if complete and sent and worst is not None and worst != DONE:
        return _decision(worst, statuses, ended)
    stopped = ended.stopped or (launched and bool(ended.forwarded))
    if sent and (stopped or ended.killed_by is not None):
        # torchrun itself returns 1 after a signal; a script that was killed did not finish
        all_said = all(r.launcher is not None and r.status is not None for r in current)
        done = complete and all_said and worst == DONE and code == FAILED
        return _decision(DONE if done else UNSAVED, statuses, ended)
    return _decision(FAILED, statuses, ended)


def last_attempt(records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """Return the records of the processes that torchrun did not replace; without torchrun, all."""
    # torchrun starts all workers of an attempt before one of them can leave, and those of the next
    # attempt after all have left. The restart count alone is not enough: torchrun does not increase
    # it when it restarts because a host joined or left.
    records = list(records)
    newest: dict[str, float] = {}
    restarts: dict[str, int] = {}
    for r in records:
        if r.launcher is not None:
            newest[r.launcher] = max(newest.get(r.launcher, 0.0), r.started)
            restarts[r.launcher] = max(restarts.get(r.launcher, 0), r.restart_count)
    return [
        r
        for r in records
        if r.launcher is None
        or (
            r.restart_count == restarts[r.launcher]
            and (r.left is None or r.left >= newest[r.launcher])
        )
    ]


def is_complete(records: Sequence[WorkerRecord]) -> bool:
    """Return True if every worker of the last attempt left a status or ended normally before."""
    # A launcher's workers are counted, because one that died before its training started has no
    # record. Their ranks are not: each worker may be rank 0 of a group of its own. If some ended
    # normally and others left a status, one of the first may have failed afterward: torchrun then
    # stops the others, for which that looks like a notice.
    expected: dict[str, int] = {}
    said, ended = Counter[str](), Counter[str]()
    for record in records:
        if record.launcher is None:
            if record.left is None:
                return False
            continue
        expected[record.launcher] = record.local_world_size
        said[record.launcher] += record.status is not None
        ended[record.launcher] += record.status is None and record.left is not None
    return bool(records) and all(
        said[name] >= size or (said[name] == 0 and ended[name] >= size)
        for name, size in expected.items()
    )


def describe_end(ended: Ended) -> str:
    """Return how the command ended, as a clause: ``the command exited with 3``."""
    if ended.overdue:
        return "the command did not stop in time and was killed"
    if ended.killed_by is not None:
        return f"the command was killed by {signal_name(ended.killed_by)}"
    return f"the command exited with {ended.exit_code}"


def signal_name(number: int) -> str:
    """Return the name and number of a signal, such as ``SIGTERM (15)``."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _decision(code: int, statuses: Sequence[Status], ended: Ended) -> Decision:
    said = [s for s in statuses if s.code == code]
    if code == DONE:
        return Decision(code, "the training is complete")
    if not said:
        silent = code == UNSAVED and ended.exit_code != UNSAVED and not statuses
        unsaid = ", and no worker said that its state is saved" if silent else ""
        return Decision(code, describe_end(ended) + unsaid)
    first = min(said, key=lambda s: s.rank)
    others = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    saved = "saved" if first.saved_step is None else f"saved step {first.saved_step}"
    if first.saved_step is None and first.step == 0:
        saved = "had nothing to save"
    what = {
        SAVED: saved,
        UNSAVED: "stopped without a save",
        FAILED: "failed",
        GIVE_UP: "gave up",
    }[code]
    where = f" in {first.run}" if first.run else ""
    why = f": {first.why}" if first.why else ""
    return Decision(code, f"rank {first.rank}{others} {what}{where}{why}")
