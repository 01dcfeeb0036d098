"""Failures on one rank while other ranks are late.

All ranks raise at the same step, no rank hangs, and all ranks continue together.

A trial is a training of three ranks in threads. One rank fails in an operation, and one or two
calls are late: the rank waits in the call until the other ranks make no progress without it.

"""

import functools
import random
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest

from limpet.errors import LimpetError, NoSpace, Unavailable
from limpet.notices.notice import Notice
from limpet.ranks.group import current_group
from limpet.run.policy import EverySteps, KeepLast, OnException, StopWhen
from limpet.run.run import Run
from limpet.saving import save
from limpet.storage.memory import MemoryStore
from tests.ranks.trainings import TrainingJob, matches_uninterrupted, train_step

SIZE = 3
QUIET_SECONDS = 0.015
"""A late call continues after this time without progress: the other ranks must be waiting."""

MAX_DELAY = 1.0
"""The maximum delay of a late call, in seconds."""


class Call(NamedTuple):
    """The n-th call of its kind of one rank.

    ``target`` is one of:

    - "store": a call to the store of the run.
    - "kv": a call of the thread of the key-value client to the TCPStore. If it is late, everything
      that the rank writes there is late.
    - "request": a call of another thread to the key-value client. If it is late, the other threads
      of the rank continue.
    - "step": a step of the save itself.
    """

    rank: int
    target: str
    operation: str
    occurrence: int


@dataclass(frozen=True)
class Scenario:
    """The course of a training.

    ``resume``: it resumes from a run with versions 2 and 4. ``resume_again``: it loads the last
    version again in the middle. ``request_save``: a signal on one rank requests a save.
    ``save_at_end``: it calls ``save()`` at the end. ``raise_at_end``: all ranks raise an exception
    at the end. ``options``: further arguments of the Checkpointer.
    """

    on_error: str = "raise"
    resume: bool = False
    resume_again: bool = False
    request_save: bool = False
    save_at_end: bool = False
    raise_at_end: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def _options(**options):
    return tuple(options.items())


SCENARIOS = [
    Scenario(),
    Scenario("warn"),
    Scenario(resume=True),
    Scenario("warn", resume=True, options=_options(incremental=True, keep=KeepLast(1))),
    Scenario(options=_options(incremental=True, keep=KeepLast(1)), save_at_end=True),
    Scenario("warn", save_at_end=True),
    Scenario(resume=True, resume_again=True),
    Scenario("warn", request_save=True),
    Scenario(options=_options(stop=StopWhen("loss", patience=5)), save_at_end=True),
    Scenario(raise_at_end=True),
    Scenario("warn", raise_at_end=True, resume=True),
]
ERRORS: list[Callable[[], Exception]] = [
    lambda: NoSpace("The disk is full", key="k"),
    lambda: Unavailable("No answer"),
    lambda: RuntimeError("CUDA error"),
]
LOCAL_CALLS = re.compile("request-save|delete writer")
"""Calls that rank 0 makes outside of saves. A failure there concerns rank 0 alone."""

LAST_STEP, NEXT_LAST_STEP = 9, 13


