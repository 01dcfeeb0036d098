"""Where a training goes on: from its own run, or for the first time from a version of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.group import broadcast_from_first, current_group
from holdfast.engine.loading.binding import STRICT, Leniency
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.location import locate
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import (
    Denied,
    FormatError,
    HoldfastError,
    PlanError,
    RankFailed,
    StoreError,
    Unavailable,
)
from holdfast.format.names import Version, parse_version
from holdfast.format.tree import child_keys
from holdfast.run.address import open_version
from holdfast.run.catalog import read_training_metadata
from holdfast.run.run import Run
from holdfast.training.arguments import check_not_snapshot

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The version that was loaded, and how training goes on from it.

    ``own``: it is of the run itself; ``note``: what the versions to come say of where it came
    from; ``training``: what it noted for the services; ``skipped``: newer versions that are
    damaged, in words.
    """

    snapshot: Snapshot
    step: int
    from_own_run: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training_metadata: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()


class ResumeInstruction(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: to load a version (``version`` and ``digest``), or how the
    training goes on (``done``): from no version, if there is none."""

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0


def resume_run(
    run: Run,
    state: dict[str, Any],
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
    share: bool = False,
) -> ResumePoint | None:
    """Load the newest intact version of a run into ``state``; None if the run is empty.

    ``at`` and ``branch`` as for ``Run.newest``. A branch is begun, durably, unless it is the
    newest version of all. Raises as ``Run.newest`` does.

    Rank 0 chooses: all ranks load what it has found, and go back together, if it is damaged for
    one of them.
    """
    if not all(
        n is None or (hasattr(n, "__index__") and type(n) is not bool) for n in (at, branch)
    ):
        raise HoldfastError(
            "resume() cannot go there",
            expected="whole numbers",
            found=f"{at=}, {branch=}",
            todo="resume() goes on from the newest version, resume(at=120) from that of step 120;"
            ' resume(start="RUN@120") begins with a version of another run',
        )
    meeting = current_group().collective(f"the resume of {run.url}")
    loads = StateLoader(state, share)
    try:
        with meeting:
            if meeting.rank == 0:
                return _coordinate(run, loads, meeting, at, branch, acquire_lock)
            return _follow_coordinator(run, loads, meeting)
    except HoldfastError as e:
        if loads.partially_loaded and not e.fields.get("live_state"):
            raise e.with_advice("The live state is not valid", live_state="not valid") from e
        raise
    finally:
        meeting.close()


class StateLoader:
    """Loads versions into a state, until one is intact for all ranks. ``error``: why the last was
    not; ``spoiled``: whether the state is overwritten in part since."""

    def __init__(self, state: dict[str, Any], share: bool = False) -> None:
        self.state = state
        self.share = share
        self.error: HoldfastError | None = None
        self.partially_loaded = False

    def load(self, snapshot: Snapshot) -> None:
        """Raises on all ranks what is wrong with the version for one of them; ``RankFailed`` where
        that is its store, and the version may be intact."""
        try:
            load_snapshot(snapshot, self.state, share=self.share)
        except HoldfastError as e:
            self.error, self.partially_loaded = e, self.partially_loaded or left_state_invalid(e)
            cause = e.__cause__ if isinstance(e, RankFailed) else None
            if isinstance(cause, StoreError) and not isinstance(cause, Denied | Unavailable):
                raise cause from e
            raise
        self.error, self.partially_loaded = None, False


def _coordinate(
    run: Run,
    loader: StateLoader,
    collective: Collective,
    at: int | None,
    branch: int | None,
    acquire_lock: Callable[[], object],
) -> ResumePoint | None:
    def load(snapshot: Snapshot) -> None:
        collective.broadcast(
            ResumeInstruction(False, str(snapshot.version), snapshot.digest), ResumeInstruction
        )
        loader.load(snapshot)

    try:
        snapshot, skipped = run.newest(load, at, branch)
    except PlanError as e:
        if "missing" not in e.fields:
            raise  # of a part of the state that knows better what to do
        raise type(e)(
            e.what,
            expected=e.expected,
            found=e.found,
            todo="Make the state as it was. Or go on with the changed one in a new run: another"
            f" folder, and {_suggest_call(run.url, loader.state, e)}",
            **e.fields,
        ) from e
    if snapshot is None:
        check_not_snapshot(run)
        collective.broadcast(ResumeInstruction(True), ResumeInstruction)
        return None
    version = snapshot.version
    listing = run.listing()
    if version in run.line(listing)[-1:]:
        number = run.branch(listing)
    else:
        reason = f"{len(skipped)} newer damaged" if skipped else "on request"
        acquire_lock()  # whoever does not write to the run must not move its line
        number = run.leave_from(snapshot, version, reason)
    collective.broadcast(
        ResumeInstruction(True, str(version), snapshot.digest, number), ResumeInstruction
    )
    return _make_resume_point(snapshot, number, [_skip_message(v, e) for v, e in skipped])


def _follow_coordinator(
    run: Run, loader: StateLoader, collective: Collective
) -> ResumePoint | None:
    snapshot = None
    while True:
        step = collective.broadcast(None, ResumeInstruction)
        version = None if step.version is None else parse_version(step.version)
        if version is None:
            return None
        if step.done and snapshot is not None:
            if loader.error is not None:
                raise loader.error
            return _make_resume_point(snapshot, step.branch, [])
        snapshot = Snapshot(run.location(version), None, step.digest)
        try:
            loader.load(snapshot)  # and its manifest: nothing may fail once all are done
        except (Denied, Unavailable):
            raise
        except (FormatError, StoreError):
            continue  # rank 0 raises it as well, and goes back or ends


def _make_resume_point(snapshot: Snapshot, branch: int, skipped: Sequence[str]) -> ResumePoint:
    return ResumePoint(
        snapshot,
        snapshot.version.step,
        branch=branch,
        note=_inherited_note(snapshot.metadata.get("note")),
        training_metadata=read_training_metadata(snapshot),
        skipped=skipped,
    )


@dataclass(frozen=True, slots=True)
class StartSelection:
    """How much of another run's version is taken."""

    keys: str | Sequence[str] | None
    leniency: Leniency

    @property
    def is_complete(self) -> bool:
        return self.keys is None and self.leniency == STRICT

    @classmethod
    def from_arguments(
        cls,
        start: str | None,
        keys: str | Sequence[str] | None,
        missing: Literal["error", "keep"],
        unexpected: Literal["error", "ignore"],
        rename: Mapping[str, str] | None,
        goes_back: bool,
    ) -> StartSelection:
        """``back``: whether a version of the run itself is asked for. Raises ``HoldfastError``
        for that and a ``start``, and where there is no ``start`` of which to take a part."""
        if start is not None and not isinstance(start, str | os.PathLike):
            raise HoldfastError(
                "A run cannot begin with that",
                expected='an address: "RUN@120", "RUN@latest" or that of a snapshot',
                found=f"{start=}",
                todo="resume(at=120) goes back to step 120 of this run itself",
            )
        part = cls(keys, Leniency(missing, unexpected, False, rename or {}))
        if start is not None and goes_back:
            raise HoldfastError(
                "A run cannot both begin and go back",
                expected="start= for an empty run, or at= and branch= for one that has versions",
                found=f"{start=} and one of them",
                todo='Give the step in the address: resume(start="RUN@120")',
            )
        if start is None and not part.is_complete:
            raise HoldfastError(
                "A run goes on from its own versions whole",
                expected="keys=, missing=, unexpected= or rename= together with start=",
                found="no start=",
                todo="Give start=, or load the snapshot by holdfast.load",
            )
        return part


def start_from(
    start: str, state: dict[str, Any], selection: StartSelection, share: bool = False
) -> ResumePoint:
    """Load a version of another run, or a part of it, into ``state``. Without a Progress
    steps go on only where all of it was taken; else they begin at 0. Raises as ``load`` does."""
    snapshot = _open_on_all_ranks(start)
    load_snapshot(snapshot, state, selection.keys, None, selection.leniency, share)
    note = {"started_from": {"url": snapshot.url, "digest": snapshot.digest}}
    if not selection.is_complete:
        return ResumePoint(snapshot, 0, from_own_run=False, note=note)
    # of what the services noted only the patience is of the model; goodput is of the run
    training = read_training_metadata(snapshot)
    stop = {"stop": training["stop"]} if "stop" in training else {}
    return ResumePoint(
        snapshot, snapshot.step or 0, from_own_run=False, note=note, training_metadata=stop
    )


def _open_on_all_ranks(start: str) -> Snapshot:
    """The snapshot at an address, the same one on all ranks."""

    def choose() -> ResumeInstruction:
        snapshot = open_version(start)
        return ResumeInstruction(True, snapshot.url, snapshot.digest)

    step = broadcast_from_first(
        current_group(), f"the start from {os.fspath(start)}", choose, ResumeInstruction
    )
    return Snapshot(locate(step.version or ""), None, step.digest)


def _suggest_call(url: str, state: dict[str, Any], error: PlanError) -> str:
    """The call by which a new run takes what fits of the old one's state into the changed one."""
    members = dict(zip(child_keys(list(state), ""), state.values(), strict=True))
    misfits = {_top_key(key) for key in error.fields["misfits"]}
    out = set(misfits)
    if any(
        _has_attribute(members.get(m), "parameters", "param_groups", "requires_grad")
        for m in misfits
    ):
        # an optimizer's slots are those of the old parameters, a scheduler's rates those of both
        out |= {
            m for m, value in members.items() if _has_attribute(value, "param_groups", "optimizer")
        }
    chosen = [m for m in members if m not in out]
    given, more = [f'start="{url}@latest"'], ""
    if misfits:
        listed = ", ".join(f'"{m}"' for m in chosen) if len(chosen) <= _MAX_LISTED else ""
        given.append(f"keys=[{listed or '...'}]")
        parts = sorted(m for m in misfits if not _has_attribute(members.get(m), "param_groups"))[
            :_MAX_LISTED
        ]
        more = f". In keys= name also what fits in {', '.join(parts)}" if parts else ""
    for differs, choice in (("missing", "keep"), ("unexpected", "ignore")):
        if any(not misfits or _top_key(key) in chosen for key in error.fields[differs]):
            given.append(f'{differs}="{choice}"')
    return f"resume({', '.join(given)}){more}"


def _top_key(key: str) -> str:
    return key.partition("/")[0]


def _has_attribute(value: Any, *attributes: str) -> bool:
    """Whether a value, or one in its dicts and lists, has one of the attributes."""
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return any(_has_attribute(v, *attributes) for v in inner)
    return any(hasattr(value, a) for a in attributes)


def left_state_invalid(error: BaseException | None) -> bool:
    """Whether an error of a resume, or what caused it, has left the live state half loaded."""
    seen = 0
    while error is not None and seen < 20:
        if not isinstance(error, HoldfastError) or error.fields.get("live_state"):
            return True
        error, seen = error.__cause__, seen + 1
    return False


def _inherited_note(note: Any) -> Mapping[str, Any]:
    """The part of a note that all later versions keep."""
    if isinstance(note, dict) and "started_from" in note:
        return {"started_from": note["started_from"]}
    return {}


def _skip_message(version: Version, error: HoldfastError) -> str:
    told = f"{version} is skipped. {error.what.rstrip('.')}."
    if error.expected is not None:
        told += f" Expected {error.expected}, found {error.found}."
    return told
