"""One training of many ranks: they save at the same steps, whatever tells that a save is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import holdfast
from holdfast.errors import HoldfastError, PlanError, StoreError
from holdfast.format import names
from holdfast.format.records import Pin, encode_pin
from holdfast.run.policy import (
    EveryEpoch,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepLast,
    PolicyInput,
    SavePolicy,
    StopWhen,
)
from holdfast.run.run import Run
from holdfast.run.save_request import put_request, read_request
from tests.ranks.trainings import TrainingJob, TrainingRank, initial_state, matches_uninterrupted

WRITES = {"put", "write_at", "commit", "put_if_absent"}


@contextmanager
def clocks(tell: Callable[[int], float]) -> Iterator[None]:
    """Each rank has a clock of its own for its cadence."""

    def monotonic() -> float:
        return tell(int(threading.current_thread().name.partition("-")[2]))

    with mock.patch("holdfast.training.cadence.time", SimpleNamespace(monotonic=monotonic)):
        yield


@contextmanager
def noted() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The events of all ranks."""
    seen: list[tuple[str, dict[str, Any]]] = []
    with holdfast.attach(lambda name, fields: seen.append((name, fields))):
        yield seen


def sleepy() -> None:
    """The step takes as long as the watchers need to see something."""
    time.sleep(0.01)


# -- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_steps_need_no_agreement(size: int) -> None:
    with TrainingJob(size, lockstep=False) as crew:
        agreed = []
        for view in crew.group.views:
            view.before = lambda method, key: (
                agreed.append(key) if "training" in key and method != "check" else None
            )
        crew.train(23, save=EverySteps(5))
        assert crew.versions == [5, 10, 15, 20]
        assert all(m.saved_steps == [5, 10, 15, 20] for m in crew.ranks)
        # but for the end, when each says that it trains no more
        assert not [key for key in agreed if not key.endswith(("/1", "/left"))]
        assert crew.leftover_keys() == []
        report = Run(crew.inner).open(names.Version(20, 0)).verify()
        assert report.ok, report.problems


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_resumed_is_what_was_saved(size: int) -> None:
    with TrainingJob(size) as crew:
        crew.train(23, save=EverySteps(5))
        crew.train(31, save=EverySteps(5))
        assert [m.resumed.step for m in crew.ranks] == [20] * size
        assert all(matches_uninterrupted(m.state, m.rank, size, 31) for m in crew.ranks)
        assert crew.versions == [5, 10, 15, 20, 25, 30]
        reasons = [s.metadata["reason"] for s in Run(crew.inner).snapshots()]
        assert reasons == ["cadence"] * 6


def test_epochs_need_no_agreement() -> None:
    with TrainingJob(3) as crew:

        def work(m: TrainingRank) -> None:
            sampler = holdfast.ElasticSampler(50, 12, rank=m.rank, ranks=3)
            with m.make_checkpointer(
                save=EveryEpoch(2), state={**initial_state(m.rank, 3), "s": sampler}
            ):
                m.ckpt.resume()
                for _ in range(5):
                    for _ in sampler:
                        m.train_steps(m.ckpt.current_step + 1)
                    m.state["progress"].epoch += 1

        crew.run(work)
        assert crew.versions == [10, 20]


@pytest.mark.slow
def test_only_the_clock_of_rank_0_counts() -> None:
    """The others' clocks run backwards, stand still, or tell centuries."""
    now = [0.0]

    def tell(rank: int) -> float:
        return (now[0], 1e9 * now[0], -now[0], 7.0)[rank]

    with TrainingJob(4) as crew, clocks(tell):

        def pace() -> None:
            sleepy()
            now[0] += 1

        crew.before_step = pace
        crew.train(310, save=EverySeconds(60))
        steps = crew.versions
        assert 2 <= len(steps) <= 5, steps
        assert all(m.saved_steps == steps for m in crew.ranks)
        assert steps[0] >= 60
        assert all(b - a >= 60 for a, b in pairwise(steps))
        assert crew.leftover_keys() == []


