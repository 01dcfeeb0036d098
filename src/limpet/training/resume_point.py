"""The state from which a training continues, and the loading of it on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from limpet.errors import (
    Denied,
    LimpetError,
    RankFailed,
    StoreError,
    Unavailable,
)
from limpet.format.manifest import Parent
from limpet.loading.binding import STRICT, Leniency
from limpet.loading.differences import LoadReport
from limpet.loading.load import load_snapshot
from limpet.ranks.group import Group
from limpet.run.catalog import read_sessions, read_training_metadata
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list, to_repr
from limpet.tiers.inventory import Sources, TierName, TierSnapshot
from limpet.tiers.tiers import Tiers

_MAX_NAMES = 9

_NAME = re.compile(r"(?:version_)?([0-9]{1,18})(?:\.([0-9]{1,9}))?")
"""The name of a version, as people write it: ``91``, ``91.1``, or ``version_91.1``."""


class ResumeRequest(NamedTuple):
    """What the caller of ``resume`` asks for: see ``Run.newest``."""

    at: int | None
    branch: int | None

    @classmethod
    def parse(cls, at: int | str | None) -> ResumeRequest:
        """Return the request for a step, or for a version by its name. Raises ``LimpetError``."""
        if at is None:
            return cls(None, None)
        if not isinstance(at, str | bool) and hasattr(at, "__index__"):
            return cls(at, None)
        match = _NAME.fullmatch(at) if isinstance(at, str) else None
        if match is None:
            raise LimpetError(
                'at= must be a step, or the name of a version such as "91.1",'
                f" not {to_repr(at)[:100]}"
            )
        return cls(int(match[1]), int(match[2] or 0))

    @property
    def is_specific(self) -> bool:
        """True if a person has named the version or the branch."""
        return (self.at, self.branch) != (None, None)


class Skipped(NamedTuple):
    """A newer state that is not loaded, and why. ``name``: ``version_70 in memory``."""

    name: str
    error: LimpetError


def describe_skipped(skipped: Sequence[Skipped]) -> list[str]:
    """Return a message for each reason, without its advice."""
    by_reason: dict[str, list[str]] = {}
    for name, e in skipped:
        by_reason.setdefault(e.brief, []).append(name)
    return [
        f"{format_list(found, _MAX_NAMES)} {'is' if len(found) == 1 else 'are'} skipped. {reason}"
        for reason, found in by_reason.items()
    ]


def count_skipped(skipped: Sized) -> str:
    """Return the reason for a branch that begins before these states; empty if there are none."""
    return f"{len(skipped)} newer damaged" if skipped else ""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training continues from it.

    ``from_own_run`` is True if the version belongs to the run itself. ``note`` is metadata about
    the origin of the run, which later versions store. ``training_metadata`` is the state of early
    stopping and goodput that the version stores. ``skipped`` holds the newer states that were not
    loaded. ``durable`` is the newest version of the run. ``tier`` is the name of the tier from
    which the version was loaded, or None if it is a version of the run. ``start_report``: what was
    loaded from a version of another run. ``sessions``: those whose work continues, also in versions
    that are left behind. ``is_exact``: the whole version was loaded as it is.
    """

    snapshot: SnapshotReader
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    durable: SnapshotReader | None = None
    tier: TierName | None = None
    start_report: LoadReport | None = None
    sessions: Sequence[str] = ()
    is_exact: bool = True


class ResumeInstruction(msgspec.Struct, frozen=True):
    """An instruction from rank 0 to the other ranks.

    If ``done`` is False, the ranks load the version ``version`` with the manifest ``digest``. If
    it is True, training continues from the version that was loaded last, on ``branch``, or from no
    version if ``version`` is None. ``tier``: the name of the tier that has the version, or None
    for a version of the run; ``sources``: where its files are there; ``durable``: the newest
    version of the run, if a state of a tier was loaded. ``given_up``: why all ranks leave instead,
    for people.
    """

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0
    tier: TierName | None = None
    sources: Sources = Sources()
    durable: Parent | None = None
    given_up: str = ""


@dataclass(slots=True)
class StateLoader:
    """Loads versions into a state until one is intact for all ranks.

    ``error`` is the error of the last load, or None if it succeeded. ``partially_loaded`` is True
    if a failed load has overwritten a part of the state and no load has succeeded since.
    ``first_from_tier``: the first state that was loaded from a tier, which is the newest one, and
    the name of the tier. ``leftovers`` are the versions on local disks that are still to be
    promoted, and ``problems`` the newer states of tiers that are skipped. ``goes_below``: a
    newer state is in a tier, but a person has named another version.
    """

    state: dict[str, Any]
    group: Group
    tiers: Tiers
    leniency: Leniency = STRICT
    error: LimpetError | None = None
    partially_loaded: bool = False
    first_from_tier: tuple[SnapshotReader, TierName | None] | None = None
    leftovers: list[TierSnapshot] = field(default_factory=list)
    problems: Sequence[Skipped] = ()
    goes_below: bool = False

    def load(self, snapshot: SnapshotReader) -> None:
        """Load a version. If it is damaged for one rank, all ranks raise that error.

        Raises ``RankFailed`` if the store of another rank denies access or does not answer,
        because the version may then be intact.
        """
        try:
            load_snapshot(snapshot, self.state, leniency=self.leniency, group=self.group)
        except LimpetError as e:
            self.error, self.partially_loaded = e, self.partially_loaded or left_state_invalid(e)
            cause = e.__cause__ if isinstance(e, RankFailed) else None
            if isinstance(cause, StoreError) and not isinstance(cause, Denied | Unavailable):
                raise cause from e
            raise
        self.error, self.partially_loaded = None, False

    def load_from_tier(self, instruction: ResumeInstruction) -> SnapshotReader:
        """Load a state of a tier, and return it. Raises the same errors."""
        snapshot = self.open_in_tier(instruction)
        self.first_from_tier = self.first_from_tier or (snapshot, instruction.tier)
        self.load(snapshot)
        return snapshot

    def open_in_tier(self, instruction: ResumeInstruction) -> SnapshotReader:
        """Return a state of a tier, of which nothing is read yet."""
        tier, folder = instruction.tier or "memory", instruction.version or ""
        return SnapshotReader(
            self.tiers.locate(tier, folder, instruction.sources), None, instruction.digest
        )


def make_resume_point(
    snapshot: SnapshotReader,
    branch: int,
    skipped: Sequence[Skipped],
) -> ResumePoint:
    note = snapshot.metadata.get("note")
    origin = note.get("started_from") if isinstance(note, dict) else None
    return ResumePoint(
        snapshot,
        snapshot.version.step,
        branch=branch,
        note={} if origin is None else {"started_from": origin},
        training_metadata=read_training_metadata(snapshot),
        skipped=skipped,
        durable=snapshot,
        sessions=read_sessions(snapshot),
    )


def left_state_invalid(error: BaseException | None) -> bool:
    """Return True if an error of a resume, or one of its causes, may have left the state invalid.

    Errors other than ``LimpetError`` count as such, because they may occur at any point.
    """
    depth = 0
    while error is not None and depth < 20:
        if not isinstance(error, LimpetError) or error.is_state_invalid:
            return True
        error, depth = error.__cause__, depth + 1
    return False
