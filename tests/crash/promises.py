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
from holdfast.run.sweep import MIN_GRACE
from holdfast.storage.store import Store
from tests.trainings import initial_state, state_after, states_equal, train_step

State = dict[str, Any]


def check_promises(
    store: Store,
    committed: Iterable[int] = (),
    *,
    expected: Callable[[int], State] = state_after,
    assume_dead_pins: bool = True,
) -> list[int]:
    """Check all promises on what a stopped training (of ``trainings.py``) has left, and return
    the steps that were committed on the line that training is on.

    ``committed``: steps whose save had returned and which no retention may have deleted.
    ``expected(step)``: the state that a version must hold. ``pins_died``: take every pin for one
    of a dead process, as after a crash; False asks the system. The run is gone on with and swept.
    """
    run = Run(store)
    found = verify_versions(run, expected)
    line = run.line()
    steps = [version.step for version in line]
    assert set(committed) <= set(steps), (committed, steps)
    check_visible_versions(run, set(found), line)
    newest = steps[-1] if steps else 0
    check_resume(store, newest, expected)
    left = verify_versions(run, expected)
    assert {v: left[v] for v in found} == found, "a version was modified"
    assert set(left) - set(found) == {Version(newest + 1, run.branch())}
    with all_pins_dead() if assume_dead_pins else pins_unchanged():
        # small files on their way are left alone for a moment
        swept = run.sweep(grace=0, now=time.time() + MIN_GRACE + 1)
    assert swept.kept == []
    check_no_orphans(run)
    assert verify_versions(run, expected) == left
    return steps


def verify_versions(run: Run, expected: Callable[[int], State]) -> dict[Version, str]:
    """Promises 1, 2, 3, 7: every manifest is sound, and so is every byte of what it refers to.
    The digests of the manifests."""
    digests = {}
    for version in run.listing().versions:
        snapshot = run.open(version)
        snapshot.check_files()
        report = snapshot.verify()
        assert report.ok, report.problems
        for name in shard_files(snapshot):
            assert names.parse_attempt(name) == snapshot.manifest.attempt
        assert [tuple(leaf.shape) for i in snapshot.indexes() for leaf in i.leaves]
        parent = snapshot.manifest.parent
        if parent is not None:
            assert parent.version in map(str, digests) or not has_manifest(run, parent.version)
        state = initial_state()
        load_snapshot(snapshot, state)
        assert states_equal(state, expected(version.step)), f"{version} holds another state"
        digests[version] = snapshot.digest
    return digests


def has_manifest(run: Run, folder: str) -> bool:
    return any(s.key == f"{folder}/{names.MANIFEST}" for s in run.store.list(folder))


def shard_files(snapshot: Snapshot) -> list[str]:
    return [name for s in snapshot.manifest.shards for name in (s.name, s.index.name)]


def check_visible_versions(run: Run, versions: set[Version], lineage: list[Version]) -> None:
    """Promises 2 and 5: without a manifest there is no version, and off the line none counts."""
    listing = run.listing()
    for version in set(listing.folders) - versions:
        with pytest.raises(NotFound):
            run.open(version)
    assert set(lineage) <= versions
    assert [s.version for s in run.snapshots()] == lineage
    latest = run.latest()
    assert (latest and latest.version) == (lineage[-1] if lineage else None)


def check_resume(store: Store, newest: int, expected: Callable[[int], State]) -> None:
    """Promise 5: resume takes the newest, and the step after it can be saved, whatever an
    earlier attempt has left in its folder."""
    state = initial_state()
    with holdfast.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        resumed = ckpt.resume()
        assert (resumed.step if resumed else 0) == newest
        assert states_equal(state, expected(newest))
        ckpt.step({"loss": train_step(state)})
        saved = ckpt.wait()
    assert saved is not None
    assert saved.step == newest + 1


def check_no_orphans(run: Run) -> None:
    """Promise 6: what a sweep leaves is named."""
    listing = run.listing()
    named = {names.branch_name(number) for number in listing.branches}
    for version in listing.versions:
        snapshot = run.open(version)
        named |= {snapshot.location.key(name) for name in (*shard_files(snapshot), names.MANIFEST)}
    assert {s.key for s in run.store.list("")} == named
    assert list(run.store.partials("")) == []


@contextmanager
def all_pins_dead() -> Iterator[None]:
    """Every pin is one of a process that has died."""
    with mock.patch.object(pins, "is_holder_alive", return_value=False):
        yield


@contextmanager
def pins_unchanged() -> Iterator[None]:
    yield
