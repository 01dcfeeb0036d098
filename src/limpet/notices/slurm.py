"""Notices of the time limit of a Slurm job."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping

from limpet.arguments import check_seconds
from limpet.errors import LimpetError
from limpet.notices.notice import BoundedSource, Notice
from limpet.notices.planned import BEFORE
from limpet.settings import platform_variables

_COMMAND_SECONDS = 10.0
_TIME_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
_NO_LIMIT = ("UNLIMITED", "NOT_SET")


class SlurmNotice(BoundedSource):
    """A notice when less than ``before`` seconds are left of a Slurm job's time limit.

    The default of 300 is enough for a step, a save of a large state, and the 60 seconds by which
    ``--signal`` may be late. The signals of ``--signal`` and of ``scancel`` are another source.

    The end of the job is ``SLURM_JOB_END_TIME`` (Slurm 22.05 and later). The limit may change, so
    shortly before that end, and always without that variable, this runs ``squeue -h -j JOB -o %L``,
    at most once per minute. Without ``squeue``, the variable counts. ``variables``: the environment
    variables, by default those of this process. ``now``: the time of day in seconds, which the
    hosts of a cluster share. ``check`` raises ``OSError`` if the end of the job is unknown.

    Source: https://slurm.schedmd.com/, sbatch(1) and squeue(1).
    """

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        before: float = BEFORE,
        command: str = "squeue",
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LimpetError`` outside a Slurm job, and for an invalid value."""
        variables = platform_variables() if variables is None else variables
        self._job = variables.get("SLURM_JOB_ID", "")
        if not self._job.isdecimal():
            raise LimpetError(
                "Cannot watch the time limit of a Slurm job outside of one: SLURM_JOB_ID is"
                f" {self._job!r}"
            )
        super().__init__(f"the time limit of Slurm job {self._job}", 10.0, clock)
        self._before = check_seconds("before=", before)
        self._command = command
        self._now = now
        end = variables.get("SLURM_JOB_END_TIME", "")
        self._has_variable = end.isdecimal()
        self._ends_at = float(end) if self._has_variable else None
        self._asked_at: float | None = None
        self._error: OSError | None = None

    def check(self) -> Notice | None:
        near = self._seconds_left() <= self._before
        if near or not self._has_variable:
            interval = 60.0 if near else 600.0  # all jobs of the cluster share Slurm
            if self._asked_at is None or self.clock() - self._asked_at >= interval:
                self._asked_at = self.clock()
                try:
                    self._ends_at = self._now() + self._run_command()
                except OSError as e:  # it counts only while the end is unknown
                    self._error = e
        if self._ends_at is None and self._error is not None:
            raise OSError(f"Cannot find out when the job ends: {self._error}") from self._error
        left = self._seconds_left()
        return Notice(self.name, max(0.0, left)) if left <= self._before else None

    def _seconds_left(self) -> float:
        return math.inf if self._ends_at is None else self._ends_at - self._now()

    def _run_command(self) -> float:
        """Return the seconds that are left according to Slurm. Raises ``OSError``."""
        words = [self._command, "-h", "-j", self._job, "-o", "%L"]
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise TimeoutError(f"{self._command} took over {_COMMAND_SECONDS:g} s") from e
        answer = done.stdout.decode(errors="replace").split()
        if done.returncode or not answer:
            text = done.stderr.decode(errors="replace").strip()
            raise OSError(f"{' '.join(words)} exited with {done.returncode}: {text[:200]}")
        return min(map(_parse_time_left, answer))  # a heterogeneous job has several


def _parse_time_left(text: str) -> float:
    """Return the seconds in ``D-HH:MM:SS`` or a part of it. Raises ``OSError``."""
    if text in _NO_LIMIT:
        return math.inf
    match = _TIME_LEFT.fullmatch(text)
    if match is None:
        raise OSError(f"squeue answered {text[:80]!r}. Expected the time left, as in 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
