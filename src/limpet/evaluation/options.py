"""The options of an evaluation: which versions it evaluates, and who does the work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from limpet.arguments import real, seconds, whole
from limpet.errors import LimpetError
from limpet.format.names import Version
from limpet.run.policy import KeepEvery, Record
from limpet.text import to_repr

_MAX_SECONDS = 2e6
"""The longest time limit: a socket waits for at most 2**31 ms."""


def check_argument(owner: str, name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raise ``LimpetError`` unless the argument ``name`` of ``owner`` is valid."""
    if not is_valid:
        raise LimpetError(
            f"Invalid value for {name}= of {owner}", expected=expected, found=to_repr(value)[:200]
        )


def check_seconds(owner: str, name: str, value: object, most: float) -> None:
    """Raise ``LimpetError`` unless the argument is a number above 0, and at most ``most``."""
    number = seconds(value)
    is_valid = number is not None and number <= most
    check_argument(owner, name, value, is_valid, f"seconds: a number above 0, at most {most:g}")


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
        check = partial(check_argument, "Workers")
        check("count", self.count, whole(self.count) is not None, "a whole number, 0 or more")
        is_mapping = isinstance(self.ray, Mapping)
        check("ray", self.ray, self.ray is None or is_mapping, "a dict of the options of an actor")
        if self.ray is not None:
            check("count", self.count, self.count > 0, "1 or more, with ray")
        for name in ("start", "load", "task"):
            check_seconds("Workers", name, getattr(self, name), _MAX_SECONDS)
        is_valid = whole(self.attempts, 1) is not None
        check("attempts", self.attempts, is_valid, "a whole number, 1 or more")

    @property
    def is_inline(self) -> bool:
        """True if the evaluator does the work itself."""
        return not self.count and self.listen is None


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
        check, steps = partial(check_argument, "Selection"), self.every_steps
        is_valid = steps is None or whole(steps, 1) is not None
        check("every_steps", steps, is_valid, "a whole number, 1 or more")
        for name in ("every_seconds", "throttle"):
            value = getattr(self, name)
            number = real(value)
            check(name, value, number is not None and number >= 0, "0 or more")

    @property
    def needs_all(self) -> bool:
        """True if the newest version alone does not tell which one to evaluate."""
        return self.skip_none or self.retry or self.every_steps is not None

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
