"""One training of many ranks: what goes wrong on one of them, all hear of at the same step."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast
from holdfast.errors import (
    CommitError,
    Denied,
    HoldfastError,
    NoSnapshot,
    NoSpace,
    NotFound,
    PlanError,
    RankFailed,
    SaveFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from holdfast.format.names import Version
from holdfast.run.policy import EverySeconds, EverySteps, KeepLast, OnException
from holdfast.run.run import Run
from tests.ranks.trainings import (
    SHORT_TIMEOUTS,
    TrainingJob,
    TrainingRank,
    initial_state,
    matches_uninterrupted,
)
from tests.trainings import flip_bit


def failing(
    crew: TrainingJob, rank: int, error: Exception, method: str, key: str, times: int = 1
) -> None:
    """So many such calls of a rank fail."""
    left = [times]

    def fail(called: str, at: str) -> None:
        if called == method and key in at and left[0]:
            left[0] -= 1
            raise error

    crew.set_before_call(rank, fail)


def shard(store: Any, version: str, rank: int) -> str:
    [key] = [
        s.key
        for s in store.list(version)
        if f"shard-{rank:05d}" in s.key and s.key.endswith(".safetensors")
    ]
    return key


# -- resuming ------------------------------------------------------------------------------------


def trained(size: int = 3, to: int = 12) -> TrainingJob:
    """A run of versions 5, 10, ..."""
    with TrainingJob(size) as crew:
        crew.train(to, save=EverySteps(5))
    return crew


def test_an_empty_run_is_none_on_all() -> None:
    with TrainingJob(3) as crew:

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                return m.ckpt.resume()

        assert crew.run(work) == [None] * 3
        assert crew.leftover_keys() == []


def test_training_into_a_run_that_has_versions_is_refused_on_all() -> None:
    inner = trained().inner
    with TrainingJob(3, inner) as crew:

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(3)

        made = crew.outcomes(work)
        assert all(isinstance(o, HoldfastError) for o in made)
        assert all("holds versions of an earlier training" in str(o) for o in made), made


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_damage_that_one_rank_meets_takes_all_back(reader: int) -> None:
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:
        flip_bit(crew.inner, shard(crew.inner, "version_10", reader))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            crew.train(12, save=EverySteps(5))
        assert [m.resumed.step for m in crew.ranks] == [5] * 3
        assert [w.category for w in told] == [SkippedVersion]
        assert all(matches_uninterrupted(m.state, m.rank, 3, 12) for m in crew.ranks)
        assert Run(crew.inner).listing().branches == [1]
        assert Run(crew.inner).line()[-1] == Version(10, 1)
        assert crew.leftover_keys() == []


@pytest.mark.parametrize("reader", [0, 2])
@pytest.mark.parametrize("error", [StoreError("Input/output error"), NotFound("No such file")])
def test_what_one_rank_cannot_read_takes_all_back(reader: int, error: Exception) -> None:
    """As it does where there is only one."""
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:
        key = shard(crew.inner, "version_10", reader)
        failing(crew, reader, error, "get_range", key, 99)
        with pytest.warns(SkippedVersion, match="version_10 is skipped"):
            crew.train(12, save=EverySteps(5))
        assert [m.resumed.step for m in crew.ranks] == [5] * 3
        assert all(matches_uninterrupted(m.state, m.rank, 3, 12) for m in crew.ranks)
        assert Run(crew.inner).listing().branches == [1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [Denied("No"), Unavailable("Does not answer")])
@pytest.mark.parametrize("method", ["get", "get_range"])
def test_a_store_that_fails_one_rank_takes_nobody_back(
    rank: int, error: Exception, method: str
) -> None:
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:
        failing(crew, rank, error, method, "version_10/", 99)

        def work(m: TrainingRank) -> Any:
            m.make_checkpointer(save=EverySteps(5)).resume()

        made = crew.outcomes(work)
        assert isinstance(made[rank], type(error))
        for r, outcome in enumerate(made):
            if r != rank:
                assert isinstance(outcome, RankFailed), outcome
                assert outcome.rank == rank
                assert isinstance(outcome.__cause__, type(error))
        assert Run(crew.inner).listing().branches == []
        for m in crew.ranks:
            m.store.before = lambda method, key: None

        def again(m: TrainingRank) -> int:
            with m.ckpt:
                step: int = m.ckpt.resume().step  # type: ignore[union-attr]
                m.train_steps(13)
            return step

        assert crew.run(again) == [10] * 3
        assert all(matches_uninterrupted(m.state, m.rank, 3, 13) for m in crew.ranks)


@pytest.mark.parametrize("readers", [(0, 0), (2, 2), (1, 2)])
def test_where_all_are_damaged_all_raise_and_none_trains_on(readers: tuple[int, int]) -> None:
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:
        for version, reader in zip(("version_5", "version_10"), readers):
            flip_bit(crew.inner, shard(crew.inner, version, reader))

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                with pytest.raises(NoSnapshot) as e:
                    m.ckpt.resume()
                with pytest.raises(HoldfastError, match=r"The last resume\(\) failed"):
                    m.ckpt.step()
                return str(e.value)

        made = crew.run(work)
        assert len(set(made)) == 1
        assert Run(crew.inner).listing().branches == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_after_a_half_load_leaves_no_state_to_train_on(rank: int) -> None:
    """The newest is damaged for rank 2; then rank 0 or 1 cannot reach the store. The second call
    of resume finds a Checkpointer that was ready to train."""
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                m.ckpt.resume()
                m.train_steps(11)
                crew.wait_for_step(m.rank)
                if m.rank == 0:
                    flip_bit(crew.inner, shard(crew.inner, "version_10", 2))
                    failing(crew, rank, Unavailable("Gone"), "get", "version_5/", 99)
                crew.wait_for_step(m.rank)
                with pytest.raises(HoldfastError):
                    m.ckpt.resume()
                with pytest.raises(HoldfastError, match=r"The last resume\(\) failed"):
                    m.ckpt.step()
            return True

        assert crew.run(work) == [True] * 3


@pytest.mark.filterwarnings("ignore::holdfast.errors.RanksChanged")
def test_back_to_a_step_and_to_a_branch() -> None:
    crew = trained(to=22)
    with TrainingJob(2, crew.inner) as crew:

        def work(m: TrainingRank) -> list[Any]:
            with m.make_checkpointer(save=EverySteps(5), keep=None):
                back = m.ckpt.resume(at=10)
                m.train_steps(17)
            assert (
                matches_uninterrupted(m.state, m.rank, 2, 17) or m.rank
            )  # "mine" of ranks 0 and 1 is their own
            return [back.step]  # type: ignore[union-attr]

        assert crew.run(work) == [[10], [10]]
        assert Run(crew.inner).listing().branches == [1]
        assert [str(v) for v in Run(crew.inner).line()] == [
            "version_5",
            "version_10",
            "version_15.1",
        ]

        def other(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                return str(m.ckpt.resume(branch=0).version)  # type: ignore[union-attr]

        assert crew.run(other) == ["version_20"] * 2
        assert Run(crew.inner).listing().branches == [1, 2]

        def nowhere(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                m.ckpt.resume(at=999)

        made = crew.outcomes(nowhere)
        assert {type(o) for o in made} == {NoSnapshot}


@pytest.mark.filterwarnings("ignore::holdfast.errors.RanksChanged")
def test_a_start_from_another_run(tmp_path: Any) -> None:
    other, own = str(tmp_path / "other"), str(tmp_path / "own")
    with TrainingJob(3) as crew:

        def first(m: TrainingRank) -> None:
            m.store = other  # type: ignore[assignment]
            m.train(12, save=EverySteps(5))

        crew.run(first)
    with TrainingJob(2) as crew:

        def work(m: TrainingRank) -> Any:
            m.store = own  # type: ignore[assignment]
            with m.make_checkpointer(save=EverySteps(5)):
                found = m.ckpt.resume(start=f"{other}@latest")
                m.train_steps(16)
            return found.step, m.ckpt.current_step  # type: ignore[union-attr]

        assert crew.run(work) == [(10, 16)] * 2
        assert crew.run(work) == [(15, 16)] * 2  # its own from now on
        assert Run(own).latest().metadata["note"]["started_from"]["url"].endswith("version_10")  # type: ignore[union-attr]

        def partly(m: TrainingRank) -> Any:
            m.store = own + "2"  # type: ignore[assignment]
            with m.make_checkpointer(save=EverySteps(5)):
                m.ckpt.resume(start=f"{other}@5", keys="weights")
                return m.ckpt.current_step, float(m.state["same"][0])

        assert crew.run(partly) == [(0, 0.0)] * 2

        def wrong(m: TrainingRank) -> None:
            m.store = own + "3"  # type: ignore[assignment]
            with m.make_checkpointer(save=EverySteps(5)):
                m.ckpt.resume(start=f"{other}@7")

        made = crew.outcomes(wrong)
        assert {type(o) for o in made} == {NotFound}, made


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_state_that_differs_on_one_rank(rank: int) -> None:
    crew = trained()
    with TrainingJob(3, crew.inner) as crew:

        def work(m: TrainingRank) -> None:
            state = initial_state(m.rank, 3)
            if m.rank == rank:
                state["more"] = 1.0
            m.make_checkpointer(save=EverySteps(5), state=state).resume()

        made = crew.outcomes(work)
        assert all(isinstance(o, PlanError) for o in made), made
        assert all("more" in str(o) for o in made)


# -- saves that fail -----------------------------------------------------------------------------

CALLS = [("put", ".safetensors"), ("commit", ".safetensors"), ("put_if_absent", "index")]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("method", "key"), CALLS)
def test_a_save_that_fails_on_one_rank(rank: int, method: str, key: str) -> None:
    """All raise at the same step, when the next is due; then training goes on."""
    with TrainingJob(3) as crew:
        failing(crew, rank, NoSpace("The disk is full", key="k"), method, key)

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                m.ckpt.resume()
                with pytest.raises((NoSpace, RankFailed), match="The disk is full") as e:
                    m.train_steps(20)
                at = m.ckpt.current_step
                assert m.ckpt.statistics()["failures"] == 1
                m.train_steps(18)
                return at, e.value

        made = crew.run(work)
        assert [at for at, _ in made] == [10] * 3
        for r, (_, error) in enumerate(made):
            if r == rank:
                assert type(error) is NoSpace
            else:
                assert (type(error), error.rank) == (RankFailed, rank)
                assert isinstance(error.__cause__, NoSpace)
        assert crew.versions == [11, 15]
        assert crew.leftover_keys() == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_save_that_fails_is_a_warning_if_so_wished(rank: int) -> None:
    with TrainingJob(3) as crew:
        failing(crew, rank, NoSpace("The disk is full"), "put", ".safetensors")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            crew.train(17, save=EverySteps(5), on_error="warn")
        assert [w.category for w in told] == [SaveFailed] * 3
        assert all("NOTHING WAS SAVED" in str(w.message) for w in told)
        assert {w.filename for w in told} == {
            __file__.replace("test_training_failures", "trainings")
        }
        assert crew.versions == [10, 15]
        assert all(matches_uninterrupted(m.state, m.rank, 3, 17) for m in crew.ranks)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), HoldfastError("It is misused")])
def test_what_is_no_fault_of_a_store_raises_on_all(rank: int, error: Exception) -> None:
    """Also with on_error="warn", which one rank alone would not heed."""
    with TrainingJob(3) as crew:
        failing(crew, rank, error, "put", ".safetensors")
        made = crew.outcomes(lambda m: m.train(17, save=EverySteps(5), on_error="warn"))
        assert made[rank] is error, (made, [m.ckpt.current_step for m in crew.ranks])
        assert all(str(error) in str(o) for o in made), made
        assert [m.ckpt.current_step for m in crew.ranks] == [10] * 3


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_retention_that_fails_is_told_on_all(on_error: str) -> None:
    with TrainingJob(3) as crew:
        failing(crew, 0, Denied("You may not delete"), "delete", "version_5/manifest.json")

        def work(m: TrainingRank) -> Any:
            given: Any = {"save": EverySteps(5), "keep": KeepLast(1), "on_error": on_error}
            with m.make_checkpointer(**given):
                m.ckpt.resume()
                if on_error == "warn":
                    with pytest.warns() if m.rank < 0 else warnings.catch_warnings():
                        m.train_steps(22)
                    return None
                with pytest.raises(HoldfastError, match="You may not delete") as e:
                    m.train_steps(22)
                assert m.ckpt.current_step == 15
                m.train_steps(22)
                return e.value.committed, str(e.value)

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = crew.run(work)
        if on_error == "warn":
            assert [w.category for w in told] == [SaveFailed] * 3
            assert all("Old versions accumulate" in str(w.message) for w in told)
            assert not any("nothing was committed" in str(w.message) for w in told)
        else:
            assert {committed for committed, _ in made} == {"version_10"}
            assert all("version_10 was saved" in told for _, told in made)
        assert crew.versions == [20]  # and what was left undone is made up for


def test_wait_tells_all_as_well() -> None:
    with TrainingJob(3) as crew:
        failing(crew, 0, Denied("You may not delete"), "delete", "version_5/manifest.json")

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5), keep=KeepLast(1)):
                m.train_steps(11)
                with pytest.raises(HoldfastError, match="You may not delete"):
                    m.ckpt.wait()
                m.train_steps(16)
            return m.ckpt.wait().step  # type: ignore[union-attr]

        assert crew.run(work) == [15] * 3


def test_a_save_on_demand_that_fails_raises_on_all() -> None:
    with TrainingJob(3) as crew:
        failing(crew, 1, NoSpace("The disk is full"), "put", ".safetensors")

        def work(m: TrainingRank) -> int:
            with m.make_checkpointer(save=EverySteps(100), on_error="warn"):
                m.train_steps(3)
                with pytest.raises((NoSpace, RankFailed), match="The disk is full"):
                    m.ckpt.save()
                return m.ckpt.save().step

        assert crew.run(work) == [3] * 3


def test_a_save_of_which_nobody_knows_is_found_when_it_is_made_again() -> None:
    """The manifest is there, but the answer of the store was lost."""
    with TrainingJob(3) as crew:
        lost = [Unavailable("No answer")]

        def lose(method: str, key: str) -> None:
            if method == "put_if_absent" and key.endswith("manifest.json") and lost:
                raise lost.pop()

        crew.ranks[0].store.after = lose

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(100)):
                m.train_steps(3)
                with pytest.raises((Unavailable, RankFailed)) as e:
                    m.ckpt.save()
                found = m.ckpt.save()
                m.train_steps(5)
                return e.value.outcome, found.step, found.digest, m.ckpt.save().step

        made = crew.run(work)
        assert len(set(made)) == 1
        assert (made[0][0], made[0][1], made[0][3]) == ("unknown", 3, 5)
        assert crew.versions == [3, 5]


# -- calls that not all ranks make ---------------------------------------------------------------


def test_a_rank_that_does_not_resume_is_told_at_once() -> None:
    with TrainingJob(3, lockstep=False) as crew:

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                if m.rank != 1:
                    m.ckpt.resume()
                m.train_steps(3)

        began = time.monotonic()
        made = crew.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.silent
        assert all(isinstance(o, RankFailed) for o in made), made
        assert all("run different operations at the same time" in str(o) for o in made)


def test_a_rank_that_saves_alone_is_told_when_the_others_save() -> None:
    with TrainingJob(3, lockstep=False) as crew:

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(7)
                if m.rank == 0:
                    m.ckpt.save()
                m.train_steps(12)

        began = time.monotonic()
        made = crew.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.silent
        assert all(isinstance(o, RankFailed) for o in made), made
        assert all("version_7" in str(o) and "version_10" in str(o) for o in made), made
        assert crew.versions == [5]


def test_a_state_that_comes_apart_raises_on_all() -> None:
    """One rank's "same" is no longer that of the others."""
    with TrainingJob(3) as crew:

        def work(m: TrainingRank) -> int:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(4)
                if m.rank == 1:
                    m.state["same"] += 1
                with pytest.raises(PlanError, match="A tensor of the state is not the same"):
                    m.train_steps(9)
                return m.ckpt.current_step

        assert crew.run(work) == [5] * 3