@pytest.mark.slow
def test_a_save_between_answers_what_the_clock_has_asked_for() -> None:
    """The clock asks while the ranks come to a multiple of steps: one save is enough."""
    now = [0.0]
    with TrainingJob(2) as crew, clocks(lambda rank: now[0] if rank == 0 else 0.0):
        proposed = threading.Event()

        def pace() -> None:
            sleepy()
            step = crew.ranks[0].ckpt.current_step
            if step == 38:
                now[0] += 1000  # due at the end of step 39; 40 saves; agreed is some later step
                proposed.set()

        crew.before_step = pace
        crew.train(150, save=EverySteps(40) | EverySeconds(500))
        assert proposed.is_set()
        # agreed at 39 only if the watchers were quick beyond what they promise
        assert crew.versions in ([40, 80, 120], [39, 40, 80, 120])
        assert all(m.saved_steps == crew.versions for m in crew.ranks)


class Odd(SavePolicy):
    """Due at some steps, and by the clock."""

    def due(self, now: PolicyInput) -> bool:
        return now.step % 7 == 3 or now.seconds - now.last_seconds > 5


def test_policies_of_ones_own_and_combined() -> None:
    with TrainingJob(2) as crew, clocks(lambda rank: 0.0):
        crew.train(20, save=Odd() | EverySteps(10) | EverySeconds(600))
        assert crew.versions == [3, 10, 17, 20]


# -- one is in flight ----------------------------------------------------------------------------


def slow(crew: TrainingJob, rank: int, until: threading.Event) -> None:
    """The store of a rank takes its time for a shard."""

    def wait(method: str, key: str) -> None:
        if method == "commit" and key.endswith(".safetensors"):
            until.wait(20)

    crew.set_before_call(rank, wait)


@pytest.mark.parametrize("rank", [0, 2])
def test_busy_wait(rank: int) -> None:
    with TrainingJob(3) as crew, noted() as events:
        until = threading.Event()
        slow(crew, rank, until)

        def release() -> None:  # when all have come to the save that is due
            while not all(hasattr(m, "ckpt") and m.ckpt.current_step >= 10 for m in crew.ranks):
                time.sleep(0.01)
            time.sleep(1)
            until.set()

        crew.before_step = lambda: releasing.start() if not releasing.ident else None
        releasing = threading.Thread(target=release)
        crew.train(16, save=EverySteps(5))
        assert crew.versions == [5, 10, 15]
        waited = [f["step"] for name, f in events if name == "save_waited"]
        assert set(waited) <= {10, 15}
        assert len([s for s in waited if s == 10]) == 3


@pytest.mark.parametrize("rank", [0, 2])
def test_busy_skip(rank: int) -> None:
    """What was left out is made up for as soon as there is room, as by one process."""
    with TrainingJob(3) as crew, noted() as events:
        until = threading.Event()
        slow(crew, rank, until)

        def pace() -> None:
            if crew.ranks[0].ckpt.current_step == 65:
                until.set()
                crew.wait_for_saves()
            if crew.ranks[0].ckpt.current_step > 65:
                sleepy()

        crew.before_step = pace
        crew.train(118, save=EverySteps(20), busy="skip")
        skipped = sorted(f["step"] for name, f in events if name == "save_skipped")
        assert skipped[:6] == [40] * 3 + [60] * 3
        assert len(skipped) == 6
        first, second, *others = crew.versions
        assert first == 20
        assert 66 <= second <= 80
        assert others == ([80, 100] if second < 80 else [100])
        assert all(m.saved_steps == crew.versions for m in crew.ranks)
        assert [m.ckpt.statistics()["skipped"] for m in crew.ranks] == [2, 2, 2]


