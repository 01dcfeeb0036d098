"""Incremental saves with power cuts, with failing calls, and in races with deletion."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import limpet
from limpet.buffers import shared_pool
from limpet.errors import CommitError, LimpetError
from limpet.format import names
from limpet.format.names import MANIFEST, Version
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import FaultFs
from tests import trainings
from tests.crash import promises
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.crash.test_nth_call import faults
from tests.crash.test_power import cut_everywhere
from tests.interleaving import Actor
from tests.unreliable_stores import HookedStore

ROOT = "/a/run"


def initial_state_with_frozen():
    return {**trainings.initial_state(), "frozen": np.arange(750.0)}


def state_after_with_frozen(steps):
    return {**trainings.state_after(steps), "frozen": np.arange(750.0)}


def states_equal_with_frozen(a, b):
    return trainings.states_equal(a, b) and a["frozen"].tobytes() == b["frozen"].tobytes()


@pytest.fixture(autouse=True)
def use_states_with_frozen(monkeypatch, pools):
    """Make ``promises`` use states that have a frozen part."""
    monkeypatch.setattr(promises, "initial_state", initial_state_with_frozen)
    monkeypatch.setattr(promises, "states_equal", states_equal_with_frozen)


def train_incrementally(store, done, steps=5):
    """Train with incremental saves: every third version is full, and an incremental version can be
    the base of another. Retention keeps the two newest versions and the versions they refer to."""
    state = initial_state_with_frozen()
    with limpet.Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(2), incremental=3
    ) as ckpt:
        for step in range(1, steps + 1):
            trainings.train(state, ckpt, step)
            snapshot = ckpt.wait()
            assert snapshot is not None
            done.append(step)


def check_promises(store, committed):
    promises.check_promises(store, committed, expected=state_after_with_frozen)


def test_the_training_saves_incremental_versions():
    store, done = LocalStore(ROOT, fs=CrashFs()), list[int]()
    train_incrementally(store, done)
    run = Run(store)
    chains = {v.step: run.open(v).chain for v in run.listing().versions}
    assert chains == {4: 0, 5: 1}
    assert run.open(Version(5)).bases == {Version(4)}
    check_promises(store, done[-2:])


@pytest.mark.parametrize(
    ("every", "choices"), [(41, 3), pytest.param(11, 5, marks=pytest.mark.slow)]
)
def test_promises_hold_after_a_power_cut(every, choices, pools, opened):
    states = cut_everywhere(
        lambda store, done: train_incrementally(store, done, 4),
        lambda store, done: check_promises(store, done[-1:]),
        pools,
        opened,
        every=every,
        choices=choices,
    )
    assert states > 10


CHECKED = CheckedStates()
"""Most calls leave the same states, whatever the error is."""


@pytest.mark.parametrize(
    ("error", "every"),
    [("EIO", 31), *(pytest.param(e, 13, marks=pytest.mark.slow) for e in ("ENOSPC", "lost"))],
)
def test_promises_hold_if_a_call_fails(error, every, pools):
    with equal_bytes() as restart_ids:
        for fault in list(faults(error))[::every]:
            restart_ids()
            inner = CrashFs()
            fs = FaultFs(inner, fault)
            done: list[int] = []
            try:
                train_incrementally(LocalStore(ROOT, fs=fs), done, 4)
            except LimpetError as e:
                assert ROOT in str(e) or e.fields.get("store"), e  # noqa: PT017
            pools.assert_all_freed()
            if CHECKED.add(inner, done):
                check_promises(LocalStore(ROOT, fs=inner), done[-1:])
            if not fs.fired:
                assert done == [1, 2, 3, 4]
                return
    pytest.fail("a fault fired in every training")


def make_state(step):
    """Return a part that never changes, one that changed at step 1, and one that always changes."""
    changing, changed_once = np.full(200, float(step)), np.arange(300.0)
    changed_once[0] = min(step, 1)
    return {"always": changing, "frozen": np.arange(750.0), "once": changed_once}


def save(store, step, base):
    location = Location(store, f"version_{step}")
    return finish_save(
        begin_save(
            location,
            make_state(step),
            VersionMetadata(step=step),
            shared_pool(),
            stage_now=False,
            base=base,
        )
    )


def make_race():
    """Return a store with versions 0, 1, and 2, and version 1 as the base for version 3.

    Version 1 refers to version 0. Version 2 is full, so retention can delete versions 0 and 1.
    Version 3 will refer to both.
    """
    store = MemoryStore("race")
    base = save(store, 1, save(store, 0, None))
    save(store, 2, None)
    assert base.bases == {Version(0)}
    return store, base


def retain_newest(store):
    Run(store).retain(KeepLast(1))


def check_versions(store, committed):
    """Check that every version is intact, also after a sweep, and that no pins remain."""
    for _ in range(2):
        run = Run(store)
        versions = run.listing().versions
        assert (Version(3) in versions) == (committed is not None)
        assert Version(2) in versions or committed is not None
        for version in versions:
            report = run.open(version).verify()
            assert report.ok, report.problems
            expected = make_state(version.step)
            loaded = load_snapshot(reader_of(run.open(version)))
            assert all(loaded[k].tobytes() == expected[k].tobytes() for k in expected)
        assert run.listing().process_pins == []
        run.sweep(grace=0, now=1e12)


@pytest.mark.parametrize("deleted_by", ["retention", "both at once"])
def test_save_is_intact_or_fails_if_the_base_is_deleted_at_any_call(deleted_by, monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    outcomes = []
    for at in range(1, 1000):
        inner, base = make_race()
        store, calls = HookedStore(inner), list[str]()

        def before(method, key):
            calls.append(key)  # noqa: B023
            if len(calls) == at:  # noqa: B023
                if deleted_by == "retention":
                    retain_newest(inner)  # noqa: B023
                else:  # a deletion that ignores pins
                    for version in ("version_0", "version_1"):
                        for stat in [*inner.list(version)]:  # noqa: B023
                            inner.delete(stat.key)  # noqa: B023

        store.before = before
        committed = None
        try:
            committed = save(store, 3, base)
        except CommitError as e:
            assert "which this version refers to" in str(e)  # noqa: PT017
        store.before = lambda method, key: None
        if committed is not None and deleted_by == "retention":
            check_versions(inner, committed)
        if len(calls) < at:
            break
        outcomes.append("failed" if committed is None else committed.manifest.chain)
    if deleted_by == "retention":
        assert "failed" not in outcomes
    assert 0 in outcomes
    assert 2 in outcomes


@pytest.mark.parametrize("kept", ["base", "none"])
def test_save_at_any_call_of_a_deletion_is_intact(kept, monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    chains = set()
    for at in range(1, 1000):
        inner, base = make_race()
        store, calls, saved = HookedStore(inner), list[str](), list[SnapshotReader]()

        def before(method, key):
            calls.append(key)  # noqa: B023
            if len(calls) == at:  # noqa: B023
                saved.append(save(inner, 3, base))  # noqa: B023

        store.before = before
        if kept == "base":
            retain_newest(store)
        else:
            for version in (Version(1), Version(0)):
                try:
                    Run(store).delete(version)
                except LimpetError as e:
                    assert "refers to it" in str(e)  # noqa: PT017
        if not saved:
            break
        check_versions(inner, saved[0])
        chains.add(saved[0].manifest.chain)
    assert chains == {0, 2}


@pytest.mark.slow
@settings(
    derandomize=True, max_examples=40,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.lists(st.integers(0, 1), min_size=5, max_size=90))
def test_save_is_intact_in_any_interleaving_with_retention(monkeypatch, bits):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    inner, base = make_race()
    saver, retention = actors = Actor(lambda store: save(store, 3, base)), Actor(retain_newest)
    running = {0, 1}
    for number in [*bits, *(0, 1) * 500]:  # one call of the store in each turn
        if number in running and actors[number].run(inner, 1):
            running.discard(number)
    assert not running
    assert saver.failure is retention.failure is None
    assert isinstance(saver.result, SnapshotReader)
    check_versions(inner, saver.result)


def test_verify_names_the_missing_files_of_a_deleted_base():
    inner, base = make_race()
    save(inner, 3, base)
    for stat in [*inner.list("version_0")]:
        inner.delete(stat.key)
    report = Run(inner).open(Version(3)).verify()
    assert [p.file for p in report.problems] == [
        f"version_0/{r.path.rpartition('/')[2]}"
        for r in reader_of(Run(inner).open(Version(3))).manifest.shards[0].refers
        if names.parse_reference(r.path) is not None and "version_0" in r.path
    ]
    assert f"version_0/{MANIFEST}" not in {s.key for s in inner.list("")}