# -- an exception in the training ----------------------------------------------------------------


def raises(
    m: TrainingRank, at: int, ranks: tuple[int, ...], error: BaseException, **given: Any
) -> Any:
    policy = EverySteps(100) | OnException()
    with m.make_checkpointer(save=policy, **given):
        m.train_steps(at)
        m.state["same"] += 1 if m.rank in ranks else 0
        if m.rank in ranks:
            raise error
        m.train_steps(at + 3)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_where_all_raise_the_state_before_is_saved(kind: type[BaseException]) -> None:
    with TrainingJob(3) as crew, warnings.catch_warnings():
        warnings.simplefilter("error")
        made = crew.outcomes(lambda m: raises(m, 7, (0, 1, 2), kind("NaN")))
        assert [type(o) for o in made] == [kind] * 3
        assert [getattr(o, "__notes__", None) for o in made] == [None] * 3
        [snapshot] = Run(crew.inner).snapshots()
        assert (snapshot.step, snapshot.metadata["reason"]) == (7, "exception")
        crew.train(9, save=EverySteps(5))
        assert all(matches_uninterrupted(m.state, m.rank, 3, 9) for m in crew.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_where_one_raises_nothing_is_saved_and_that_is_told(victim: int) -> None:
    """The others are held up in an all-reduce that never ends, or are ended."""
    with TrainingJob(3) as crew, mock.patch("holdfast.training.exception_save.JOIN_TIMEOUT", 1.0):
        began = time.monotonic()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            made = crew.outcomes(lambda m: raises(m, 7, (victim,), ValueError("NaN")))
        assert time.monotonic() - began < 6
        assert isinstance(made[victim], ValueError)
        [note] = made[victim].__notes__
        assert "the state after step 7 was not saved" in note
        assert all(isinstance(o, BaseException) for o in made)
        assert crew.versions == []


def test_where_ranks_raise_in_different_steps() -> None:
    with TrainingJob(3, lockstep=False) as crew, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        made = crew.outcomes(lambda m: raises(m, 7 + (m.rank == 2), (0, 1, 2), ValueError("NaN")))
        assert [type(o) for o in made] == [ValueError] * 3
        for outcome in made:
            [note] = outcome.__notes__
            assert "The ranks did not raise in the same step" in note
            assert "found step 8 on rank 2" in note
        assert crew.versions == []


@pytest.mark.slow
def test_where_the_state_is_gone_on_one_rank_none_waits() -> None:
    """Rank 1 has changed its state by the time that it raises: nobody saves, and nobody hangs."""
    torch.optim.SGD([torch.zeros(1)])  # the first takes seconds, since it imports much
    with TrainingJob(2) as crew, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")

        def work(m: TrainingRank) -> None:
            model = torch.nn.Linear(2, 2)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = {**initial_state(m.rank, 2), "model": model, "optimizer": optimizer}
            with m.make_checkpointer(save=EverySteps(100) | OnException(), state=state):
                m.train_steps(5)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                if m.rank == 1:
                    optimizer.step()
                raise ValueError("NaN")

        began = time.monotonic()
        made = crew.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert [type(o) for o in made] == [ValueError] * 2
        for outcome in made:
            [note] = outcome.__notes__
            assert "(on rank 1)" in note
        assert crew.versions == []


@pytest.mark.slow
def test_a_save_in_flight_that_is_slow_does_not_cost_the_last_one() -> None:
    """The ranks have 20 s to come, but a save in flight may take longer than that on one."""
    with TrainingJob(2) as crew, mock.patch("holdfast.training.exception_save.JOIN_TIMEOUT", 0.5):
        until = threading.Event()

        def hold(method: str, key: str) -> None:
            if method == "commit" and "version_5/" in key:
                until.wait(20)

        crew.set_before_call(1, hold)
        threading.Timer(1.5, until.set).start()

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5) | OnException()):
                m.train_steps(7)
                raise ValueError("NaN")

        assert [type(o) for o in crew.outcomes(work)] == [ValueError] * 2
        assert crew.versions == [5, 7]