@pytest.mark.slow
def test_what_is_asked_for_is_not_skipped() -> None:
    """One rank was asked for a save, and is alone with that, at a step at which all leave one out
    since another is in flight."""
    with TrainingJob(2) as crew:
        until = threading.Event()
        slow(crew, 1, until)

        def pace() -> None:
            step = crew.ranks[0].ckpt.current_step
            if step == 19:
                crew.ranks[1].ckpt._watcher._signalled = True
            if step > 19:
                sleepy()

        crew.before_step = pace
        threading.Timer(1, until.set).start()
        crew.train(98, save=EverySteps(10), busy="skip")
        assert crew.versions[0] == 10
        assert 20 not in crew.versions
        assert [m.saved_steps for m in crew.ranks] == [crew.versions] * 2
        assert [m.ckpt._watcher.pending_request for m in crew.ranks] == [None] * 2


# -- asked for from outside ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_is_answered_once() -> None:
    with TrainingJob(3) as crew:

        def pace() -> None:
            sleepy()
            if crew.ranks[0].ckpt.current_step == 10:
                put_request(crew.inner, "0123456789ab")

        crew.before_step = pace
        with mock.patch(
            "holdfast.run.save_request.RequestWatcher.__init__.__defaults__", (0.02, None)
        ):
            crew.train(150, save=EverySteps(1000))
        assert len(crew.versions) == 1
        assert all(m.saved_steps == crew.versions for m in crew.ranks)
        [snapshot] = Run(crew.inner).snapshots()
        assert snapshot.metadata["reason"] == "request"
        assert read_request(crew.inner) is None
        assert crew.leftover_keys() == []


def test_a_save_says_that_it_answers_a_request_that_came_while_it_waited_to_begin() -> None:
    with TrainingJob(2) as crew:

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                rest = m.ckpt._saver.wait_on_all_ranks

                def late(group: Any) -> Any:
                    if m.rank == 0 and m.ckpt.current_step == 10:
                        put_request(crew.inner, "0123456789ab")
                        m.ckpt._watcher.poll()
                    return rest(group)

                with mock.patch.object(m.ckpt._saver, "wait_on_all_ranks", late):
                    m.train_steps(16)

        crew.run(work)
        reasons = {s.step: s.metadata["reason"] for s in Run(crew.inner).snapshots()}
        assert reasons == {5: "cadence", 10: "request", 15: "cadence"}
        assert read_request(crew.inner) is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1, 2]])
def test_a_signal_on_any_rank(ranks: list[int]) -> None:
    """Or on all of them, as launchers pass them on."""
    with TrainingJob(3) as crew:

        def pace() -> None:
            sleepy()
            if crew.ranks[0].ckpt.current_step == 10:
                for rank in ranks:
                    crew.ranks[rank].ckpt._watcher._signalled = True

        crew.before_step = pace
        crew.train(100, save=EverySteps(1000))
        assert len(crew.versions) == 1
        assert Run(crew.inner).snapshots()[0].metadata["reason"] == "request"
        assert [m.ckpt._watcher.pending_request for m in crew.ranks] == [None] * 3


# -- stopping ------------------------------------------------------------------------------------


def test_rank_0_says_when_to_stop() -> None:
    """The others see other metrics: better ones, worse ones, none at all."""
    with TrainingJob(3) as crew:
        crew.before_step = sleepy

        def work(m: TrainingRank) -> Any:
            def metrics(step: int) -> Any:
                return ({"loss": -float(min(step, 30))}, {"loss": 1.0}, None)[m.rank]

            stop = StopWhen("loss", patience=10)
            m.train(500, metrics, save=EverySteps(4), stop=stop)
            return m.ckpt.current_step, m.ckpt.should_stop

        first = crew.run(work)
        assert len(set(first)) == 1, first
        at, stopped = first[0]
        assert stopped
        assert 40 <= at < 300
        resumed = crew.versions[-1]

        # a resumed training counts on, and all stop at once
        assert len(set(crew.run(work))) == 1
        assert [m.resumed.step for m in crew.ranks] == [resumed] * 3
        assert all(m.ckpt.should_stop for m in crew.ranks)


