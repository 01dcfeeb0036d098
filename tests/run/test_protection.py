"""What a call promised to keep stays, although a deletion was in progress: whoever wrote a record
that protects a version was told if it was too late."""

import itertools
from collections import Counter

import numpy as np
import pytest

import limpet
from limpet import machine
from limpet.buffers import shared_pool
from limpet.errors import LimpetError, NotFound
from limpet.evaluation.options import Selection
from limpet.format.names import NOTICES, Version, notice_name, random_id
from limpet.loading.load import load_snapshot
from limpet.run.policy import KeepBest, KeepLast
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_location
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.evaluation import trivial
from tests.interleaving import Actor, count_calls, run_interleaved

STEP = 10
"""The step of the version that is deleted, and protected."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 1)


def state_of(step):
    return {"x": np.full(300, float(step)), "y": np.arange(300.0)}


def make_run(store=None, steps=(STEP, 20, 30), branch=0):
    store = MemoryStore() if store is None else store
    for step in steps:
        version = Version(step, branch)
        save(store, version, state_of(step))
        Run(store).add_metrics(version, {"m": -step})
    return store


def save(store, version, state, base=None):
    metadata, pool = VersionMetadata(step=version.step, branch=version.branch), shared_pool()
    location = Location(store, str(version))
    return finish_save(begin_save(location, state, metadata, pool, stage_now=False, base=base))


def make_abandoned():
    """Return a run that has gone back to a version before that of the test."""
    store = make_run(steps=(5, STEP))
    with limpet.Checkpointer(store, state_of(5), save=limpet.Never()) as ckpt:
        ckpt.resume(at=5)
    return make_run(store, steps=(20,), branch=1)


def save_and_retain(store):
    """Delete as a training does."""
    with Run(store).writer(keep=KeepLast(1)) as writer:
        writer.save(state_of(40), step=40)


DELETIONS = {
    "retain": (make_run, lambda store: Run(store).retain(KeepLast(1))),
    "best": (make_run, lambda store: Run(store).retain(KeepBest(1, "m"))),
    "delete": (make_run, lambda store: Run(store).delete(STEP)),
    "delete several": (make_run, lambda store: Run(store).delete(20, STEP)),
    "training": (make_run, save_and_retain),
    "sweep": (make_abandoned, lambda store: Run(store).sweep(abandoned=True, grace=0)),
}


def resume(store):
    live = state_of(0)
    with limpet.Checkpointer(store, live, save=limpet.Never()) as ckpt:
        ckpt.resume(at=str(Version(STEP)))
    assert live["x"][0] == STEP


def save_incrementally(store):
    """Save another version, the newest, that consists of chunks of the first."""
    base = Run(store).catalog.open(Version(STEP))
    return save(store, Version(50, Run(store).branch()), {**state_of(STEP), "n": 1}, base).version


def read(store):
    """Read in several steps: the version may be deleted between any two before it is pinned."""
    assert load_snapshot(Run(store).catalog.open(Version(STEP)))["x"][0] == STEP


PROTECTIONS = {
    "pin": lambda store: Run(store).pin(STEP, branch=0),
    "metrics": lambda store: Run(store).add_metrics(Version(STEP), {"m": -1000.0}),
    "branch": resume,
    "base": save_incrementally,
    "reader": read,
}


def is_intact(store, version):
    try:
        return open_location(Location(store, str(version))).verify().ok
    except NotFound:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("deletion", DELETIONS)
def test_what_was_protected_during_a_deletion_stays(deletion, protection, in_parts):
    """Protect the version before each call of the store that a deletion makes. ``in_parts``: the
    deletion ends in the middle of that."""
    if in_parts and deletion != "retain":
        pytest.skip("the others make the same calls")
    prepare, delete = DELETIONS[deletion]
    calls = count_calls(prepare(), PROTECTIONS[protection])
    # a training that begins after the branch may delete the version from which that began
    is_kept = {
        "pin": True,
        "metrics": deletion == "best",
        "branch": deletion != "training",
    }.get(protection, False)
    outcomes = Counter[str]()
    deletions = range(count_calls(prepare(), delete) + 1)
    for at in itertools.product(deletions, range(1, calls, 2) if in_parts else [None]):
        store = prepare()
        deleter, protector = actors = Actor(delete), Actor(PROTECTIONS[protection])
        run_interleaved(store, *actors, at)
        assert deleter.failure is None or type(deleter.failure) in (LimpetError, NotFound), at
        if protector.failure is not None:
            assert isinstance(protector.failure, LimpetError), (at, protector.failure)
            outcomes[type(protector.failure).__name__] += 1
            continue
        outcomes["done"] += 1
        if is_kept:
            assert is_intact(store, Version(STEP)), at
        if protection == "base":
            assert is_intact(store, protector.result), at
        assert not list(store.list(NOTICES))
    assert outcomes["done"] > 2
    assert deletion == "training" or outcomes.total() > outcomes["done"], outcomes


def test_a_version_stays_while_it_is_evaluated(tmp_path):
    """Its result is recorded, whenever a deletion began. It ends during the evaluation."""
    outcomes = Counter[str]()
    delete = DELETIONS["retain"][1]
    for at in range(count_calls(make_run(steps=(STEP, 30)), delete) + 1):
        store = make_run(open_store(tmp_path / str(at)), (STEP, 30))
        deleter = Actor(delete)
        ended = deleter.run(store, at)

        def evaluate(model, batch, deleter=deleter, store=store, ended=ended):
            if not (ended or deleter._has_ended):
                deleter.run(store, None)
            return trivial.evaluate(model, batch)

        options = {"data": trivial.data, "workers": 0, "select": Selection(skip_none=True)}
        found = limpet.Evaluation(store.url, trivial.setup, evaluate, **options).run()
        states = {outcome.version.step: outcome.state for outcome in found}
        assert states[30] == "DONE"
        if not deleter._has_ended:
            deleter.run(store, None)
        assert deleter.failure is None
        first = min(states)  # during its evaluation the deletion went on
        outcomes[str(first)] += 1
        assert {*states.values()} <= {"DONE", "SKIPPED"}
        if not ended:
            assert states[first] == "DONE", at
            assert is_intact(store, Version(first))
    assert outcomes["10"] > 2
    assert outcomes["30"] > 2


@pytest.mark.parametrize("protection", ["pin", "metrics", "branch"])
def test_a_notice_that_a_killed_deletion_has_left(protection, monkeypatch):
    """It stops nobody if its process is known to have ended; otherwise the error names it."""
    store = make_run()
    key = pins.create_pin(Location(store, ""), random_id(), Version(STEP), notice_name)
    others = pins.create_pin(Location(store, ""), random_id(), Version(20), notice_name)
    orphans = pins.create_pin(Location(store, ""), random_id(), None, notice_name)
    with pytest.raises(
        NotFound, match=f"(?s)is deleting files of .*version_10.*{key}.*delete the notice"
    ):
        PROTECTIONS[protection](store)
    assert {s.key for s in store.list("")} - {s.key for s in make_run().list("")} >= {key, others}
    assert Run(store).pins() == []
    assert Run(store).branch() == 0
    assert Run(store).metrics(Version(STEP)) == {"m": -STEP}
    with monkeypatch.context() as patch:
        for module in (pins, machine):
            patch.setattr(module, "pid_and_start_time", lambda pid: None)
        PROTECTIONS[protection](store)
    store.delete(key)
    PROTECTIONS[protection](store)
    assert orphans  # that of a sweep of orphans stops copies only


def test_a_pin_of_a_missing_version_is_swept_before_the_version_is_saved_again():
    """...or it stays: the pin that protects the new version is not that of the old one."""

    def prepare():
        store = make_run()
        Run(store).pin(STEP)
        for stat in [*store.list(f"version_{STEP}")]:
            store.delete(stat.key)
        return store

    def save_and_pin(store):
        make_run(store, steps=(STEP,))
        Run(store).pin(STEP)

    delete = lambda store: Run(store).sweep(grace=0)  # noqa: E731
    for at in range(count_calls(prepare(), delete) + 1):
        store, actors = prepare(), (Actor(delete), Actor(save_and_pin))
        run_interleaved(store, *actors, (at, None))
        if actors[1].failure is None:
            assert Run(store).pins() == [Version(STEP)], at
        else:
            assert type(actors[1].failure) is NotFound


def test_an_incremental_save_whose_base_is_deleted_at_any_call_is_intact():
    """The other way around: the whole deletion runs before each call of the save."""
    delete = DELETIONS["delete"][1]
    for at in range(count_calls(make_run(), save_incrementally) + 1):
        store, actors = make_run(), (Actor(save_incrementally), Actor(delete))
        run_interleaved(store, *actors, (at, None))
        Run(store).sweep(grace=0)
        if actors[0].failure is None:
            assert is_intact(store, Version(50)), at
        else:
            assert type(actors[0].failure) is NotFound