# -- ranks that leave ----------------------------------------------------------------------------


def test_a_rank_that_leaves_early_holds_nobody_up() -> None:
    """Between saves nobody misses it; the next save names it."""
    with TrainingJob(3, lockstep=False) as crew:

        def work(m: TrainingRank) -> int:
            m.train(7 if m.rank == 2 else 60, save=EverySeconds(600))
            return m.ckpt.current_step

        assert crew.run(work) == [60, 60, 7]
        assert crew.leftover_keys() == []


@pytest.mark.slow
def test_a_rank_that_has_ended_is_missed_at_once() -> None:
    with TrainingJob(3, lockstep=False) as crew:

        def work(m: TrainingRank) -> int:
            try:
                m.train(7 if m.rank == 2 else 60, save=EverySteps(5))
            finally:
                if m.rank == 2:
                    crew.group.groups[2].kv.close()  # as at the end of its process
            return m.ckpt.current_step

        began = time.monotonic()
        made = crew.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert made[2] == 7
        for outcome in made[:2]:
            assert isinstance(outcome, RankFailed)
            assert outcome.rank == 2
        assert crew.versions == [5]


@pytest.mark.slow
def test_a_rank_that_dies_in_the_training_is_named() -> None:
    with TrainingJob(3, lockstep=False) as crew:
        steps = threading.Event()

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(7)
                m.ckpt.wait()
                if m.rank == 1:
                    crew.group.views[1].disconnect()
                    steps.wait(30)
                    return
                try:
                    m.train_steps(60)
                finally:
                    if m.rank == 0:
                        steps.set()

        began = time.monotonic()
        made = crew.outcomes(work)
        assert time.monotonic() - began < 3 * SHORT_TIMEOUTS.stuck
        for outcome in (made[0], made[2]):
            assert isinstance(outcome, RankFailed)
            assert outcome.rank == 1
        assert crew.versions == [5]


