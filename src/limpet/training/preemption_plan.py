"""``Preemption``: what a training does after a notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from limpet.arguments import check_seconds, require
from limpet.notices.notice import Notice, NoticeSource
from limpet.settings import run_grace

SAVE_BEFORE_STOP, LEAVE = "save before the stop", "save and leave"
"""The actions on which the ranks agree after a notice."""

SAVE_ON_REQUEST = "save after a notice"
"""The action after a notice that the machine is at risk, or after a signal that means this."""

UNKNOWN_SECONDS = 30.0
"""The time until the stop if neither the notice, nor ``limpet run``, nor the user says. (The
default of Kubernetes, torchrun, and Slurm.)"""

_MARGIN = 3.0
"""Seconds of the grace of ``limpet run`` that are not this process's, or a tenth of it if that is
less. ``limpet run`` kills when the grace is over, counted from its own signal. The signal may
arrive here later, through a shell or torchrun, and both have to end after the save."""

LEAST_SECONDS = 5.0
"""The least time that a training takes for its save, however late the notice came: the process is
still alive, and a save that is not committed does no harm."""

_RESERVE = 2.0
"""Seconds of the time that a notice leaves in which nobody trains: a machine that is about to be
stopped may be slow, and then the ranks could not agree on their last step anymore."""

LONG_NOTICE = 300.0
"""The training goes on after a notice that leaves more seconds than this, unless ``grace`` says."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a notice. ``seconds``: until the exit; ``train_seconds``: of training after
    a first save (0: exit at once). Infinite: the training goes on without a deadline."""

    seconds: float
    train_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Preemption:
    """What a training does when it gets a notice that its process will be stopped.

    ``grace`` is the time in seconds between a notice and the exit. With 0, the training saves and
    exits at once. Otherwise, it saves at once, goes on, and saves again before the grace period
    ends. It never goes on for longer than the notice allows. None: it goes on if the notice leaves
    more than five minutes, such as one of a maintenance in an hour.

    ``notices`` are the sources of notices. None: SIGTERM, SIGHUP (unless it is ignored or has a
    handler), and those of the platform on which the process runs. ``exit_fn`` is called instead of
    an exit with code 75. If it returns, training may go on, and ``ckpt.should_stop`` is True.
    ``save_fn`` is called instead of the last save. It may call ``ckpt.save``. Its error is raised.

    Under several ranks, a notice on one rank makes all ranks save at one step and exit.

    The design follows TensorFlow's ``PreemptionCheckpointHandler``.
    """

    grace: float | None = None
    notices: Sequence[NoticeSource] | None = None
    exit_fn: Callable[[], object] | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.grace is not None:
            grace = check_seconds("grace= of Preemption", self.grace, may_be_zero=True)
            object.__setattr__(self, "grace", grace)
        for name, function in (("exit_fn", self.exit_fn), ("save_fn", self.save_fn)):
            is_valid = function is None or callable(function)
            require(f"{name}= of Preemption", is_valid, "a function, or None", function)
        sources: Any = () if self.notices is None else self.notices
        is_valid = isinstance(sources, Sequence) and not isinstance(sources, str)
        is_valid = is_valid and all(hasattr(s, "poll") and not isinstance(s, type) for s in sources)
        expected = "a list of sources, such as [SignalNotice(signal.SIGTERM)]"
        require("notices= of Preemption", is_valid, expected, sources)

    def plan(self, notice: Notice, exit_seconds: float) -> Plan:
        """Return what to do. ``exit_seconds``: as expected, of a save, a step, and the exit."""
        if not notice.stops:
            return Plan(inf, inf)
        grace = self.grace
        if notice.seconds is None:
            unknown, kills_after = max(UNKNOWN_SECONDS, grace or 0.0), run_grace()
            if kills_after is not None:  # ``limpet run`` ignores ``grace=``
                unknown = kills_after - min(_MARGIN, kills_after / 10)
            available = max(min(LEAST_SECONDS, unknown), unknown - notice.age)
        else:
            available = max(LEAST_SECONDS, notice.seconds)
        if grace is None:
            grace = available if available > LONG_NOTICE else 0.0
        train_seconds = min(grace, available - _RESERVE) - exit_seconds
        # two saves must fit
        is_long = train_seconds > exit_seconds
        return Plan(available, train_seconds if is_long else 0.0)


DEFAULT = Preemption()
