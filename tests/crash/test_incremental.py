"""Incremental saves that are cut off, that fail at any call, and that race with what deletes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.buffers import shared_pool
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import CommitError, HoldfastError
from holdfast.format import names
from holdfast.format.names import MANIFEST, Version
from holdfast.run.policy import EverySteps, KeepLast
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.crashfs import CrashFs, PowerCut
from holdfast.testing.faults import FaultFs
from tests import trainings
from tests.crash import promises
from tests.crash.conftest import PoolTracker
from tests.crash.test_nth_call import faults
from tests.engine.unreliable_stores import HookedStore

ROOT = "/a/run"


# -- a training of which a part is frozen --------------------------------------------------------


def fresh() -> dict[str, Any]:
    return {**trainings.initial_state(), "frozen": np.arange(750.0)}


def after(steps: int) -> dict[str, Any]:
    return {**trainings.state_after(steps), "frozen": np.arange(750.0)}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return trainings.states_equal(a, b) and a["frozen"].tobytes() == b["frozen"].tobytes()


@pytest.fixture(autouse=True)
def part_is_frozen(monkeypatch: pytest.MonkeyPatch, pools: PoolTracker) -> None:
    """What the promises are checked with has a frozen part as well."""
    monkeypatch.setattr(promises, "initial_state", fresh)
    monkeypatch.setattr(promises, "states_equal", same)


def trains(store: Store, done: list[int], steps: int = 5) -> None:
    """Increments on increments, a full version every third, and the two newest are kept with what
    they refer to."""
    state = fresh()
    with holdfast.Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(2), incremental=True, full_every=3
    ) as ckpt:
        for step in range(1, steps + 1):
            trainings.train(state, ckpt, step)
            snapshot = ckpt.wait()
            assert snapshot is not None
            done.append(step)


def check(store: Store, committed: list[int]) -> None:
    promises.check_promises(store, committed, expected=after)


def test_what_is_cut_off_is_incremental() -> None:
    store, done = LocalStore(ROOT, fs=CrashFs()), list[int]()
    trains(store, done)
    run = Run(store)
    chains = {v.step: run.open(v).chain for v in run.listing().versions}
    assert chains == {4: 0, 5: 1}
    assert run.open(Version(5)).bases == {Version(4)}
    check(store, done[-2:])


@pytest.mark.parametrize(
    ("every", "choices"), [(41, 3), pytest.param(7, 4, marks=pytest.mark.slow)]
)
def test_the_power_is_cut(every: int, choices: int, pools: PoolTracker) -> None:
    states = 0
    for cut_at in range(1, 3000, every):
        fs, done = CrashFs(cut_at), list[int]()
        try:
            trains(LocalStore(ROOT, fs=fs), done, 4)
        except PowerCut:
            pools.assert_all_freed()
        else:
            assert cut_at > fs.operations
            break
        for left in fs.crashes(limit=choices, seed=cut_at):
            check(LocalStore(ROOT, fs=left), done[-1:])
            states += 1
    assert states > 10


@pytest.mark.parametrize(
    ("error", "every"),
    [("EIO", 31), *(pytest.param(e, 7, marks=pytest.mark.slow) for e in ("EIO", "ENOSPC", "lost"))],
)
def test_a_call_fails(error: str, every: int, pools: PoolTracker) -> None:
    for number, fault in enumerate(faults(error)):
        if number % every:
            continue
        fs = FaultFs(CrashFs(), fault)
        done: list[int] = []
        try:
            trains(LocalStore(ROOT, fs=fs), done, 4)
        except HoldfastError as e:
            assert ROOT in str(e) or e.fields.get("store"), e  # noqa: PT017
        fired = bool(fs.fired)
        fs.faults.clear()
        pools.assert_all_freed()
        check(LocalStore(ROOT, fs=fs.inner), done[-1:])
        if not fired:
            assert done == [1, 2, 3, 4]
            return
    pytest.fail("no end to the calls")


# -- a save, and at the same time the deletion of what it refers to ------------------------------


def state(step: int) -> dict[str, Any]:
    """A part that never changes, one that changed with step 1, one that always does."""
    always, once = np.full(200, float(step)), np.arange(300.0)
    once[0] = min(step, 1)
    return {"always": always, "frozen": np.arange(750.0), "once": once}


def save(store: Store, step: int, base: Snapshot | None) -> Snapshot:
    place = Location(store, f"version_{step}")
    return finish_save(
        begin_save(
            place,
            state(step),
            VersionMetadata(step=step),
            shared_pool(),
            stage_now=False,
            base=base,
        )
    )


def begun() -> tuple[MemoryStore, Snapshot]:
    """Version 1 refers to 0; 2 is full, so that 0 and 1 may go; and 3 is to refer to both."""
    store = MemoryStore("race")
    base = save(store, 1, save(store, 0, None))
    save(store, 2, None)
    assert base.bases == {Version(0)}
    return store, base


def delete_old(store: Store) -> None:
    Run(store).retain(KeepLast(1))


def settled(store: MemoryStore, committed: Snapshot | None) -> None:
    """Every version that is there is whole, also after a sweep; there are no pins any more."""
    for _ in range(2):
        run = Run(store)
        versions = run.listing().versions
        assert (Version(3) in versions) == (committed is not None)
        assert Version(2) in versions or committed is not None
        for version in versions:
            report = run.open(version).verify()
            assert report.ok, report.problems
            wanted = state(version.step)
            found = load_snapshot(run.open(version))
            assert all(found[k].tobytes() == wanted[k].tobytes() for k in wanted)
        assert run.listing().process_pins == []
        run.sweep(grace=0, now=1e12)


@pytest.mark.parametrize("deleted", ["retention", "both at once"])
def test_the_base_is_deleted_at_any_call_of_a_save(
    deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_THREADS", "1")
    outcomes = []
    for at in range(1, 1000):
        inner, base = begun()
        store, calls = HookedStore(inner), list[str]()

        def before(method: str, key: str) -> None:
            calls.append(key)  # noqa: B023
            if len(calls) == at:  # noqa: B023
                if deleted == "retention":
                    delete_old(inner)  # noqa: B023
                else:  # by whoever asks no pin
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
        if committed is not None and deleted == "retention":
            settled(inner, committed)
        if len(calls) < at:
            break
        outcomes.append("failed" if committed is None else committed.chain)
    if deleted == "retention":
        assert "failed" not in outcomes
    assert 0 in outcomes
    assert 2 in outcomes


@pytest.mark.parametrize("kept", ["base", "none"])
def test_a_save_happens_at_any_call_of_a_deletion(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_THREADS", "1")
    chains = set()
    for at in range(1, 1000):
        inner, base = begun()
        store, calls, made = HookedStore(inner), list[str](), list[Snapshot]()

        def before(method: str, key: str) -> None:
            calls.append(key)  # noqa: B023
            if len(calls) == at:  # noqa: B023
                made.append(save(inner, 3, base))  # noqa: B023

        store.before = before
        if kept == "base":
            delete_old(store)
        else:
            for version in (Version(1), Version(0)):
                try:
                    Run(store).delete(version)
                except HoldfastError as e:
                    assert "refers to it" in str(e)  # noqa: PT017
        if not made:
            break
        settled(inner, made[0])
        chains.add(made[0].chain)
    assert chains == {0, 2}


class Turns:
    """Lets two threads make their calls to a store in the order of a schedule."""

    def __init__(self, schedule: Iterator[int]) -> None:
        self._schedule = schedule
        self._changed = threading.Condition()
        self._running = {0, 1}
        self._turn = next(schedule)

    def call(self, who: int) -> None:
        with self._changed:
            while self._turn != who and self._turn in self._running:
                assert self._changed.wait(20)
            self._turn = next(self._schedule)
            self._changed.notify_all()

    def end(self, who: int) -> None:
        with self._changed:
            self._running.discard(who)
            self._turn = 1 - who
            self._changed.notify_all()


def together(inner: Store, works: list[Callable[[Store], Any]], bits: list[int]) -> list[Any]:
    """The results, or errors, of two works whose calls are interleaved."""

    def schedule() -> Iterator[int]:
        yield from bits
        while True:
            yield from (0, 1)

    turns, results = Turns(schedule()), [None, None]

    def run(who: int) -> None:
        store = HookedStore(inner)
        store.before = lambda method, key: turns.call(who)
        try:
            results[who] = works[who](store)
        except HoldfastError as e:
            results[who] = e  # type: ignore[call-overload]
        finally:
            turns.end(who)

    threads = [threading.Thread(target=run, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.slow
@settings(
    derandomize=True, max_examples=80, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.lists(st.integers(0, 1), min_size=5, max_size=90))
def test_a_save_and_retention_in_any_order(
    monkeypatch: pytest.MonkeyPatch, bits: list[int]
) -> None:
    monkeypatch.setenv("HOLDFAST_THREADS", "1")
    inner, base = begun()
    saved, deleted = together(inner, [lambda s: save(s, 3, base), delete_old], bits)
    assert deleted is None, deleted
    assert isinstance(saved, Snapshot), saved
    settled(inner, saved)


def test_a_reader_of_a_run_without_the_base_says_what_is_missing() -> None:
    inner, base = begun()
    save(inner, 3, base)
    for stat in [*inner.list("version_0")]:
        inner.delete(stat.key)
    report = Run(inner).open(Version(3)).verify()
    assert [p.file for p in report.problems] == [
        f"version_0/{r.path.rpartition('/')[2]}"
        for r in Run(inner).open(Version(3)).manifest.shards[0].refers
        if names.parse_reference(r.path) is not None and "version_0" in r.path
    ]
    assert f"version_0/{MANIFEST}" not in {s.key for s in inner.list("")}
