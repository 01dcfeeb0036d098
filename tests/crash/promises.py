"""The eight promises of docs/format.md, as far as the files of a run can show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import holdfast
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import NotFound
from holdfast.format import names
from holdfast.format.names import Version
from holdfast.run.policy import EverySteps
from holdfast.run.run import Run
from holdfast.run.sweep import MOMENT
from holdfast.storage.store import Store
from tests.trainings import after, fresh, same, train_step

State = dict[str, Any]


def check_promises(
    store: Store,
    committed: Iterable[int] = (),
    *,
    expected: Callable[[int], State] = after,
    pins_died: bool = True,
) -> list[int]:
    """Check all promises on what a stopped training (of ``trainings.py``) has left, and return
    the steps that were committed on the line that training is on.

    ``committed``: steps whose save had returned and which no retention may have deleted.
    ``expected(step)``: the state that a version must hold. ``pins_died``: take every pin for one
    of a dead process, as after a crash; False asks the system. The run is gone on with and swept.
    """
    run = Run(store)
    found = whole(run, expected)
    line = run.line()
    steps = [version.step for version in line]
    assert set(committed) <= set(steps), (committed, steps)
    nothing_else_counts(run, set(found), line)
    newest = steps[-1] if steps else 0
    goes_on(store, newest, expected)
    left = whole(run, expected)
    assert {v: left[v] for v in found} == found, "a version was modified"
    assert set(left) - set(found) == {Version(newest + 1, run.branch())}
    with dead_pins() if pins_died else no_change():
        # small files on their way are left alone for a moment
        swept = run.sweep(grace=0, now=time.time() + MOMENT + 1)
    assert swept.kept == []
    only_what_manifests_name(run)
    assert whole(run, expected) == left
    return steps


def whole(run: Run, expected: Callable[[int], State]) -> dict[Version, str]:
    """Promises 1, 2, 3, 7: every manifest is sound, and so is every byte of what it refers to.
    The digests of the manifests."""
    digests = {}
    for version in run.listing().versions:
        snapshot = run.open(version)
        snapshot.check_files()
        report = snapshot.verify()
        assert report.ok, report.problems
        for name in files_of(snapshot):
            assert names.attempt_of(name) == snapshot.manifest.attempt
        assert [tuple(leaf.shape) for i in snapshot.indexes() for leaf in i.leaves]
        parent = snapshot.manifest.parent
        if parent is not None:
            assert parent.version in map(str, digests) or not holds(run, parent.version)
        state = fresh()
        load_snapshot(snapshot, state)
        assert same(state, expected(version.step)), f"{version} holds another state"
        digests[version] = snapshot.digest
    return digests


def holds(run: Run, folder: str) -> bool:
    return any(s.key == f"{folder}/{names.MANIFEST}" for s in run.store.list(folder))


def files_of(snapshot: Snapshot) -> list[str]:
    return [name for s in snapshot.manifest.shards for name in (s.name, s.index.name)]


def nothing_else_counts(run: Run, versions: set[Version], line: list[Version]) -> None:
    """Promises 2 and 5: without a manifest there is no version, and off the line none counts."""
    listing = run.listing()
    for version in set(listing.folders) - versions:
        with pytest.raises(NotFound):
            run.open(version)
    assert set(line) <= versions
    assert [s.version for s in run.snapshots()] == line
    latest = run.latest()
    assert (latest and latest.version) == (line[-1] if line else None)


def goes_on(store: Store, newest: int, expected: Callable[[int], State]) -> None:
    """Promise 5: resume takes the newest, and the step after it can be saved, whatever an
    earlier attempt has left in its folder."""
    state = fresh()
    with holdfast.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        resumed = ckpt.resume()
        assert (resumed.step if resumed else 0) == newest
        assert same(state, expected(newest))
        ckpt.step({"loss": train_step(state)})
        saved = ckpt.wait()
    assert saved is not None
    assert saved.step == newest + 1


def only_what_manifests_name(run: Run) -> None:
    """Promise 6: what a sweep leaves is named."""
    listing = run.listing()
    named = {names.branch_name(number) for number in listing.branches}
    for version in listing.versions:
        snapshot = run.open(version)
        named |= {snapshot.place.key(name) for name in (*files_of(snapshot), names.MANIFEST)}
    assert {s.key for s in run.store.list("")} == named
    assert list(run.store.partials("")) == []


@contextmanager
def dead_pins() -> Iterator[None]:
    """Every pin is one of a process that has died."""
    with mock.patch.object(pins, "alive", return_value=False):
        yield


@contextmanager
def no_change() -> Iterator[None]:
    yield
