"""The options of an evaluation: which versions it evaluates, and who does the work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.arguments import check_count, check_seconds, require
from limpet.format.names import Version
from limpet.run.policy import KeepEvery, Record

_MAX_SECONDS = 2e6
"""The longest time limit: a socket waits for at most 2**31 ms."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who evaluates, and for how long.

    ``count``: the number of worker processes on this machine. With 0, this process does the work,
    or, with ``listen``, only the workers that connect. ``ray``: the options of an actor; each
    worker is then an actor on a Ray cluster: ``{}``, or ``{"num_gpus": 1}``. ``listen``: an address
    ``tcp://HOST:PORT/SECRET`` of this machine, at which workers of other machines may connect, at
    any time (``limpet evaluate --connect``).

    ``start``, ``load``, and ``task``: the seconds after which a worker is given up that starts,
    loads a version, or evaluates a part of the data. Its process is killed, and replaced; a worker
    of another machine loses its lease. ``attempts``: how often a part of the data is tried.
    """

    count: int = 4
    ray: Mapping[str, Any] | None = None
    listen: str | None = field(default=None, repr=False)
    start: float = 300.0
    load: float = 600.0
    task: float = 600.0
    attempts: int = 3

    def __post_init__(self) -> None:
        count = check_count("count= of Workers", self.count, 0 if self.ray is None else 1)
        object.__setattr__(self, "count", count)
        is_valid = isinstance(self.ray, Mapping | None)
        require("ray= of Workers", is_valid, "a dict of the options of an actor", self.ray)
        for name in ("start", "load", "task"):
            seconds = check_seconds(f"{name}= of Workers", getattr(self, name), most=_MAX_SECONDS)
            object.__setattr__(self, name, seconds)
        object.__setattr__(self, "attempts", check_count("attempts= of Workers", self.attempts))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which versions are evaluated, and how soon one after the other.

    ``every_steps``: only the first version at or after each positive multiple. ``skip_none``: all
    versions, oldest first; otherwise the newest one, and those that come after it. ``retry``: also
    versions whose evaluation failed. ``every_seconds`` and ``throttle``: at least so many seconds
    from the start, or from the end, of one evaluation to the start of the next.
    """

    every_steps: int | None = None
    skip_none: bool = False
    retry: bool = False
    every_seconds: float = 0.0
    throttle: float = 0.0

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            steps = check_count("every_steps= of Selection", self.every_steps)
            object.__setattr__(self, "every_steps", steps)
        for name in ("every_seconds", "throttle"):
            value = getattr(self, name)
            seconds = check_seconds(
                f"{name}= of Selection", value, may_be_zero=True, may_be_infinite=True
            )
            object.__setattr__(self, name, seconds)

    def wanted(self, versions: Sequence[Version]) -> list[Version]:
        """Return the versions that are evaluated at all. ``versions``: those of the lineage."""
        if self.every_steps is None:
            return list(versions)
        trained = [Record(version) for version in versions if version.step]
        kept = KeepEvery(self.every_steps).keep(trained)
        return [version for version in versions if version in kept]

    def next(
        self, versions: Sequence[Version], done: Collection[Version], failed: Collection[Version]
    ) -> tuple[Version | None, list[Version]]:
        """Return the version to evaluate next, and those that wait behind it. Without
        ``skip_none``, a version counts as skipped once a newer one has been evaluated."""
        finished = {*done, *failed}
        wanted = self.wanted(versions)
        again = [v for v in wanted if self.retry and v in failed]
        if not self.skip_none:
            newest = next((i for i in reversed(range(len(wanted))) if wanted[i] in finished), -1)
            wanted = wanted[newest + 1 :][-1:]
        waiting = sorted({*again, *(v for v in wanted if v not in finished)})
        if not self.skip_none:
            waiting.reverse()
        return (waiting[0], waiting[1:]) if waiting else (None, [])
