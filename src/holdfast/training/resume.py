"""Where a training goes on: from its own run, or for the first time from a version of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.distributed.group import by_first, current_group
from holdfast.engine.loading.binder import STRICT, Leniency
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
from holdfast.run.catalog import training_of
from holdfast.run.run import Run
from holdfast.training.arguments import refuse_snapshot

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Found:
    """The version that was loaded, and how training goes on from it.

    ``own``: it is of the run itself; ``note``: what the versions to come say of where it came
    from; ``training``: what it noted for the services; ``skipped``: newer versions that are
    damaged, in words.
    """

    snapshot: Snapshot
    step: int
    own: bool = True
    branch: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()


class Step(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: to load a version (``version`` and ``digest``), or how the
    training goes on (``done``): from no version, if there is none."""

    done: bool
    version: str | None = None
    digest: str = ""
    branch: int = 0


def go_on(
    run: Run,
    state: dict[str, Any],
    at: int | None,
    branch: int | None,
    claim: Callable[[], object],
    share: bool = False,
) -> Found | None:
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
    meeting = current_group().meet(f"the resume of {run.url}")
    loads = Loads(state, share)
    try:
        with meeting:
            if meeting.rank == 0:
                return _lead(run, loads, meeting, at, branch, claim)
            return _follow(run, loads, meeting)
    except HoldfastError as e:
        if loads.spoiled and not e.fields.get("live_state"):
            raise e.told("The live state is not valid", live_state="not valid") from e
        raise
    finally:
        meeting.close()


class Loads:
    """Loads versions into a state, until one is intact for all ranks. ``error``: why the last was
    not; ``spoiled``: whether the state is overwritten in part since."""

    def __init__(self, state: dict[str, Any], share: bool = False) -> None:
        self.state = state
        self.share = share
        self.error: HoldfastError | None = None
        self.spoiled = False

    def load(self, snapshot: Snapshot) -> None:
        """Raises on all ranks what is wrong with the version for one of them; ``RankFailed`` where
        that is its store, and the version may be intact."""
        try:
            load_snapshot(snapshot, self.state, share=self.share)
        except HoldfastError as e:
            self.error, self.spoiled = e, self.spoiled or overwritten(e)
            cause = e.__cause__ if isinstance(e, RankFailed) else None
            if isinstance(cause, StoreError) and not isinstance(cause, Denied | Unavailable):
                raise cause from e
            raise
        self.error, self.spoiled = None, False


def _lead(
    run: Run,
    loads: Loads,
    meeting: Meeting,
    at: int | None,
    branch: int | None,
    claim: Callable[[], object],
) -> Found | None:
    def load(snapshot: Snapshot) -> None:
        meeting.share(Step(False, str(snapshot.version), snapshot.digest), Step)
        loads.load(snapshot)

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
            f" folder, and {_start(run.url, loads.state, e)}",
            **e.fields,
        ) from e
    if snapshot is None:
        refuse_snapshot(run)
        meeting.share(Step(True), Step)
        return None
    version = snapshot.version
    listing = run.listing()
    if version in run.line(listing)[-1:]:
        number = run.branch(listing)
    else:
        reason = f"{len(skipped)} newer damaged" if skipped else "on request"
        claim()  # whoever does not write to the run must not move its line
        number = run.leave_from(snapshot, version, reason)
    meeting.share(Step(True, str(version), snapshot.digest, number), Step)
    return _found(snapshot, number, [_told(v, e) for v, e in skipped])


def _follow(run: Run, loads: Loads, meeting: Meeting) -> Found | None:
    snapshot = None
    while True:
        step = meeting.share(None, Step)
        version = None if step.version is None else parse_version(step.version)
        if version is None:
            return None
        if step.done and snapshot is not None:
            if loads.error is not None:
                raise loads.error
            return _found(snapshot, step.branch, [])
        snapshot = Snapshot(run.place(version), None, step.digest)
        try:
            loads.load(snapshot)  # and its manifest: nothing may fail once all are done
        except (Denied, Unavailable):
            raise
        except (FormatError, StoreError):
            continue  # rank 0 raises it as well, and goes back or ends


