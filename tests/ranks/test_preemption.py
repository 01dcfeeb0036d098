"""Notices to trainings of several ranks, in threads.

The numbers are those of BEHAVIOURS.md, section A ("D": section D, "Preemption"). Where each of them
is tested:

| behavior | test |
|---|---|
| 1, 24, 25 | ``test_preemption_processes.py`` |
| 2, 15 | ``test_random_notices_lose_and_repeat_no_step`` |
| 3, 19, 22 | ``test_a_notice_on_one_rank_saves_once_and_all_leave`` |
| 4, 5, 6 | ``test_a_grace_period_saves_twice_on_all_ranks`` |
| 7, 8, 9, 11, 28 | ``test_random_notices_lose_and_repeat_no_step`` |
| 10, 21, 23, 26, 32, 39 | ``test_preemption.py``, ``test_preemption_policy.py`` of tests/training |
| 14 | ``test_ranks_that_finish_before_they_can_leave_do_not_leave`` |
| 12, 13, 29, 30 | ``tests/training/test_preemption_guard.py``, and the guard tests below |
| 16 | ``test_an_error_in_a_guarded_call_is_raised_on_all_ranks`` and the tests after it |
| 17, 33, 34 | ``test_the_functions_of_the_user_are_called_on_all_ranks`` |
| 18, 19 | ``test_a_metadata_server_of_one_rank_stops_all`` |
| 20 | ``test_notices_on_several_ranks_consecutively_change_nothing`` |
| 27 | ``tests/training/test_checkpointer.py`` |
| 31, D | ``test_a_rank_that_does_not_come_is_left_behind_in_time`` |
| 35 | not applicable: no temporary folders |
| 36 | ``test_a_notice_on_one_rank_saves_once_and_all_leave`` (no thread is left) |
| 37 | not applicable: tables are another package |
| 38 | ``tests/notices/test_platform.py``, ``tests/notices/test_watcher.py`` |
| D: second notice | ``test_a_second_notice_may_only_shorten_the_time`` |
| D: deadline too short | ``test_a_deadline_in_the_past_still_saves`` |
| D: during a save, evaluation | ``test_a_notice_during_...`` |
| D: during the first step | ``test_a_notice_before_the_first_step_saves_one_of_the_first_steps`` |
| D: data-loader workers, a stopped rank | ``test_preemption_processes.py`` |
| C1: a data wait | ``test_a_rank_that_waits_for_data_does_not_keep_the_others`` |
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import limpet
from limpet.errors import Preempted, RankFailed
from limpet.format.names import MANIFEST
from limpet.loading.snapshot import reader_of
from limpet.notices import exit_status
from limpet.notices.exit_status import Status
from limpet.preemption import GcpNotice, NoticeSource, Preemption, PreemptionGuard
from limpet.ranks.error_report import format_with_notes
from limpet.ranks.kv import Timeouts
from limpet.run.catalog import read_training_metadata
from limpet.run.policy import AtEnd, EverySteps, OnPreemption
from limpet.run.run import Run
from limpet.training import response, step_savepoint
from tests.notices.announced import Announced
from tests.notices.metadata_servers import GcpServer
from tests.ranks.trainings import TrainingJob, matches_uninterrupted, train_step
from tests.waiting import check_at_once, wait_until, wait_until_no_thread

NEVER_DUE = EverySteps(10**9)
LONG = 100_000


@pytest.fixture(autouse=True)
def process_ends(monkeypatch):
    """Record the ends of the process instead of ending pytest."""
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append((code, why)))
    return ends


class NoticedJob(TrainingJob):
    """A training in which each rank has its own source of notices. A step takes about 1 ms.

    Without ``lockstep``, ranks with a larger number are slower.
    """

    def __init__(self, size, lockstep=True, **options):
        super().__init__(size, lockstep=lockstep, **options)
        self.sources = [Announced() for _ in range(size)]
        self.actions: dict[int, Callable[[], object]] = {}
        self.before_step = self._act

    def _act(self):
        """On rank 0, before each step: call what is planned for the step."""
        step = self.ranks[0].ckpt.current_step
        for planned in [s for s in self.actions if s <= step]:
            self.actions.pop(planned)()

    def wait_for_step(self, rank):
        super().wait_for_step(rank)
        time.sleep(0.001 * (1 + 0.2 * rank))

    def preemption(self, rank, **settings):
        sources: list[NoticeSource] = [self.sources[rank]]
        return Preemption(**{"notices": sources, **settings})

    def train_until_noticed(self, last_step=LONG, save=None, **settings):
        """Return the outcome of each rank: the version from which it resumed, or an exception."""
        save = NEVER_DUE if save is None else save

        def work(rank):
            preemption = self.preemption(rank.rank, **settings)
            return rank.train(last_step, save=save, preemption=preemption)

        if self._barrier is not None:
            self._barrier.reset()
        return self.outcomes(work)

    def wait_for_deadline(self):
        """Wait until every rank knows of the notice. Each rank may call it."""
        wait_until(lambda: all(r.ckpt._preemption.is_pending for r in self.ranks))

    def expect_steps_of(self, seconds):
        """Let the deadline budget of each rank be that of a training with long steps."""
        for rank in self.ranks:
            for _ in range(100):
                rank.ckpt._goodput.step_durations.add(seconds)

    def reasons(self):
        return [s.metadata["reason"] for s in Run(self.inner).snapshots()]


@pytest.fixture
def make_job():
    jobs: list[NoticedJob] = []

    def make(size, **options):
        jobs.append(NoticedJob(size, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.group.close()


def assert_left(outcomes, code=75):
    """Assert that all ranks left with ``code`` after the same step, and return the step."""
    assert [type(o) for o in outcomes] == [Preempted] * len(outcomes), outcomes
    assert {o.code for o in outcomes} == {code}
    (step,) = {o.step for o in outcomes}
    if code == 75:
        assert {o.saved_step for o in outcomes} == {step}
    return step


def saver_of(rank):
    return rank.ckpt._preemption._savepoint_saver


@pytest.fixture
def earlier_threads():
    """Return the threads that other tests of this process have left."""
    return set(threading.enumerate())


def assert_no_threads(earlier):
    names = ("limpet-notices", "limpet-signals", "limpet-deadline", "limpet-agree")
    wait_until_no_thread(*names, earlier=earlier)


@pytest.mark.parametrize("noticed", range(3))
@pytest.mark.parametrize("lockstep", [True, False])
def test_a_notice_on_one_rank_saves_once_and_all_leave(
    noticed, lockstep, earlier_threads, make_job, capsys
):
    """3, 19, 22, 36. Without lockstep, ranks run ahead of each other by many steps (D)."""
    job = make_job(3, lockstep=lockstep)
    job.actions[5] = job.sources[noticed].announce
    step = assert_left(job.train_until_noticed(grace=0, save=OnPreemption()))
    assert job.versions == [step]
    assert job.reasons() == ["preemption"]
    assert all(matches_uninterrupted(r.state, r.rank, 3, step) for r in job.ranks)
    assert job.leftover_keys() == []
    assert capsys.readouterr().err.count("stopped after step") == 1
    assert_no_threads(earlier_threads)


@pytest.mark.slow
def test_a_grace_period_saves_twice_on_all_ranks(make_job):
    """4, 5, 6"""
    job = make_job(3)
    job.actions[5] = lambda: job.sources[1].announce(60.0)
    began = time.monotonic()
    step = assert_left(job.train_until_noticed(grace=5))
    assert time.monotonic() - began < 6
    first, second = job.versions
    assert second == step > first + 20
    assert job.reasons() == ["preemption"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_notices_lose_and_repeat_no_step(seed, make_job):
    """2, 7, 8, 9, 11, 15, 28: a random rank, a random step, several restarts in one process."""
    draw = random.Random(seed)
    job = make_job(draw.choice((2, 4)), lockstep=draw.random() < 0.5)
    step = 0
    for _ in range(3):
        job.actions[step + draw.randint(0, 20)] = draw.choice(job.sources).announce
        outcomes = job.train_until_noticed(save=draw.choice((NEVER_DUE, EverySteps(7))))
        assert all(r.resumed is None or r.resumed.step == step for r in job.ranks)
        step = assert_left(outcomes)
        job.actions.clear()
    results = job.train_until_noticed(last_step=step + 10, save=AtEnd())
    assert {r.step for r in results} == {step}
    size = len(job.ranks)
    assert all(matches_uninterrupted(r.state, r.rank, size, step + 10) for r in job.ranks)


@pytest.mark.parametrize("grace", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_notices_on_several_ranks_consecutively_change_nothing(grace, make_job):
    """20"""
    job = make_job(3)
    for step, source in zip((5, 6, 8), job.sources):
        job.actions[step] = lambda source=source: source.announce(60.0)
    step = assert_left(job.train_until_noticed(grace=grace))
    assert job.reasons() == ["preemption"] * (2 if grace else 1)
    assert job.versions[-1] == step


@pytest.mark.slow
def test_a_second_notice_may_only_shorten_the_time(make_job):
    """32, D: rank 2 learns that there is less time than rank 0 knew."""
    job = make_job(3)
    job.actions[5] = lambda: job.sources[0].announce(3600.0)
    job.actions[50] = lambda: job.sources[1].announce(7200.0)
    job.actions[100] = lambda: job.sources[2].announce(5.0)
    began = time.monotonic()
    step = assert_left(job.train_until_noticed(grace=3600))
    assert time.monotonic() - began < 8
    assert step > 100
    assert job.reasons() == ["preemption"] * 2


@pytest.mark.parametrize("noticed", [1, 2])
@pytest.mark.parametrize("ended", [False, True])
def test_ranks_that_finish_before_they_can_leave_do_not_leave(
    ended, noticed, earlier_threads, make_job, process_ends
):
    """14: rank 0 has made its last step, or has also ended, when another rank gets the notice. The
    other ranks make their last steps too."""
    job = make_job(3, lockstep=False)
    finished, refused = threading.Event(), threading.Event()

    def finish_first(rank):
        rank.train_steps(20)
        if not ended:
            finished.set()
            job.wait_for_deadline()

    def get_notice(rank):
        rank.train_steps(15)
        assert finished.wait(20)
        response = rank.ckpt._preemption
        on_failure = response.on_failure
        response.on_failure = lambda *args: (on_failure(*args), refused.set())
        if rank.rank == noticed:
            job.sources[noticed].announce()
        if ended:
            assert refused.wait(20)
        else:
            job.wait_for_deadline()
        rank.train_steps(20)

    def work(rank):
        save = NEVER_DUE if ended else AtEnd()
        with rank.make_checkpointer(save=save, preemption=job.preemption(rank.rank)):
            rank.ckpt.resume()
            get_notice(rank) if rank.rank else finish_first(rank)
        finished.set()

    assert job.outcomes(work) == [None] * 3
    assert [r.ckpt.current_step for r in job.ranks] == [20] * 3
    assert job.versions == ([] if ended else [20])
    assert job.reasons() == ([] if ended else ["end"])
    assert process_ends == []
    assert_no_threads(earlier_threads)


def test_a_deadline_in_the_past_still_saves(make_job):
    """D: the process is alive, so the training takes 5 s for its save."""
    job = make_job(3)
    job.actions[5] = lambda: job.sources[1].announce(-60.0)
    step = assert_left(job.train_until_noticed())
    assert job.versions == [step]


def test_a_notice_before_the_first_step_saves_one_of_the_first_steps(make_job):
    """D: it comes while the ranks have no agreement yet."""
    job = make_job(3)

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)):
            rank.ckpt.resume()
            if rank.rank == 1:
                job.sources[1].announce()
                wait_until(lambda: rank.ckpt._preemption._deadline is not None)
            rank.train_steps(LONG)

    step = assert_left(job.outcomes(work))
    assert job.versions == [step]


def test_a_notice_during_a_save_waits_for_it(make_job):
    """D: the save in flight is committed, and the last step after it."""
    job = make_job(3)
    begun = threading.Event()

    def slow(method, key):
        if method == "put_if_absent" and "manifest" in key and not begun.is_set():
            begun.set()
            job.sources[1].announce()
            job.wait_for_deadline()
            time.sleep(0.2)

    job.set_before_call(0, slow)
    step = assert_left(job.train_until_noticed(save=EverySteps(5)))
    assert begun.is_set()
    assert job.versions[0] == 5
    assert job.versions[-1] == step
    assert job.reasons()[-1] in ("preemption", "cadence")


def test_a_notice_during_an_evaluation_saves_at_the_next_step(make_job):
    """D"""
    job = make_job(3)

    def evaluate():
        job.sources[2].announce()
        wait_until(lambda: job.ranks[2].ckpt._preemption._deadline is not None)
        time.sleep(0.3)

    job.actions[5] = evaluate
    step = assert_left(job.train_until_noticed())
    assert 5 < step < 20
    assert job.versions == [step]


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_for_data_does_not_keep_the_others(waiting, make_job, monkeypatch):
    """C1: its loader blocks, so it reaches no gate, and the others wait for it as in an all-reduce.
    The threads of all ranks save the last step meanwhile."""
    monkeypatch.setattr(step_savepoint, "SHARE", 1e9)  # the steps are short
    job = make_job(3)
    arrive = job.wait_for_step

    def wait_for_step(rank):
        if rank == waiting and job.ranks[rank].ckpt.current_step == 5:
            job.expect_steps_of(60.0)
            job.sources[2].announce(30.0)
            wait_until(lambda: all(saver_of(r).saved_step == 5 for r in job.ranks))
        arrive(rank)

    with monkeypatch.context() as patch:
        patch.setattr(job, "wait_for_step", wait_for_step)
        outcomes = job.train_until_noticed()
    assert [type(o) for o in outcomes] == [Preempted] * 3, outcomes
    assert {(o.code, o.step, o.saved_step) for o in outcomes} == {(75, 6, 5)}
    assert job.versions == [5]
    assert job.reasons() == ["preemption"]
    assert [r.step for r in job.train_until_noticed(last_step=9, save=AtEnd())] == [5] * 3
    assert all(matches_uninterrupted(r.state, r.rank, 3, 9) for r in job.ranks)


def test_the_functions_of_the_user_are_called_on_all_ranks(make_job):
    """17, 33, 34"""
    job = make_job(3)
    calls: list[str] = []
    job.actions[5] = job.sources[1].announce
    results = job.train_until_noticed(
        exit_fn=lambda: calls.append("exit"), save_fn=lambda: calls.append("save")
    )
    assert results == [None] * 3  # the loops have ended, because should_stop is True
    assert sorted(calls) == ["exit"] * 3 + ["save"] * 3
    assert job.versions == []
    (step,) = {r.ckpt.current_step for r in job.ranks}
    assert step < 100


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("x"), OSError(28, "No space"), KeyError("x"), Interrupt("x")],
    ids=repr,
)
@pytest.mark.parametrize("failing", [0, 2])
def test_no_rank_leaves_as_saved_if_the_function_of_one_rank_fails(
    error, failing, make_job, capsys
):
    """17: the others have saved by themselves, but no program could continue from that."""
    job = make_job(3)

    def work(rank):
        def save():
            if rank.rank == failing:
                raise error

        preemption = job.preemption(rank.rank, save_fn=save)
        return rank.train(LONG, save=NEVER_DUE, preemption=preemption)

    job.actions[5] = job.sources[1].announce
    outcomes = job.outcomes(work)
    assert outcomes.pop(failing) is error
    kind = type(error) if isinstance(error, Exception) else RankFailed
    assert [type(o) for o in outcomes] == [kind] * 2
    assert all(f"rank {failing}" in format_with_notes(o) for o in outcomes)
    assert "save_fn has saved" not in capsys.readouterr().err


def test_the_error_of_the_function_is_raised_also_in_a_save_of_another_rank(make_job):
    """They are in different operations, which is no mistake of the program."""
    job = make_job(2)

    def work(rank):
        def save():
            if rank.rank == 1:
                raise OSError("disk")
            rank.ckpt.save()

        return rank.train(LONG, save=NEVER_DUE, preemption=job.preemption(rank.rank, save_fn=save))

    job.actions[5] = job.sources[0].announce
    outcomes = job.outcomes(work)
    assert [(type(o), str(o)) for o in outcomes] == [(OSError, "disk")] * 2
    assert job.versions == []


def test_a_rank_whose_function_takes_long_is_no_mistake_of_the_program(make_job, monkeypatch):
    """The others say that they wait, without the advice for a call that one rank does not make."""
    monkeypatch.setattr("limpet.ranks.failure_detector.STRAGGLER_SECONDS", 0.1)
    job, has_waited = make_job(2), threading.Event()

    def work(rank):
        def save():
            if rank.rank == 1:
                assert has_waited.wait(20)

        return rank.train(LONG, save=NEVER_DUE, preemption=job.preemption(rank.rank, save_fn=save))

    def see(name, fields):
        if name == "ranks_awaited":
            waits.append(fields)
            has_waited.set()

    waits = list[dict[str, Any]]()
    job.actions[5] = job.sources[0].announce
    with limpet.attach(see):
        outcomes = job.outcomes(work)
    assert [type(outcome) for outcome in outcomes] == [Preempted] * 2
    assert [(w["ranks"], w["what"], w["todo"]) for w in waits] == [([1], "save_fn", "")]


def test_a_metadata_server_of_one_rank_stops_all(make_job):
    """18, 19: a polled notice reaches all ranks, as a signal does."""
    job = make_job(3)
    with GcpServer() as server:
        source = GcpNotice(server.url)
        source.interval = 0.05

        def work(rank):
            own = source if rank.rank == 2 else job.sources[rank.rank]
            return rank.train(LONG, save=NEVER_DUE, preemption=Preemption(notices=[own]))

        job.actions[20] = server.announce
        step = assert_left(job.outcomes(work))
    assert job.versions == [step]
    assert step > 20


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_left_behind_in_time(process_ends, make_job):
    """31, D: a rank hangs in its step. The others leave with 76, before the deadline."""
    check_at_once(check_left_behind, [(late, make_job(3, lockstep=False)) for late in (0, 2)])


def check_left_behind(late, job):
    released = threading.Event()

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)):
            rank.ckpt.resume()
            rank.train_steps(5)
            if rank.rank == (late + 1) % 3:
                job.sources[rank.rank].announce(5.0)
            if rank.rank == late:
                released.wait(20)
                return
            try:
                while True:
                    rank.train_steps(rank.ckpt.current_step + 1)
                    time.sleep(0.001)
            finally:
                left_at.append(time.monotonic())
                if len(left_at) == 2:
                    released.set()

    left_at: list[float] = []
    began = time.monotonic()
    outcomes = job.outcomes(work)
    others = [o for r, o in enumerate(outcomes) if r != late]
    assert [type(o) for o in others] == [Preempted] * 2, outcomes
    assert [o.code for o in others] == [76] * 2
    assert max(left_at) - began < 5.5
    assert job.versions == []


def guarded(job, work, block=True):
    """Run ``work`` on each rank with a guard. Without ``block``, there is no ``with`` block."""

    def run_rank(rank):
        ckpt = rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank))
        if block:
            with ckpt:
                ckpt.resume()
                return work(rank, PreemptionGuard(ckpt))
        try:
            return work(rank, PreemptionGuard(ckpt))
        finally:
            ckpt._preemption.close()
            ckpt.close()

    return job.outcomes(run_rank)


@pytest.mark.slow
@pytest.mark.parametrize("block", [True, False])
def test_functions_of_many_steps_are_left_at_the_end_of_the_same_call(block, make_job):
    """12: the number of calls counts, and a rank may make its steps long before another one."""
    job = make_job(3, lockstep=False)

    def train_steps(rank):
        for number in range(4):
            train_step(rank.state, rank.ckpt.current_step + 1)
            rank.ckpt.step()
            time.sleep(0.001 * rank.rank)
            if rank.rank == 2 and rank.ckpt.current_step == 10 and number == 1:
                job.sources[2].announce()

    def work(rank, guard):
        while True:
            guard.run(train_steps, rank)

    step = assert_left(guarded(job, work, block))
    assert step % 4 == 0
    assert job.versions == [step]
    (snapshot,) = Run(job.inner).snapshots()
    assert read_training_metadata(reader_of(snapshot))["run_calls"] == step // 4


def test_a_scope_is_left_on_all_ranks_at_the_same_step(make_job):
    job = make_job(3, lockstep=False)

    def work(rank, guard):
        with guard.watch_scope():
            while not rank.ckpt.should_stop:
                guard.run(train_step, rank.state, rank.ckpt.current_step + 1)
                time.sleep(0.001)
                if rank.rank == 1 and rank.ckpt.current_step == 7:
                    job.sources[1].announce()

    step = assert_left(guarded(job, work))
    assert job.versions == [step]
    assert all(matches_uninterrupted(r.state, r.rank, 3, step) for r in job.ranks)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("failed", [0, 2])
@pytest.mark.parametrize("at", [1, 6])
def test_an_error_in_a_guarded_call_is_raised_on_all_ranks(block, failed, at, make_job):
    """16: with the same type and message, also in the first call, and without a ``with`` block."""
    job = make_job(3, lockstep=False)

    def fail_once(rank):
        if rank.rank == failed and rank.ckpt.current_step + 1 == at:
            raise ValueError(f"bad batch {at}")
        time.sleep(0.002)

    def work(rank, guard):
        while rank.ckpt.current_step < LONG:
            guard.run(fail_once, rank)

    began = time.monotonic()
    outcomes = guarded(job, work, block)
    assert time.monotonic() - began < 4
    assert [(type(o), str(o)) for o in outcomes] == [(ValueError, f"bad batch {at}")] * 3
    assert all(
        ("Raised on rank" in str(getattr(o, "__notes__", "")))
        for r, o in enumerate(outcomes)
        if r != failed
    )
    assert job.versions == []


def test_an_error_that_comes_while_a_rank_still_starts_is_raised_there(make_job, monkeypatch):
    """16: the agreement of the rank exists, but nothing responds to it yet."""
    job = make_job(2, lockstep=False)
    published, calls = threading.Event(), list[int]()
    original = job.sources[1].start

    def start_late(wake):
        assert published.wait(10)
        wait_until(lambda: job.ranks[1].ckpt._preemption._peer_error is not None)
        original(wake)

    def work(rank, guard):
        for _ in range(3):
            guard.run(lambda: calls.append(1) if rank.rank else 1 / 0)

    monkeypatch.setattr(job.sources[1], "start", start_late)
    threading.Timer(0.5, published.set).start()
    outcomes = guarded(job, work, block=False)
    assert [type(o) for o in outcomes] == [ZeroDivisionError] * 2
    assert len(calls) == 1


@pytest.mark.parametrize("block", [True, False])
def test_an_error_in_a_scope_is_raised_on_all_ranks(block, make_job):
    """16: also if there is no ``with`` block of the Checkpointer that could publish it."""
    job = make_job(2, lockstep=False)

    def work(rank, guard):
        with guard.watch_scope():
            while rank.ckpt.current_step < 4000:
                if rank.rank == 1 and rank.ckpt.current_step == 5:
                    raise KeyError("label")
                rank.ckpt.step()
                time.sleep(0.001)

    outcomes = guarded(job, work, block)
    assert [repr(o) for o in outcomes] == ["KeyError('label')"] * 2
    assert job.ranks[0].ckpt.current_step < 4000


@pytest.mark.parametrize("code", [3, 0])
def test_an_exit_with_a_code_of_failure_is_an_error_on_all_ranks(code, make_job):
    """16: ``sys.exit(0)`` ends the training of one rank only."""
    job = make_job(2, lockstep=False)

    def work(rank):
        preemption = job.preemption(rank.rank)
        with rank.make_checkpointer(save=NEVER_DUE, preemption=preemption) as ckpt:
            rank.train_steps(3)
            if rank.rank == 1:
                sys.exit(code)
            wait_until(lambda: ckpt._preemption.agreement._participant.closed_error is not None)
            rank.train_steps(20)
        return rank.ckpt.current_step

    first, second = job.outcomes(work)
    assert repr(second) == f"SystemExit({code})"
    if code:
        assert isinstance(first, RankFailed)
        assert first.rank == 1
        assert "SystemExit" in str(first)
    else:
        assert first == 20


def test_an_error_is_raised_in_the_steps_of_a_long_call(make_job):
    """16: the other ranks do not first make all steps of their call."""
    job = make_job(2, lockstep=False)

    def train_steps(rank):
        for _ in range(LONG):
            rank.ckpt.step()
            time.sleep(0.001)
            if rank.rank == 1 and rank.ckpt.current_step == 5:
                raise KeyError("label")

    outcomes = guarded(job, lambda rank, guard: guard.run(train_steps, rank))
    assert [repr(o) for o in outcomes] == ["KeyError('label')"] * 2
    assert job.ranks[0].ckpt.current_step < 5000


def test_a_rank_that_waits_in_a_save_raises_the_error_of_another_one(make_job):
    """16: it does not wait until the other rank counts as dead."""
    job = make_job(2, lockstep=False)
    saving = threading.Event()

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)):
            rank.train_steps(3)
            if rank.rank == 0:
                saving.set()
                rank.ckpt.save()
            assert saving.wait(20)
            raise ValueError("bad batch")

    assert [repr(o) for o in job.outcomes(work)] == ["ValueError('bad batch')"] * 2
    assert job.versions == []


def test_a_notice_after_the_ranks_have_lost_each_other_is_no_reason_to_wait(make_job, process_ends):
    """D: the store of the job is gone, so no agreement can follow. The rank leaves at once."""
    job = make_job(2, lockstep=False)
    gone = threading.Event()

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)) as ckpt:
            rank.train_steps(3)
            if rank.rank == 1:
                assert gone.wait(20)
                return
            job.group.views[0].disconnect()
            agreement = ckpt._preemption.agreement
            wait_until(lambda: agreement._participant.closed_error is not None)
            gone.set()
            job.sources[0].announce(600.0)
            rank.train_steps(4000)

    first, second = job.outcomes(work)
    assert isinstance(first, Preempted), first
    assert (first.code, first.saved_step, second) == (76, None, None)
    assert first.step < 4000
    assert process_ends == []


@pytest.mark.slow
def test_a_rank_that_waits_in_a_save_for_one_that_hangs_leaves_in_time(make_job, process_ends):
    """31, D: after a notice, also a save of the user waits for a third of the time only, and not
    for the ten minutes after which a rank that is alive counts as stuck."""
    job = make_job(2, lockstep=False, timeouts=Timeouts(silent=60.0, stuck=600.0))
    left = threading.Event()

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)):
            rank.train_steps(3)
            if rank.rank == 1:
                assert left.wait(20)
                return
            job.sources[0].announce(9.0)
            job.wait_for_deadline()
            try:
                rank.ckpt.save()
            finally:
                left.set()

    first, _ = job.outcomes(work)
    assert isinstance(first, RankFailed), first
    assert first.rank == 1
    assert "to arrive in a third of the time" in str(first)
    assert process_ends == []


@pytest.mark.parametrize("noticed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_cannot_raise_the_error_of_another_one_is_ended(
    noticed, make_job, process_ends, tmp_path, monkeypatch
):
    """16: it is in a call that does not return, such as an all-reduce with the failed rank. It gets
    half of the time that a notice leaves, and says why it ends."""
    if not noticed:
        monkeypatch.setattr(response, "STUCK_SECONDS", 0.3)
    statuses: list[Status] = []
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    monkeypatch.setattr(exit_status, "write_status", lambda _, status: statuses.append(status))
    job = make_job(2, lockstep=False)

    def work(rank):
        with rank.make_checkpointer(save=NEVER_DUE, preemption=job.preemption(rank.rank)):
            rank.ckpt.resume()
            rank.train_steps(3)
            if rank.rank == 1:
                if noticed:
                    job.sources[1].announce(5.0)
                    job.wait_for_deadline()
                raise ValueError("bad batch")
            wait_until(lambda: bool(process_ends))
            rank.train_steps(4)

    assert [repr(o) for o in job.outcomes(work)] == ["ValueError('bad batch')"] * 2
    code, why = process_ends[0]
    assert code == 1
    assert why.startswith("another rank has failed (ValueError: bad batch), and this rank has not")
    status = next(s for s in statuses if s.rank == 0)
    assert (status.code, status.step, status.why) == (1, 3, why)


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_rank_that_waits_for_its_own_save_is_not_ended(
    is_told_before, make_job, monkeypatch, process_ends
):
    """Both ranks fail at one step, for the same reason, while a slow save is in flight. Rank 0 is
    told of the error of rank 1 before it raises its own, or after that."""
    monkeypatch.setattr(response, "STUCK_SECONDS", 0.3)
    job = make_job(2, lockstep=False)

    def wait(method, key):
        if method == "put_if_absent" and key.endswith(MANIFEST):
            time.sleep(1.5)

    job.set_before_call(0, wait)

    def work(rank):
        preemption = job.preemption(rank.rank)
        with rank.make_checkpointer(save=EverySteps(5), preemption=preemption) as ckpt:
            for _ in range(5):
                ckpt.step()
            if is_told_before and rank.rank == 0:
                wait_until(lambda: ckpt._preemption._peer_error is not None)
            raise OSError("The data is away")

    outcomes = job.outcomes(work)
    assert [str(o) for o in outcomes] == ["The data is away"] * 2
    assert job.versions == [5]
    assert process_ends == []
