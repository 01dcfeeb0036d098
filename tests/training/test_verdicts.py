"""Resuming with verdicts: what is skipped, on one rank and on several, and from every tier."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import LimpetError, NoSnapshot, SkippedVersion
from limpet.format.names import MANIFEST, Version
from limpet.restarts.records import read_restarts
from limpet.run.policy import AtEnd, EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.tiers.local_tier import LocalTier
from limpet.training.checkpointer import Checkpointer
from tests.ranks.trainings import TrainingJob, TrainingRank
from tests.tiers.conftest import host  # noqa: F401
from tests.tiers.hosts import Host, end_as_killed, train
from tests.trainings import (
    flip_bit,
    initial_state,
    state_after,
    states_equal,
    train_step,
    trained_run,
    training,
)


@pytest.fixture
def store() -> MemoryStore:
    """Return a run with versions 20, 40, and 60."""
    return trained_run()


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be under ``limpet run``."""
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))


class Caught:
    """What a resume loaded, and the messages of its warnings by category."""

    def __init__(self, ckpt: Checkpointer, **options: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            snapshot = ckpt.resume(**options)
        self.step = None if snapshot is None else snapshot.step
        self.version = "" if snapshot is None else str(snapshot.version)
        self.skipped = [str(w.message) for w in caught if w.category is SkippedVersion]
        self.others = [str(w.message) for w in caught if w.category is UserWarning]


def resume(store: MemoryStore, last_step: int = 0, **options: Any) -> Caught:
    """Resume, and train up to ``last_step``, from a state that must be the loaded one."""
    with training(store, EverySteps(20)) as (state, ckpt):
        caught = Caught(ckpt, **options)
        assert states_equal(state, state_after(caught.step or 0))
        while state["progress"].step < last_step:
            ckpt.step({"loss": train_step(state)})
    return caught


def reason(store: MemoryStore) -> str:
    run = Run(store)
    return run.read_branch(run.branch()).reason


def test_a_distrusted_version_is_skipped_with_a_warning_and_a_branch(store: MemoryStore) -> None:
    Run(store).attest(60, ok=False, by="sdc-replay", note="step 58 differs")
    caught = resume(store, 80)
    assert caught.step == 40
    assert caught.skipped == [
        "version_60 is skipped. sdc-replay does not trust it: step 58 differs."
    ]
    assert caught.others == []
    assert Run(store).line() == [Version(20), Version(40), Version(60, 1), Version(80, 1)]
    assert reason(store) == "1 newer not trusted"
    assert resume(store).step == 80
    assert Run(store).branch() == 1, "a verdict on an abandoned version does not matter any more"


def test_damaged_and_distrusted_versions_are_counted_apart(store: MemoryStore) -> None:
    Run(store).attest(40, ok=False, by="nan")
    flip_bit(store, f"version_60/{MANIFEST}")
    caught = resume(store)
    assert caught.step == 20
    assert len(caught.skipped) == 2
    assert reason(store) == "1 newer damaged, 1 newer not trusted"


def test_trust_attested_resumes_only_from_attested_versions(store: MemoryStore) -> None:
    Run(store).attest(20, ok=True, by="sdc")
    Run(store).attest(40, ok=True, by="sdc")
    Run(store).attest(40, ok=False, by="ann", note="loss spike")
    caught = resume(store, trust="attested")
    assert caught.step == 20
    assert caught.skipped == [
        "version_60 is skipped. It has no verdict.",
        "version_40 is skipped. ann does not trust it: loss spike.",
    ]
    assert reason(store) == "2 newer not trusted"
    Run(store).attest(20, ok=False, by="sdc")
    with pytest.raises(NoSnapshot, match="has no intact and trusted version"):
        resume(store, trust="attested")
    assert resume(MemoryStore(), trust="attested").step is None, "a new run is new"


def test_many_versions_without_a_verdict_cause_one_warning() -> None:
    store = trained_run(15, 1)
    Run(store).attest(1, ok=True, by="sdc")
    caught = resume(store, trust="attested")
    assert caught.step == 1
    [message] = caught.skipped
    assert message.startswith("version_15, version_14, ")
    assert message.endswith("and 5 more are skipped. It has no verdict.")


def test_a_run_in_which_every_version_is_distrusted_raises_and_changes_nothing(
    store: MemoryStore,
) -> None:
    for step in (20, 40, 60):
        Run(store).attest(step, ok=False, by="sdc")
    before = [s.key for s in store.list("")]
    with pytest.raises(NoSnapshot, match="sdc does not trust it") as caught:
        resume(store)
    assert "start again in another folder" in str(caught.value)
    assert [s.key for s in store.list("")] == before


def test_a_version_that_is_named_is_loaded_with_a_warning(store: MemoryStore) -> None:
    Run(store).attest(60, ok=False, by="sdc", note="bit 3")
    caught = resume(store, at=60)
    assert (caught.step, caught.skipped) == (60, [])
    [message] = caught.others
    assert "from version_60, which was named, although it is not trusted: sdc does" in message
    assert resume(store, at=40).others == []
    with pytest.raises(NoSnapshot, match="sdc does not trust it: bit 3"):
        resume(store, at=60, branch=0, trust="attested")


def test_a_branch_that_is_named_has_no_distrusted_versions(store: MemoryStore) -> None:
    Run(store).attest(60, ok=False, by="sdc")
    assert resume(store, at=20).step == 20
    assert resume(store, branch=0).step == 40


@pytest.mark.parametrize("trust", ["yes", None, True, "Attested", 1])
def test_an_invalid_trust_is_refused(store: MemoryStore, trust: Any) -> None:
    with pytest.raises(LimpetError, match="Invalid value for trust="):
        resume(store, trust=trust)


def test_a_verdict_does_not_disturb_a_running_training_but_its_next_resume(
    store: MemoryStore,
) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume()
        Run(store).attest(60, ok=False, by="sdc")
        train_to(state, ckpt, 80)
    assert [v.step for v in Run(store).line()] == [20, 40, 60, 80]
    assert resume(store).step == 80, "what was saved later has a verdict of its own"
    for step in (60, 80):
        Run(store).attest(step, ok=False, by="sdc")
    assert resume(store).step == 40


def train_to(state: dict[str, Any], ckpt: Checkpointer, last_step: int) -> None:
    while state["progress"].step < last_step:
        ckpt.step({"loss": train_step(state)})


def test_the_start_from_another_run_skips_its_distrusted_versions(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    with training(url, EverySteps(20)) as (state, ckpt):
        train_to(state, ckpt, 60)
    Run(url).attest(60, ok=False, by="sdc")
    assert resume(MemoryStore(), start=f"{url}@latest").step == 40
    assert resume(MemoryStore(), start=f"{url}@60").step == 60


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["not-distrusted", "attested"])
def test_all_ranks_resume_from_the_same_trusted_version(trust: Any) -> None:
    with TrainingJob(2) as job:
        job.train(23, save=EverySteps(5))
        Run(job.inner).attest(20, ok=False, by="sdc")
        Run(job.inner).attest(10, ok=True, by="sdc")

        def work(trainer: TrainingRank) -> Any:
            with trainer.make_checkpointer(save=EverySteps(5)):
                resumed = trainer.ckpt.resume(trust=trust)
                trainer.train_steps(17)
            return resumed.step  # type: ignore[union-attr]

        with pytest.warns(SkippedVersion) as caught:
            steps = job.run(work)
        messages = [str(w.message) for w in caught]
        assert "version_20 is skipped. sdc does not trust it." in messages
        assert steps == ([15] * 2 if trust == "not-distrusted" else [10] * 2)
        assert Run(job.inner).listing().branches == [1]
        reads = {t.rank: [k for _, k in t.calls.elements() if "verdict" in k] for t in job.ranks}
        assert reads[0]
        assert not reads[1], "rank 0 decides for all"


def test_all_ranks_raise_if_no_version_is_trusted() -> None:
    with TrainingJob(2) as job:
        job.train(12, save=EverySteps(5))
        for step in (5, 10):
            Run(job.inner).attest(step, ok=False, by="sdc")

        def work(trainer: TrainingRank) -> None:
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume()

        outcomes = job.outcomes(work)
        assert {type(o) for o in outcomes} == {NoSnapshot}
        assert all("sdc does not trust it" in str(o) for o in outcomes)


# -- tiers ---------------------------------------------------------------------------------------


def test_the_state_in_memory_of_a_distrusted_version_is_not_resumed(host: Host) -> None:  # noqa: F811
    host.train_and_die(100)
    assert host.captured[-1] == "version_100"
    Run(host.run).attest(100, ok=False, by="sdc")
    state, ckpt = host.start()
    assert host.resumed.step == 50
    assert host.path not in host.resumed.url
    assert host.warnings == ["version_100 is skipped. sdc does not trust it."]
    with ckpt:
        train(state, ckpt, 60)
    assert states_equal(state, state_after(60))
    assert Run(host.run).branch() == 1


def test_a_state_in_memory_after_a_distrusted_version_is_not_resumed(host: Host) -> None:  # noqa: F811
    host.train_and_die(127)
    Run(host.run).attest(100, ok=False, by="sdc", note="bit 3")
    host.start()
    assert host.resumed.step == 50
    assert sorted(host.warnings) == [
        "version_100 is skipped. sdc does not trust it: bit 3.",
        "version_120 in memory, version_110 in memory are skipped. It continues from version_100:"
        " sdc does not trust it: bit 3.",
    ]
    assert reason(host.run) == "3 newer not trusted"


def test_a_damaged_manifest_does_not_hide_a_negative_verdict(host: Host) -> None:  # noqa: F811
    host.train_and_die(110)
    Run(host.run).attest(100, ok=False, by="sdc")
    flip_bit(host.run, f"version_100/{MANIFEST}", 200)
    host.start()
    assert host.resumed.step == 50


def test_a_verdict_that_was_withdrawn_lets_memory_count_again(host: Host) -> None:  # noqa: F811
    host.train_and_die(127)
    Run(host.run).attest(100, ok=False, by="sdc")
    Run(host.run).attest(100, ok=True, by="sdc")
    host.start()
    assert host.resumed.step == 120


def resume_host(host: Host, **options: Any) -> Caught:  # noqa: F811
    state = initial_state()
    tiers = [limpet.MemoryTier(every=EverySteps(10), copies=1, path=host.path)]
    ckpt = Checkpointer(host.run, state, save=EverySteps(50) | AtEnd(), tiers=tiers)
    host.ckpts.append(ckpt)
    caught = Caught(ckpt, **options)
    assert states_equal(state, state_after(caught.step or 0))
    return caught


def test_trust_attested_takes_no_newer_state_from_memory(host: Host) -> None:  # noqa: F811
    host.train_and_die(110)
    Run(host.run).attest(100, ok=True, by="sdc")
    caught = resume_host(host, trust="attested")
    assert caught.step == 100
    assert caught.skipped == [
        "version_110 in memory is skipped. It is no version of the run, so it has no verdict."
    ]
    assert Run(host.run).branch() == 1


def test_trust_attested_without_any_version_does_not_begin_again(host: Host) -> None:  # noqa: F811
    host.train_and_die(33, save=1000)
    with pytest.raises(NoSnapshot, match="version_30 in memory"):
        resume_host(host, trust="attested")
    assert resume_host(host).step == 30


def test_a_version_on_the_local_disk_after_a_distrusted_one_is_promoted_but_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not lost: it becomes a version of the branch that training has left."""
    store = MemoryStore()
    state = initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(10), tiers=[LocalTier(tmp_path)])
    ckpt.resume()
    train_to(state, ckpt, 30)
    ckpt._saver.wait()
    end_as_killed(ckpt, 0)
    for stat in list(store.list("version_30")):  # as if the host had been lost before
        store.delete(stat.key)
    Run(store).attest(20, ok=False, by="sdc")
    state = initial_state()
    with Checkpointer(store, state, save=EverySteps(10), tiers=[LocalTier(tmp_path)]) as ckpt:
        caught = Caught(ckpt)
        assert caught.step == 10
        assert len(caught.skipped) == 2
        assert "version_30 on the local disk is skipped. It continues from" in caught.skipped[0]
        train_to(state, ckpt, 20)
    assert states_equal(state, state_after(20))
    assert Run(store).line() == [Version(10), Version(20, 1)]
    assert Version(30) in Run(store).listing().versions
    assert resume(store).step == 20


# -- restarts ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("status")
def test_a_distrusted_version_is_no_progress_and_is_not_left_behind_twice() -> None:
    """Each new version of step 60 is rejected. Three restarts from 40 lead to 20, although the
    rejected version is the newest one of the lineage each time."""
    store = trained_run(40)
    began = []
    for _ in range(5):
        state = initial_state()
        ckpt = Checkpointer(store, state, save=EverySteps(20))
        caught = Caught(ckpt)
        began.append(caught.version)
        train_to(state, ckpt, 60)
        ckpt._saver.wait()
        ckpt._ending.ladder._key = ""
        ckpt._release()
        Run(store).attest(60, ok=False, by="sdc")
    assert began == ["version_40"] * 3 + ["version_20", "version_40.3"]
    assert {r.skipped for r in read_restarts(store).values()} == {None, "version_40"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", limpet.errors.UnsavedSteps)
        yield
