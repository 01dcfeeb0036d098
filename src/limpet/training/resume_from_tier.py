"""Resuming from a state in memory, or on the local disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from msgspec import structs

from limpet import events
from limpet.errors import (
    FormatError,
    LimpetError,
    NoSnapshot,
    NotTrusted,
    RankFailed,
    StoreError,
)
from limpet.format.manifest import Parent
from limpet.format.names import Version, parse_version
from limpet.ranks.collective import Collective
from limpet.restarts.ladder import Ladder
from limpet.run.evaluations.trust import NOT_DISTRUSTED, Trust
from limpet.run.lineage import start_branch
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.tiers.inventory import WHERE, Candidate, CurrentLine, Sources
from limpet.training.resume_point import (
    ResumeInstruction,
    ResumePoint,
    Skipped,
    StateLoader,
    count_skipped,
    make_resume_point,
)


def find_leftovers(
    line: CurrentLine, loader: StateLoader, found: Sequence[Candidate]
) -> list[Candidate]:
    """Return the versions on local disks that the run lacks, oldest first: an earlier training
    ended before they were promoted."""
    leftovers = []
    for candidate in reversed(found):
        is_whole = candidate.tier == "local" and candidate.is_whole
        if is_whole and line.is_newer(candidate.version):
            with suppress(FormatError, StoreError):  # it is skipped below, with a warning
                if line.is_continued_by(candidate, loader.open_in_tier(_instruct(candidate, 0))):
                    leftovers.append(candidate)
    return leftovers


def _instruct(candidate: Candidate, branch: int) -> ResumeInstruction:
    return ResumeInstruction(
        False, candidate.folder, candidate.digest, branch, candidate.tier, candidate.sources
    )


def leave_out_untrusted(
    run: Run, line: CurrentLine, loader: StateLoader, found: Sequence[Candidate], trust: Trust
) -> tuple[list[Candidate], list[Skipped]]:
    """Return the states of tiers that ``trust`` accepts, and those newer ones that it does not.

    Verdicts are about versions of the run. So the state of the newest version is trusted as that
    version is. No verdict can name a newer state: it is as bad as the version from which it
    continues, and it is never attested. Raises ``NoSnapshot`` if only attested states are accepted,
    and the run has no version: training would begin again, and delete the states.
    """
    accepted, skipped = list[Candidate](), list[Skipped]()
    distrust = line.find_distrust(NOT_DISTRUSTED)
    of_newest = line.find_distrust(trust)
    of_newer: NotTrusted | None = None
    if distrust is not None:
        of_newer = NotTrusted(f"It continues from {line.newest}: {distrust.what}")
    elif trust != NOT_DISTRUSTED:
        of_newer = NotTrusted("It is no version of the run, so it has no verdict")
    for candidate in found:
        is_newer = line.is_newer(candidate.version)
        reason = of_newer if is_newer else of_newest
        if reason is None or not (is_newer or candidate.version == line.newest):
            accepted.append(candidate)
        elif is_newer and _continues(line, loader, candidate):
            skipped.append(Skipped(f"{candidate.folder} {WHERE[candidate.tier]}", reason))
            events.emit("skipped", version=candidate.folder, error=reason)
    if skipped and line.newest is None:
        raise NoSnapshot(
            f"{run.url} has no attested version",
            expected="an attested version",
            found=f"no version, and {skipped[0].name}",
            todo="Call resume() without trust= to continue from that state",
            skipped=tuple(s.name for s in skipped),
        )
    return accepted, skipped


def _continues(line: CurrentLine, loader: StateLoader, candidate: Candidate) -> bool:
    """Return True if a newer state is one of this lineage, or damaged, so that nobody knows."""
    with suppress(FormatError, StoreError):
        return line.is_continued_by(candidate, loader.open_in_tier(_instruct(candidate, 0)))
    return True


def resume_from_tier(
    run: Run,
    line: CurrentLine,
    loader: StateLoader,
    collective: Collective,
    found: Sequence[Candidate],
    acquire_lock: Callable[[], object],
    ladder: Ladder,
    left_out: Sequence[Skipped],
) -> tuple[ResumePoint | None, list[Skipped]]:
    """Load the newest state of a tier that continues the current lineage, and return it.

    Also return the newer ones that are skipped, with those that were ``left_out``. None: the
    durable version is newer, or none is intact.
    """
    problems: list[Skipped] = [*left_out]
    damaged: dict[Version, LimpetError] = {}
    for candidate in found:
        is_newest = candidate.version == line.newest
        if not (is_newest or line.is_newer(candidate.version)):
            continue
        instruction = _instruct(candidate, line.branch)
        try:
            captured = loader.open_in_tier(instruction)
            # a state of another history is no problem, damaged or not
            belongs = line.is_same if is_newest else line.is_continued_by
            if candidate.digest and not belongs(candidate, captured):
                continue
            candidate.check_whole(captured)
            collective.broadcast(instruction, ResumeInstruction)
            snapshot = loader.load_from_tier(instruction)
        except (FormatError, StoreError, RankFailed) as e:
            if is_newest:  # the run has it, too
                events.emit("skipped", version=candidate.folder, error=e)
                continue
            problems.append(Skipped(f"{candidate.folder} {WHERE[candidate.tier]}", e))
            damaged[candidate.version] = e
            continue
        damaged.pop(candidate.version, None)  # another tier has had the state of this step
        durable = line.durable
        reference = None if durable is None else Parent(str(line.newest), durable.digest)
        number = line.branch
        if damaged or left_out:  # a newer state that was lost must not come back
            acquire_lock()
        ladder.record(snapshot, None if is_newest else candidate.tier)
        if damaged or left_out:
            lost = [*left_out, *(Skipped(str(v), e) for v, e in damaged.items())]
            reason_of_branch = count_skipped(lost)
            number = start_branch(run.catalog, snapshot, candidate.version, reason_of_branch)
        done = structs.replace(
            instruction, done=True, branch=number, sources=Sources(), durable=reference
        )
        collective.broadcast(done, ResumeInstruction)
        return continue_from_tier(run, snapshot, done, problems), problems
    return None, problems


def continue_from_tier(
    run: Run, snapshot: SnapshotReader, done: ResumeInstruction, skipped: Sequence[Skipped]
) -> ResumePoint:
    """Return how training continues from a state of a tier, which later versions name."""
    point = make_resume_point(snapshot, done.branch, skipped)
    version = None if done.durable is None else parse_version(done.durable.version)
    durable = None
    if done.durable is not None and version is not None:
        durable = SnapshotReader(run.location(version), None, done.durable.digest)
    origin = {"tier": done.tier, "version": done.version, "digest": done.digest}
    note = {**point.note, "resumed_from_tier": origin}
    return replace(point, note=note, durable=durable, tier=done.tier)
