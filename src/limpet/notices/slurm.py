"""Notices of the time limit of a Slurm job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from limpet.arguments import check_seconds
from limpet.errors import LimpetError
from limpet.notices.notice import Notice
from limpet.notices.planned import BEFORE
from limpet.settings import platform_variables


class SlurmNotice:
    """A notice when less than ``before`` seconds are left of a Slurm job's time limit.

    The default of 300 is enough for a step, a save of a large state, and the 60 seconds by which
    ``--signal`` may be late. The signals of ``--signal`` and of ``scancel`` are another source.

    The end of the job is ``SLURM_JOB_END_TIME`` (Slurm 22.05 and later), which keeps its value if
    the limit is changed while the job runs. ``variables``: the environment variables, by default
    those of this process. ``now``: the time of day in seconds, which the hosts of a cluster share.

    Source: https://slurm.schedmd.com/sbatch.html.
    """

    interval = 10.0

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        before: float = BEFORE,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Raises ``LimpetError`` outside a Slurm job, and for an invalid value."""
        variables = platform_variables() if variables is None else variables
        if not is_slurm_job(variables):
            raise LimpetError(
                "Cannot watch the time limit of a Slurm job without SLURM_JOB_ID and"
                " SLURM_JOB_END_TIME, which Slurm 22.05 and later set"
            )
        self.name = f"the time limit of Slurm job {variables['SLURM_JOB_ID']}"
        self._ends_at = float(variables["SLURM_JOB_END_TIME"])
        self._before = check_seconds("before=", before)
        self._now = now

    def poll(self) -> Notice | None:
        left = self._ends_at - self._now()
        return Notice(self.name, max(0.0, left)) if left <= self._before else None


def is_slurm_job(variables: Mapping[str, str]) -> bool:
    """Return True in a Slurm job whose end is known."""
    names = ("SLURM_JOB_ID", "SLURM_JOB_END_TIME")
    return all(variables.get(name, "").isdecimal() for name in names)