# -- incremental, overlap ------------------------------------------------------------------------


def test_incremental_versions_and_full_ones() -> None:
    frozen = {"frozen": 7.0}
    with TrainingJob(3) as crew:

        def state(m: TrainingRank) -> dict[str, Any]:
            import numpy as np

            rows = np.array_split(np.arange(999), 3)[m.rank]
            part = np.repeat(rows[:, None] * frozen["frozen"], 40, axis=1)
            boxed = holdfast.Boxed(part, (int(rows[0]), 0), (999, 40))
            return {**initial_state(m.rank, 3), "frozen": boxed}

        def work(m: TrainingRank) -> None:
            m.train(31, state=state(m), save=EverySteps(5), incremental=True, full_every=3)

        crew.run(work)
        chains = [s.chain for s in Run(crew.inner).snapshots()]
        assert chains == [0, 1, 2, 0, 1, 2]
        for snapshot in Run(crew.inner).snapshots():
            report = snapshot.verify()
            assert report.ok, report.problems
        # the others have read the manifest and the index of their own shard of the base
        for m in crew.ranks[1:]:
            reads = [
                c for c in m.calls_without_pin_checks() if c[0] in ("get", "list", "stat", "delete")
            ]
            assert len(reads) == 3 * 4, reads
        crew.run(work)
        assert [m.resumed.step for m in crew.ranks] == [30] * 3