def test_patience_is_resumed() -> None:
    with TrainingJob(2) as crew:
        crew.before_step = sleepy
        stop = StopWhen("loss", patience=10)
        crew.train(8, lambda step: {"loss": 1.0}, save=EverySteps(4), stop=stop)
        crew.train(300, lambda step: {"loss": 1.0}, save=EverySteps(4), stop=stop)
        ends = {m.ckpt.current_step for m in crew.ranks}
        assert len(ends) == 1
        assert 11 <= ends.pop() < 200


# -- what a person calls -------------------------------------------------------------------------


def test_save_and_metrics_and_wait() -> None:
    with TrainingJob(3) as crew:

        def work(m: TrainingRank) -> Any:
            with m.make_checkpointer(save=EverySteps(5)):
                assert m.ckpt.resume() is None
                assert m.ckpt.wait() is None
                m.train_steps(7)
                first = m.ckpt.wait()
                one = m.ckpt.save({"acc": 10.0 + m.rank})
                again = m.ckpt.save({"acc": 20.0 + m.rank} if m.rank else {"acc": 30.0})
                plain = m.ckpt.save()
                m.train_steps(12)
            return first.step, one.step, again.digest, plain.digest, m.ckpt.statistics()

        made = crew.run(work)
        assert {o[:2] for o in made} == {(5, 7)}
        assert len({d for o in made for d in o[2:4]}) == 1
        assert crew.versions == [5, 7, 10]
        run = Run(crew.inner)
        assert run.open(names.Version(7, 0)).metadata["metrics"] == {"acc": 10.0}
        assert run.metrics(7) == {"acc": 30.0}
        for *_, statistics in made:
            assert statistics["saves"] == 3
            assert statistics["failures"] == 0
            assert 0 <= statistics["goodput"] <= 1


def test_a_save_on_demand_reads_nothing_on_other_ranks() -> None:
    with TrainingJob(3) as crew:

        def work(m: TrainingRank) -> None:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(7)
                m.ckpt.save({"acc": 10.0})
                m.ckpt.save({"acc": 20.0})

        crew.run(work)
        assert crew.versions == [5, 7]
        for m in crew.ranks[1:]:
            assert {method for method, _ in m.calls_without_pin_checks()} == WRITES


def test_metrics_that_cannot_be_added_raise_on_all() -> None:
    with TrainingJob(3) as crew:

        def refuse(method: str, key: str) -> None:
            if "/eval" in key:
                raise StoreError("The disk is full")

        crew.set_before_call(0, refuse)

        def work(m: TrainingRank) -> str:
            with m.make_checkpointer(save=EverySteps(5)):
                m.train_steps(5)
                with pytest.raises(HoldfastError, match="The disk is full"):
                    m.ckpt.save({"acc": 1.0})
                m.train_steps(11)
            return "on"

        assert crew.run(work) == ["on"] * 3
        assert crew.versions == [5, 10]


def test_without_a_progress_and_without_metrics() -> None:
    with TrainingJob(2) as crew:

        def work(m: TrainingRank) -> int:
            m.train(13, state=initial_state(m.rank, 2, progress=False), save=EverySteps(5))
            return m.ckpt.current_step

        assert crew.run(work) == [13, 13]
        assert crew.run(work) == [13, 13]
        assert [m.resumed.step for m in crew.ranks] == [10, 10]


# -- one writer ----------------------------------------------------------------------------------


def test_a_second_job_is_refused_on_all_ranks() -> None:
    with TrainingJob(3) as crew:
        other = Pin("fedcba987654", None, "2026-11-21T00:00:00Z", "elsewhere x", "y", "12:34")
        crew.inner.put_if_absent(names.WRITER_LOCK, encode_pin(other))
        with mock.patch("holdfast.engine.snapshot.pins.is_holder_alive", return_value=True):
            made = crew.outcomes(lambda m: m.train(7, save=EverySteps(5)))
        assert all(isinstance(o, HoldfastError) for o in made), made
        assert all("Another training writes to this run" in str(o) for o in made), made
        assert crew.versions == []