def _found(snapshot: Snapshot, branch: int, skipped: Sequence[str]) -> Found:
    return Found(
        snapshot,
        snapshot.version.step,
        branch=branch,
        note=_origin(snapshot.metadata.get("note")),
        training=training_of(snapshot),
        skipped=skipped,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """How much of another run's version is taken."""

    keys: str | Sequence[str] | None
    leniency: Leniency

    @property
    def whole(self) -> bool:
        return self.keys is None and self.leniency == STRICT

    @classmethod
    def of(
        cls,
        start: str | None,
        keys: str | Sequence[str] | None,
        missing: Literal["error", "keep"],
        unexpected: Literal["error", "ignore"],
        rename: Mapping[str, str] | None,
        back: bool,
    ) -> Part:
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
        if start is not None and back:
            raise HoldfastError(
                "A run cannot both begin and go back",
                expected="start= for an empty run, or at= and branch= for one that has versions",
                found=f"{start=} and one of them",
                todo='Give the step in the address: resume(start="RUN@120")',
            )
        if start is None and not part.whole:
            raise HoldfastError(
                "A run goes on from its own versions whole",
                expected="keys=, missing=, unexpected= or rename= together with start=",
                found="no start=",
                todo="Give start=, or load the snapshot by holdfast.load",
            )
        return part


def begin_from(start: str, state: dict[str, Any], part: Part, share: bool = False) -> Found:
    """Load a version of another run, or a part of it, into ``state``. Without a Progress
    steps go on only where all of it was taken; else they begin at 0. Raises as ``load`` does."""
    snapshot = _opened(start)
    load_snapshot(snapshot, state, part.keys, None, part.leniency, share)
    note = {"started_from": {"url": snapshot.url, "digest": snapshot.digest}}
    if not part.whole:
        return Found(snapshot, 0, own=False, note=note)
    # of what the services noted only the patience is of the model; goodput is of the run
    training = training_of(snapshot)
    stop = {"stop": training["stop"]} if "stop" in training else {}
    return Found(snapshot, snapshot.step or 0, own=False, note=note, training=stop)


def _opened(start: str) -> Snapshot:
    """The snapshot at an address, the same one on all ranks."""

    def choose() -> Step:
        snapshot = open_version(start)
        return Step(True, snapshot.url, snapshot.digest)

    step = by_first(current_group(), f"the start from {os.fspath(start)}", choose, Step)
    return Snapshot(locate(step.version or ""), None, step.digest)


def _start(url: str, state: dict[str, Any], error: PlanError) -> str:
    """The call by which a new run takes what fits of the old one's state into the changed one."""
    members = dict(zip(child_keys(list(state), ""), state.values(), strict=True))
    misfits = {_top(key) for key in error.fields["misfits"]}
    out = set(misfits)
    if any(_has(members.get(m), "parameters", "param_groups", "requires_grad") for m in misfits):
        # an optimizer's slots are those of the old parameters, a scheduler's rates those of both
        out |= {m for m, value in members.items() if _has(value, "param_groups", "optimizer")}
    chosen = [m for m in members if m not in out]
    given, more = [f'start="{url}@latest"'], ""
    if misfits:
        listed = ", ".join(f'"{m}"' for m in chosen) if len(chosen) <= _LISTED else ""
        given.append(f"keys=[{listed or '...'}]")
        parts = sorted(m for m in misfits if not _has(members.get(m), "param_groups"))[:_LISTED]
        more = f". In keys= name also what fits in {', '.join(parts)}" if parts else ""
    for differs, choice in (("missing", "keep"), ("unexpected", "ignore")):
        if any(not misfits or _top(key) in chosen for key in error.fields[differs]):
            given.append(f'{differs}="{choice}"')
    return f"resume({', '.join(given)}){more}"


def _top(key: str) -> str:
    return key.partition("/")[0]


def _has(value: Any, *attributes: str) -> bool:
    """Whether a value, or one in its dicts and lists, has one of the attributes."""
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return any(_has(v, *attributes) for v in inner)
    return any(hasattr(value, a) for a in attributes)


def overwritten(error: BaseException | None) -> bool:
    """Whether an error of a resume, or what caused it, has left the live state half loaded."""
    seen = 0
    while error is not None and seen < 20:
        if not isinstance(error, HoldfastError) or error.fields.get("live_state"):
            return True
        error, seen = error.__cause__, seen + 1
    return False


def _origin(note: Any) -> Mapping[str, Any]:
    """The part of a note that all later versions keep."""
    if isinstance(note, dict) and "started_from" in note:
        return {"started_from": note["started_from"]}
    return {}


def _told(version: Version, error: HoldfastError) -> str:
    told = f"{version} is skipped. {error.what.rstrip('.')}."
    if error.expected is not None:
        told += f" Expected {error.expected}, found {error.found}."
    return told
