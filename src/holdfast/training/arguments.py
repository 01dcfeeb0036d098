"""What a Checkpointer refuses at once, since a person would find it out only much later."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.engine.snapshot.location import describe_run
from holdfast.errors import HoldfastError, NotFound, PlanError
from holdfast.format.names import MANIFEST, parse_version, split_address
from holdfast.run.policy import KeepPolicy, SavePolicy, StopWhen
from holdfast.run.run import Run
from holdfast.text import with_article


def check_arguments(state: object, save: object, keep: object, stop: object) -> None:
    """Raise ``HoldfastError`` for an argument of a kind that cannot be meant."""
    for name, given, good, expected in (
        ("state", state, type(state) is dict, 'a dict such as {"model": model}'),
        ("save", save, isinstance(save, SavePolicy), "a save policy such as EverySteps(500)"),
        ("keep", keep, isinstance(keep, KeepPolicy), "a keep policy such as KeepLast(3)"),
        ("stop", stop, isinstance(stop, StopWhen | None), 'StopWhen("val_loss") or None'),
    ):
        _require(name, given, good, expected)


def check_choices(
    busy: object, on_error: object, full_every: object, incremental: object, overlap: object
) -> dict[str, str]:
    """The choices in words. Raises ``HoldfastError`` for one that there is not."""
    whole = full_every is None or (type(full_every) is int and full_every >= 1)
    chosen = {}
    for name, given, good, expected in (
        ("busy", busy, busy in ("wait", "skip"), '"wait" or "skip"'),
        ("on_error", on_error, on_error in ("raise", "warn"), '"raise" or "warn"'),
        ("full_every", full_every, whole, "a number of versions, 1 or more, or None"),
        ("incremental", incremental, type(incremental) is bool, "True or False"),
        ("overlap", overlap, type(overlap) is bool, "True or False"),
    ):
        _require(name, given, good, expected)
        chosen[name] = stable_repr(given)
    return chosen


def _require(name: str, given: object, valid: bool, expected: str) -> None:
    if not valid:
        found = repr(given)
        raise HoldfastError(
            f"{name}= cannot be that",
            expected=expected,
            found=found if len(found) < 80 else with_article(type(given).__name__),
        )


def stable_repr(given: object) -> str:
    """An argument as another rank can tell whether it has the same."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(given))[:500]


def check_ranks_agree(arguments_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Raise ``PlanError`` unless all ranks tell the same: they would not save at the same step."""
    first = arguments_by_rank[0]
    for name, mine in first.items():
        other = next(
            (r for r, theirs in enumerate(arguments_by_rank) if theirs.get(name) != mine), None
        )
        if other is not None:
            raise PlanError(
                "The Checkpointers of the ranks are not alike",
                expected=f"{name}={mine} on all ranks, as on rank 0",
                found=f"{name}={arguments_by_rank[other].get(name)} on rank {other}",
                todo="Give all ranks the same; what a clock tells is rank 0's anyway",
                rank=other,
            )


def check_no_copies(state: dict[str, Any]) -> None:
    """Raise ``PlanError`` for what ``state_dict()`` of an optimizer or a scheduler has returned: a
    copy made once, which training does not change, and which nothing is loaded into."""
    for key, value in _walk_dicts(state, ""):
        kind = None
        if value.keys() == {"state", "param_groups"}:
            kind = "an optimizer"
        elif value.keys() >= {"last_epoch", "_step_count"}:
            kind = "a scheduler"
        if kind is not None:
            raise PlanError(
                f"{key} in the state is the state_dict() of {kind}, a copy made once",
                expected=f"{kind} itself, so that each save sees it as it is then",
                found="a dict that training does not change",
                todo='Write {"optimizer": optimizer}, without .state_dict()',
                leaf=key,
            )


def _walk_dicts(
    value: dict[Any, Any], path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """The dicts in a state with their keys, each object once."""
    seen = {id(value)} if seen is None else seen
    for name, member in value.items():
        if type(member) is dict and id(member) not in seen:
            seen.add(id(member))
            key = f"{path}/{name}" if path else str(name)
            yield key, member
            yield from _walk_dicts(member, key, seen)


def check_not_version(run: Run) -> None:
    """Raise ``HoldfastError`` if the place of a run is called like a version."""
    if parse_version(run.url.rstrip("/").rpartition("/")[2]) is not None:
        raise _not_a_run_error(run, "the folder of a version")


def check_not_snapshot(run: Run) -> None:
    """Raise ``HoldfastError`` if there is a snapshot in the place of a run that has no version, or
    if it is the address of one in another run."""
    other, address = split_address(run.url)
    if address is not None and Run(other).listing().versions:
        raise _not_a_run_error(run, "the address of a version")
    try:
        run.store.stat(MANIFEST)
    except NotFound:
        return
    raise _not_a_run_error(run, "a snapshot")


def _not_a_run_error(run: Run, found: str) -> HoldfastError:
    return HoldfastError(
        f"{run.url} is no run",
        expected="the folder that holds, or will hold, the versions of one training",
        found=found,
        todo='Name the run itself; resume(at=...) goes back in it, and resume(start="RUN@STEP")'
        " begins another one",
    )


def check_run_empty(run: Run) -> None:
    """Raise ``HoldfastError`` if there are versions: to train afresh would mix two trainings."""
    versions = run.listing().versions
    if not versions:
        check_not_snapshot(run)
    else:
        raise HoldfastError(
            f"{run.url} holds versions of an earlier training",
            expected="an empty run, or a call of resume() before the first step",
            found=f"{describe_run(versions)}, the newest {versions[-1]}",
            todo="Call ckpt.resume() to go on from it, or save to another folder",
        )


def not_entered_error() -> HoldfastError:
    """What is wrong with ``OnException`` where nothing tells that the training raised."""
    return HoldfastError(
        "OnException can never fire: the Checkpointer is not used as a context",
        expected="with holdfast.Checkpointer(...) as ckpt: and the training in that block",
        found="a step outside of it",
        todo="Write it so, or leave OnException() out, which costs a copy at every step",
    )