class Trial:
    """One training, and the next one by the same ranks.

    ``failing_call`` raises ``error``, and the ``late_calls`` are late. ``calls``: the number of
    calls of each kind. ``reports``: for each rank, the failed operations with their step and error.
    """

    def __init__(self, scenario, failing_call=None, late_calls=(), error=None):
        self.scenario = scenario
        self.failing_call = failing_call
        self.late_calls = late_calls
        self.error = error
        self.calls: Counter[tuple[int, str, str]] = Counter()
        self.late_count = self.failure_count = 0
        self.reports: list[list[Any]] = [[] for _ in range(SIZE)]
        self._progress = 0
        self._lock = threading.Lock()
        self._finished = False

    def __repr__(self):
        return (
            f"{self.scenario}\n  fails: {self.failing_call} {self.error!r}"
            f"\n  late: {self.late_calls}"
        )

    # -- faults ----------------------------------------------------------------------------------

    def before_call(self, rank, target, operation):
        """Record a call of a rank, delay it if it is late, and raise if it is the failing call."""
        if self._finished or "heartbeat/" in operation:
            return
        operation = re.sub(r"\b[0-9a-f]{12,}\b|\d\d\d\d-\d\d.*", "*", operation)
        with self._lock:
            kind = rank, target, operation
            self.calls[kind] += 1
            call = Call(*kind, self.calls[kind])
            self._progress += call.occurrence == 1 or target not in ("kv", "request")
        if call in self.late_calls:
            self.late_count += 1
            self._wait_for_quiet()
        if call == self.failing_call and self.error is not None:
            self.failure_count += 1
            raise self.error

    def _wait_for_quiet(self):
        end = time.monotonic() + MAX_DELAY
        progress, since = -1, 0.0
        while (now := time.monotonic()) < end:
            if self._progress != progress:
                progress, since = self._progress, now
            if now - since > QUIET_SECONDS:
                return
            time.sleep(0.001)

    def report(self, rank, operation, error=None):
        self._progress += 1
        resumes = operation.startswith("resume")  # after a failed one, the state has no step
        step = -1 if resumes else self.job.ranks[rank].ckpt.current_step
        self.reports[rank].append((operation, step, error))

    # -- the training --------------------------------------------------------------------------

    def run(self):
        inner = MemoryStore()
        if self.scenario.resume:
            with TrainingJob(SIZE, inner) as job:
                job.train(5, save=EverySteps(2))
        with TrainingJob(SIZE, inner) as job:
            self.job = job
            for r, view in enumerate(job.group.views):
                view.before = lambda name, key, r=r: self.before_call(r, "kv", f"{name} {key}")
                job.set_before_call(
                    r, lambda name, key, r=r: self.before_call(r, "store", f"{name} {key}")
                )
                kv: Any = job.group.groups[r].kv
                kv.trial = self
                _record_requests(kv, functools.partial(self._before_request, r))
            outcomes = job.outcomes(self._work)
            for view in job.group.views:
                view.before = lambda name, key: None
            assert outcomes == [None] * SIZE, (self, outcomes, self.reports)
            self._check_agreement()
            self._finished = True
            assert job.leftover_keys() == [], (self, job.leftover_keys(), self.reports)
            self._check_next_training()
        return self

    def _before_request(self, rank, operation):
        name = threading.current_thread().name
        thread = "train" if name.startswith("rank-") else name
        self.before_call(rank, "request", f"{thread} {operation}")

    def _work(self, trainer):
        scenario, options = self.scenario, dict(self.scenario.options)
        policy = EverySteps(2) | OnException() if scenario.raise_at_end else EverySteps(2)
        ckpt = trainer.make_checkpointer(save=policy, on_error=scenario.on_error, **options)
        try:
            with ckpt:
                self._resume(trainer)
                self._steps(trainer)
                if scenario.save_at_end:
                    self._try(trainer, "save", ckpt.save)
                if scenario.raise_at_end:
                    trainer.job.wait_for_step(trainer.rank)
                    raise ArithmeticError("NaN")
        except ArithmeticError as e:
            self.report(trainer.rank, "raised", e)
        except Exception as e:  # the error of the last save or of the retention
            if ckpt.statistics()["failures"]:
                self.report(trainer.rank, "close", e)

    def _resume(self, trainer):
        if not self._try(trainer, "resume", trainer.ckpt.resume):
            self._try(trainer, "resume again", trainer.ckpt.resume)

    def _steps(self, trainer):
        ckpt, resume_again = trainer.ckpt, self.scenario.resume_again
        while ckpt.current_step < LAST_STEP and not ckpt.should_stop:
            trainer.job.wait_for_step(trainer.rank)
            if resume_again and ckpt.current_step == 7:
                resume_again = False
                self._resume(trainer)
                continue
            train_step(trainer.state, ckpt.current_step + 1)
            if self.scenario.request_save and trainer.rank == 1 and ckpt.current_step == 4:
                ckpt._preemption.on_notice(Notice("a test", stops=False))
            self._try(trainer, "step", lambda: ckpt.step({"loss": 1.0}))

    def _try(self, trainer, operation, call):
        try:
            call()
        except Exception as e:
            self.report(trainer.rank, operation, e)
            return False
        return True

    # -- checks ----------------------------------------------------------------------------------

    def _check_agreement(self):
        """Check that the same operations failed at the same steps on all ranks."""
        first = [(operation, step) for operation, step, _ in self.reports[0]]
        for reports in self.reports:
            assert [(what, step) for what, step, _ in reports] == first, (self, self.reports)
            for *_, error in reports:
                notes = str(getattr(error, "__notes__", ""))
                assert "did not raise in the same step" not in notes, (self, notes)
                lost = isinstance(error, LimpetError) and error.fields.get("lost")
                assert not lost, (self, self.reports)
        steps = [trainer.ckpt.current_step for trainer in self.job.ranks]
        assert len({*steps}) == 1, (self, steps, self.reports)
        assert len({trainer.ckpt._cadence._save_number for trainer in self.job.ranks}) == 1, self

    def _check_next_training(self):
        """Check that the same ranks resume from the newest version and train and save."""
        job = self.job
        lineage = Run(job.inner).line()
        for r in range(SIZE):
            job.set_before_call(r, lambda name, key: None)
        job.train(NEXT_LAST_STEP, save=EverySteps(2))
        resumed = {
            None if trainer.resumed is None else trainer.resumed.step for trainer in job.ranks
        }
        assert resumed == {lineage[-1].step if lineage else None}, (self, resumed, lineage)
        assert job.versions[-1] == NEXT_LAST_STEP - 1, (self, job.versions)
        assert job.leftover_keys() == [], (self, job.leftover_keys())
        for trainer in job.ranks:
            assert matches_uninterrupted(trainer.state, trainer.rank, SIZE, NEXT_LAST_STEP), self
        assert all(s.verify().ok for s in Run(job.inner).snapshots()), self