def test_a_base_that_cannot_be_read_costs_a_full_save_or_raises_on_all() -> None:
    """A rank that alone cannot read what the others refer to does not leave them waiting."""
    with TrainingJob(3) as crew:
        failing(crew, 2, Unavailable("Gone"), "get", "version_5/")

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5), incremental=True):
                with pytest.raises(CommitError if m.rank != 2 else Unavailable, match="Gone"):
                    m.train_steps(22)
                at = m.ckpt.current_step
                m.train_steps(22)
            return at

        began = time.monotonic()
        assert crew.run(work) == [15] * 3
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert crew.versions == [5, 16, 20]


def test_a_base_that_was_deleted_costs_a_full_save() -> None:
    with TrainingJob(2) as crew:

        def pace() -> None:
            if crew.ranks[0].ckpt.current_step == 7:
                crew.wait_for_saves()
                Run(crew.inner).delete(Version(5, 0))

        crew.before_step = pace
        crew.train(12, save=EverySteps(5), incremental=True)
        [snapshot] = Run(crew.inner).snapshots()
        assert (snapshot.step, snapshot.chain) == (10, 0)


@pytest.mark.slow
def test_overlap() -> None:
    with TrainingJob(2) as crew:

        def work(m: TrainingRank) -> Any:
            torch.manual_seed(0)
            model = torch.nn.Linear(30, 30)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(1.0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            progress = holdfast.Progress()
            state = {"model": model, "optimizer": optimizer, "progress": progress}
            with holdfast.Checkpointer(m.store, state, save=EverySteps(3), overlap=True) as ckpt:
                ckpt.resume()
                while progress.step < 10:
                    crew.wait_for_step(m.rank)
                    for p in model.parameters():
                        p.grad = torch.full_like(p, progress.step + 1.0)
                    optimizer.step()
                    ckpt.step()
            return model.weight.detach().clone()

        first = crew.run(work)
        assert torch.equal(*first)
        assert crew.versions == [3, 6, 9]
        assert torch.equal(*crew.run(work))
