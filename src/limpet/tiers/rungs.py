"""Which rung of the restore ladder a training resumes on. ``decide`` is the whole rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from limpet.format.names import Version, parse_version
from limpet.tiers.restarts import Restart

PATIENCE = 3
"""The number of restarts without progress on each rung."""


class Rung(IntEnum):
    """What a resume leaves out. Each rung also leaves out what the ones before it do."""

    NEWEST = 0
    """Nothing: it loads the newest state."""

    DURABLE = 1
    """The captured states, which are in tiers."""

    OLDER = 2
    """The newest version of the run."""

    GIVE_UP = 3
    """Everything: the training must not run again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a training resumes.

    ``counted``: the restarts without progress. ``number``: that of this restart on its rung, from
    1. ``skipped``: the version that is left behind. ``goes_back``: it is left behind from now on.
    """

    rung: Rung = Rung.NEWEST
    counted: Sequence[Restart] = ()
    number: int = 1
    skipped: Version | None = None
    goes_back: bool = False

    def goal(self, loaded_step: int) -> int:
        """Return the step that must be exceeded for progress. ``loaded_step``: -1 for none.

        Once the training has been moved back, that is the last step that it ever had. A training
        that always dies at step 55 would otherwise be moved back from 50 to 40, save 50 again, and
        be moved back forever.
        """
        return max([loaded_step, *(r.goal for r in self.counted)]) if self.rung else loaded_step


def has_progress(restart: Restart, newest_step: int) -> bool:
    """Return True if a restart no longer counts. ``newest_step``: of the newest state, or -1."""
    return newest_step > restart.goal


def decide(
    restarts: Iterable[Restart],
    newest_step: int,
    versions: Sequence[Version],
    own: Restart | None = None,
) -> Plan:
    """Return how to resume. ``versions``: the newest two of the current lineage, newest first.

    ``own``: the record of this process, if it resumes again. It is no restart, but its rung stays.

    Three restarts on a rung without progress lead to the next one:

    1. ``DURABLE``, unless none of them has resumed from a tier: nothing would be different. One
       restart suffices if a metric was NaN soon after it had resumed from a tier.
    2. ``OLDER``, if there is a version before the newest one.
    3. ``GIVE_UP``.
    """
    counted = [r for r in restarts if not has_progress(r, newest_step)]
    counted.sort(key=lambda r: (r.rung, r.created))
    known = counted if own is None or has_progress(own, newest_step) else [*counted, own]
    rung = Rung(max((r.rung for r in known), default=Rung.NEWEST))
    on_rung = [r for r in counted if r.rung == rung]
    is_suspect = rung == Rung.NEWEST and any(r.has_nan and r.tier for r in on_rung)
    if len(on_rung) < PATIENCE and not is_suspect:
        left = [parse_version(r.skipped) for r in known if r.rung == rung and r.skipped]
        return Plan(rung, counted, 1 + len(on_rung), left[0] if left else None)
    if rung == Rung.NEWEST and any(r.tier is not None for r in on_rung):
        return Plan(Rung.DURABLE, counted)
    if rung < Rung.OLDER and len(versions) > 1:
        return Plan(Rung.OLDER, counted, skipped=versions[0], goes_back=True)
    return Plan(Rung.GIVE_UP, counted)