def test_who_is_succeeded_saves_nothing_more_and_all_hear_of_it() -> None:
    """Also with on_error="warn": it is no store that has failed."""
    with TrainingJob(3) as crew:

        def pace() -> None:
            if crew.ranks[0].ckpt.current_step == 7:
                crew.wait_for_saves()
                crew.inner.delete(names.WRITER_LOCK)
                other = Pin("fedcba987654", None, "2026-11-21T00:00:00Z", "else x", "y", "12:34")
                crew.inner.put_if_absent(names.WRITER_LOCK, encode_pin(other))

        crew.before_step = pace
        made = crew.outcomes(lambda m: m.train(30, save=EverySteps(5), on_error="warn"))
        assert all(isinstance(o, HoldfastError) for o in made), made
        assert all("Another training has taken this run over" in str(o) for o in made), made
        assert [m.ckpt.current_step for m in crew.ranks] == [15] * 3
        assert crew.versions == [5]


def test_only_rank_0_looks_after_the_run() -> None:
    """The others touch their own shard and its index, nothing else."""
    with TrainingJob(3) as crew:
        keep = KeepLast(2) | KeepBest(1, "loss")
        losses = {5: 9.0, 10: 1.0}
        crew.train(42, lambda s: {"loss": losses.get(s, 5.0)}, save=EverySteps(5), keep=keep)
        assert crew.versions == [10, 35, 40]
        for m in crew.ranks[1:]:
            calls = m.calls_without_pin_checks()
            assert {method for method, _ in calls} == WRITES
            assert all(f"/shard-{m.rank:05d}" in key for _, key in calls), calls
            # of one save: the shard's put, its two pieces and its commit, and the index
            assert len(calls) == 5 * 8, calls


def test_pins_hold_for_a_group_as_well() -> None:
    with TrainingJob(2) as crew:
        crew.train(12, save=EverySteps(5), keep=KeepLast(1))
        Run(crew.inner).pin(10)
        crew.train(22, save=EverySteps(5), keep=KeepLast(1))
        assert crew.versions == [10, 20]


# -- ranks that are told different things --------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            lambda r: {"save": EverySteps(5 + 2 * r) | EverySeconds(60)},
            r"save=EverySteps\(steps=5\) \| EverySeconds\(seconds=60\).*=7.*rank 1",
        ),
        (lambda r: {"busy": "skip" if r == 2 else "wait"}, "busy='wait'.*'skip' on rank 2"),
        (lambda r: {"on_error": "warn" if r else "raise"}, "on_error='raise'.*rank 1"),
        (lambda r: {"incremental": r > 1}, "incremental=False.*True on rank 2"),
        (lambda r: {"full_every": None if r else 20}, "full_every=20.*None on rank 1"),
        (lambda r: {"overlap": r == 1}, "overlap=False.*True on rank 1"),
    ],
)
def test_unlike_arguments_are_told_at_the_first_step(given: Any, said: str) -> None:
    with TrainingJob(3) as crew:
        began = time.monotonic()
        made = crew.outcomes(lambda m: m.train(20, **given(m.rank)))
        assert time.monotonic() - began < 3
        assert {type(o) for o in made} == {PlanError}, made
        assert len({str(o) for o in made}) == 1
        with pytest.raises(PlanError, match=said):
            raise made[0]
        assert crew.versions == []


def test_policies_whose_words_are_addresses_are_alike() -> None:
    with TrainingJob(2) as crew:
        crew.train(4, save=Odd())
        assert crew.versions == [3]


def test_ranks_at_different_steps_are_told() -> None:
    with TrainingJob(2, lockstep=False) as crew:

        def work(m: TrainingRank) -> None:
            m.make_checkpointer(save=EverySteps(5))
            m.state["progress"].step = 7 * m.rank
            with m.ckpt:
                m.train_steps(20)

        made = crew.outcomes(work)
        assert {type(o) for o in made} == {PlanError}
        assert "current_step=1 on all ranks" in str(made[1])
        assert "current_step=8 on rank 1" in str(made[1])