def _record_requests(kv, before_request):
    """Call ``before_request`` before and after each call of a method of a key-value client."""
    for name in (
        "put_all",
        "try_get",
        "get_many",
        "compare_and_set",
        "get_text",
        "increment",
        "delete",
    ):
        method = getattr(kv, name)

        def call(key, *args, method=method, name=name, **kwargs):
            keys = key if isinstance(key, str) else " ".join(key)
            before_request(f"{name} {keys}")
            result = method(key, *args, **kwargs)
            before_request(f"after {name} {keys}")  # if it is late, the response is late
            return result

        setattr(kv, name, call)


def _current_trial():
    """Return the trial of this thread, or None, and the rank of this thread."""
    group = current_group()
    return getattr(getattr(group, "kv", None), "trial", None), group.rank


@contextmanager
def recorded_steps():
    """Record steps of saves, which can fail too, and report warnings to the trials."""

    def record(name, step):
        def call(*args, **kwargs):
            trial, rank = _current_trial()
            if trial is not None:
                trial.before_call(rank, "step", name)
            return step(*args, **kwargs)

        return call

    def report_warning(*args):
        trial, rank = _current_trial()
        if trial is not None and not trial.job.ranks[rank].ckpt._lifecycle.is_closed:
            trial.report(rank, "warning", sys.exception())

    with ExitStack() as stack:
        for name in ("flatten", "stage_pieces"):
            step = record(name, getattr(save, name))
            stack.enter_context(mock.patch.object(save, name, step))
        stack.enter_context(mock.patch("limpet.training.saver.warn_user", report_warning))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def run_random_trials(seed, times=4):
    """Run trials with one failure.

    The first trial has no failure and the second no late call, to learn which calls occur.
    """
    draw = random.Random(seed)
    scenario = draw.choice(SCENARIOS)
    clean = Trial(scenario).run()
    target = draw.choice(("store", "store", "store", "step"))
    calls = [c for c in clean.calls if c[1] == target and not LOCAL_CALLS.search(c[2])]
    kind = draw.choice(sorted(calls))
    failing_call = Call(*kind, draw.randint(1, clean.calls[kind]))
    error = draw.choice(ERRORS)
    first = Trial(scenario, failing_call, error=error()).run()
    trials = [clean, first]
    for i in range(times):
        late_calls = []
        for _ in range(1 + i % 2):
            rank, target = (
                draw.randrange(SIZE),
                draw.choice(("kv", "request", "request", "request", "store", "step")),
            )
            kind = draw.choice(sorted(c for c in first.calls if c[:2] == (rank, target)))
            late_calls.append(Call(*kind, draw.randint(1, min(3, first.calls[kind]))))
        trials.append(Trial(scenario, failing_call, late_calls, error()).run())
    return trials


@pytest.mark.slow
def test_all_ranks_take_the_same_steps_when_one_is_late():
    with recorded_steps(), ThreadPoolExecutor(6) as pool:
        trials = [trial for group in pool.map(run_random_trials, range(6)) for trial in group]
    assert sum(t.failure_count > 0 for t in trials) > len(trials) / 2
    assert sum(t.late_count > 0 for t in trials) > len(trials) / 4


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_copy_on_one_rank_is_reported_when_the_next_save_is_due(rank, on_error):
    """The other ranks already train. An error at once would leave them in their all-reduce."""
    with recorded_steps():
        trial = Trial(
            Scenario(on_error), Call(rank, "step", "stage_pieces", 2), error=NoSpace("No room")
        ).run()
    operation = "step" if on_error == "raise" else "warning"
    found = [[(name, step) for name, step, _ in reports] for reports in trial.reports]
    assert found == [[(operation, 6)]] * SIZE
    assert isinstance(trial.reports[rank][0][2], NoSpace)
    assert trial.failure_count == 1


@pytest.mark.slow
def test_a_failed_store_call_of_one_rank_never_ends_the_resume_of_that_rank_alone():
    scenario = Scenario(resume=True)
    with recorded_steps(), ThreadPoolExecutor(6) as pool:
        clean = Trial(scenario).run()
        kinds = [k for k in clean.calls if k[:2] == (1, "store") and "version_4" in k[2]]
        calls = [Call(*kind, n) for kind in kinds for n in range(1, clean.calls[kind] + 1)]
        trials = list(pool.map(lambda c: Trial(scenario, c, error=Unavailable("No")).run(), calls))
    assert [t.failure_count for t in trials] == [1] * len(calls)
    assert sum("manifest" in c.operation for c in calls) > 0
