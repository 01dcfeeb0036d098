"""Which version to evaluate next. Nothing here reads a store or a clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from limpet.format.names import Version
from limpet.run.policy import KeepEvery, Record


@dataclass(frozen=True, slots=True)
class Selection:
    """What the user wants to be evaluated.

    ``every_steps``: only the first version at or after each positive multiple. ``skip_none``: all
    versions, oldest first; otherwise the newest one, and those that come after it. ``retry``: also
    versions whose evaluation failed.
    """

    every_steps: int | None = None
    skip_none: bool = False
    retry: bool = False

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
        self,
        versions: Sequence[Version],
        done: Collection[Version],
        failed: Collection[Version],
    ) -> tuple[Version | None, list[Version]]:
        """Return the version to evaluate next, and those that wait behind it.

        ``done`` and ``failed``: those with a result, and those whose evaluation failed. Without
        ``skip_none``, a version counts as skipped once a newer one has been evaluated.
        """
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
