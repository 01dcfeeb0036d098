"""Ranks that are late: whatever fails, and whoever is late at whichever call, all raise at the same
step, none hangs, and all go on together.

A trial is a training of three ranks in threads, of which one fails at an operation and one is late
at a call: it waits there until the others get no further without it. Trials are drawn by a seed::

    python -m tests.ranks.test_late_ranks FIRST COUNT
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest

from holdfast.engine.saving import save
from holdfast.errors import HoldfastError, NoSpace, Unavailable
from holdfast.run.policy import EverySteps, KeepLast, OnException, StopWhen
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests.ranks.trainings import TrainingJob, TrainingRank, matches_uninterrupted, train_step

SIZE = 3
STILL = 0.015
"""Seconds without anything new after which the others are taken to wait for who is late."""

LONGEST = 1.0


class Call(NamedTuple):
    """The ``n``-th call of its kind of one rank: to the ``store``; to the ``board``, as its thread
    makes it (all that the rank says is late then), or as a thread asks for it (``ask``, by
    ``train`` or another: the others of that rank go on); or a ``step`` of the save itself."""

    rank: int
    to: str
    what: str
    n: int


@dataclass(frozen=True)
class Course:
    """How a training goes. ``resume``: from versions 2 and 4 that are there; ``again``: whether the
    last version is loaded anew in the middle; ``ask``: a rank is asked for a save; ``demand``:
    ``save()`` at the end; ``ends``: by an exception of all."""

    on_error: str = "raise"
    resume: bool = False
    again: bool = False
    ask: bool = False
    demand: bool = False
    ends: bool = False
    given: tuple[tuple[str, Any], ...] = ()


def _given(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


COURSES = [
    Course(),
    Course("warn"),
    Course(resume=True),
    Course("warn", resume=True, given=_given(incremental=True, keep=KeepLast(1))),
    Course(given=_given(incremental=True, keep=KeepLast(1)), demand=True),
    Course("warn", demand=True),
    Course(resume=True, again=True),
    Course("warn", ask=True),
    Course(given=_given(stop=StopWhen("loss", patience=5)), demand=True),
    Course("warn", given=_given(busy="skip")),
    Course(ends=True),
    Course("warn", ends=True, resume=True),
]
ERRORS: list[Callable[[], Exception]] = [
    lambda: NoSpace("The disk is full", key="k"),
    lambda: Unavailable("No answer"),
    lambda: RuntimeError("CUDA error"),
]
UNHEARD = re.compile("request-save|delete writer")
"""Calls of rank 0 besides all saves: what fails there by no fault of the store is its own."""

TO, MORE = 9, 13


class Trial:
    """One training, and the next one by the same ranks. ``fails``: raises ``error``; ``late``: is
    late. ``calls``: those that each rank has made."""

    def __init__(
        self,
        course: Course,
        fails: Call | None = None,
        late: Sequence[Call] = (),
        error: Exception | None = None,
    ) -> None:
        self.course = course
        self.fails = fails
        self.late = late
        self.error = error
        self.calls: Counter[tuple[int, str, str]] = Counter()
        self.was_late = self.failed = 0
        self.told: list[list[Any]] = [[] for _ in range(SIZE)]
        self._news = 0
        self._lock = threading.Lock()
        self._second = False

    def __repr__(self) -> str:
        return f"{self.course}\n  fails: {self.fails} {self.error!r}\n  late: {self.late}"

    # -- what happens to the ranks -------------------------------------------------------------

    def called(self, rank: int, to: str, what: str) -> None:
        """Before each call of a rank."""
        if self._second or "pulse/" in what:
            return
        what = re.sub(r"\b[0-9a-f]{12,}\b|\d\d\d\d-\d\d.*", "*", what)
        with self._lock:
            kind = rank, to, what
            self.calls[kind] += 1
            call = Call(*kind, self.calls[kind])
            self._news += call.n == 1 or to not in ("board", "ask")
        if call in self.late:
            self.was_late += 1
            self._wait()
        if call == self.fails and self.error is not None:
            self.failed += 1
            raise self.error

    def _wait(self) -> None:
        end = time.monotonic() + LONGEST
        seen, since = -1, 0.0
        while (now := time.monotonic()) < end:
            if self._news != seen:
                seen, since = self._news, now
            if now - since > STILL:
                return
            time.sleep(0.001)

    def told_of(self, rank: int, what: str, error: BaseException | None = None) -> None:
        self._news += 1
        resumes = what.startswith("resume")  # where that fails the state is that of no step
        step = -1 if resumes else self.crew.ranks[rank].ckpt.current_step
        self.told[rank].append((what, step, error))

    # -- the training --------------------------------------------------------------------------

    def run(self) -> Trial:
        inner = MemoryStore()
        course = self.course
        if course.resume:
            with TrainingJob(SIZE, inner) as crew:
                crew.train(5, save=EverySteps(2))
        with TrainingJob(SIZE, inner) as crew:
            self.crew = crew
            for r, view in enumerate(crew.group.views):
                view.before = lambda name, key, r=r: self.called(r, "board", f"{name} {key}")
                crew.set_before_call(
                    r, lambda name, key, r=r: self.called(r, "store", f"{name} {key}")
                )
                board: Any = crew.group.groups[r].kv
                board.trial = self
                _asking(board, functools.partial(self._asked, r))
            ended = crew.outcomes(self._work)
            for view in crew.group.views:
                view.before = lambda name, key: None
            assert ended == [None] * SIZE, (self, ended, self.told)
            self._agree()
            self._second = True
            assert crew.leftover_keys() == [], (self, crew.leftover_keys(), self.told)
            self._goes_on()
        return self

    def _asked(self, rank: int, what: str) -> None:
        name = threading.current_thread().name
        self.called(rank, "ask", f"{'train' if name.startswith('rank-') else name} {what}")

    def _work(self, m: TrainingRank) -> None:
        course, given = self.course, dict(self.course.given)
        policy = EverySteps(2) | OnException() if course.ends else EverySteps(2)
        ckpt = m.make_checkpointer(save=policy, on_error=course.on_error, **given)
        try:
            with ckpt:
                self._resume(m)
                self._steps(m)
                if course.demand:
                    self._do(m, "save", ckpt.save)
                if course.ends:
                    m.job.wait_for_step(m.rank)
                    raise ArithmeticError("NaN")
        except ArithmeticError as e:
            self.told_of(m.rank, "raised", e)
        except Exception as e:  # what the last save, or retention, has failed by
            if ckpt.statistics()["failures"]:
                self.told_of(m.rank, "close", e)

    def _resume(self, m: TrainingRank) -> None:
        if not self._do(m, "resume", m.ckpt.resume):
            self._do(m, "resume again", m.ckpt.resume)

    def _steps(self, m: TrainingRank) -> None:
        ckpt, again = m.ckpt, self.course.again
        while ckpt.current_step < TO and not ckpt.should_stop:
            m.job.wait_for_step(m.rank)
            if again and ckpt.current_step == 7:
                again = False
                self._resume(m)
                continue
            train_step(m.state, ckpt.current_step + 1)
            if self.course.ask and m.rank == 1 and ckpt.current_step == 4:
                ckpt._watcher._signalled = True
            self._do(m, "step", lambda: ckpt.step({"loss": 1.0}))

    def _do(self, m: TrainingRank, what: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as e:
            self.told_of(m.rank, what, e)
            return False
        return True

    # -- what came of it -----------------------------------------------------------------------

    def _agree(self) -> None:
        first = [(what, step) for what, step, _ in self.told[0]]
        for told in self.told:
            assert [(what, step) for what, step, _ in told] == first, (self, self.told)
            for *_, error in told:
                notes = str(getattr(error, "__notes__", ""))
                assert "did not raise in the same step" not in notes, (self, notes)
                lost = isinstance(error, HoldfastError) and error.fields.get("lost")
                assert not lost, (self, self.told)
        steps = [m.ckpt.current_step for m in self.crew.ranks]
        assert len({*steps}) == 1, (self, steps, self.told)
        assert len({m.ckpt._cadence._save_number for m in self.crew.ranks}) == 1, self

    def _goes_on(self) -> None:
        crew = self.crew
        line = Run(crew.inner).line()
        for r in range(SIZE):
            crew.set_before_call(r, lambda name, key: None)
        crew.train(MORE, save=EverySteps(2))
        found = {None if m.resumed is None else m.resumed.step for m in crew.ranks}
        assert found == {line[-1].step if line else None}, (self, found, line)
        assert crew.versions[-1] == MORE - 1, (self, crew.versions)
        assert crew.leftover_keys() == [], (self, crew.leftover_keys())
        assert all(matches_uninterrupted(m.state, m.rank, SIZE, MORE) for m in crew.ranks), self
        assert all(s.verify().ok for s in Run(crew.inner).snapshots()), self


def _asking(board: Any, asked: Callable[[str], None]) -> None:
    """Have each method of a board tell who calls it."""
    for name in ("put_all", "look", "looks", "claim", "claimed", "count", "forget"):
        method = getattr(board, name)

        def do(key: Any, *rest: Any, method: Any = method, name: str = name, **more: Any) -> Any:
            keys = key if isinstance(key, str) else " ".join(key)
            asked(f"{name} {keys}")
            found = method(key, *rest, **more)
            asked(f"after {name} {keys}")  # the answer is late
            return found

        setattr(board, name, do)


def _trial() -> tuple[Any, int]:
    """Of the thread of a rank: its trial, if it has one, and which rank it is."""
    group = save.current_group()
    return getattr(getattr(group, "kv", None), "trial", None), group.rank


@contextmanager
def watched() -> Iterator[None]:
    """What is called otherwise than by a store: steps of a save can fail too, and warnings are
    noted."""

    def before(name: str, call: Any) -> Any:
        def do(*args: Any, **more: Any) -> Any:
            trial, rank = _trial()
            if trial is not None:
                trial.record_call(rank, "step", name)
            return call(*args, **more)

        return do

    def warned(error: HoldfastError, *rest: Any) -> None:
        trial, rank = _trial()
        if trial is not None and not trial.job.ranks[rank].ckpt._closed:
            trial.told_of(rank, "warning", error)

    with ExitStack() as stack:
        for name in ("flatten", "stage_pieces"):
            call = before(name, getattr(save, name))
            stack.enter_context(mock.patch.object(save, name, call))
        stack.enter_context(mock.patch("holdfast.training.checkpointer.warn_save_failed", warned))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def drawn(seed: int, times: int = 4) -> list[Trial]:
    """Trials of one failure, run: the first without a rank that is late, to see what is called."""
    draw = random.Random(seed)
    course = draw.choice(COURSES)
    clean = Trial(course).run()
    of = draw.choice(("store", "store", "store", "step"))
    calls = [c for c in clean.calls if c[1] == of and not UNHEARD.search(c[2])]
    kind = draw.choice(sorted(calls))
    fails = Call(*kind, draw.randint(1, clean.calls[kind]))
    error = draw.choice(ERRORS)
    first = Trial(course, fails, error=error()).run()
    made = [clean, first]
    for i in range(times):
        late = []
        for _ in range(1 + i % 2):
            rank, to = (
                draw.randrange(SIZE),
                draw.choice(("board", "ask", "ask", "ask", "store", "step")),
            )
            kind = draw.choice(sorted(c for c in first.calls if c[:2] == (rank, to)))
            late.append(Call(*kind, draw.randint(1, min(3, first.calls[kind]))))
        made.append(Trial(course, fails, late, error()).run())
    return made


@pytest.mark.slow
def test_whoever_is_late_all_take_the_same_steps() -> None:
    with watched(), ThreadPoolExecutor(6) as pool:
        made = [trial for trials in pool.map(drawn, range(6)) for trial in trials]
    assert sum(t.failed > 0 for t in made) > len(made) / 2
    assert sum(t.was_late > 0 for t in made) > len(made) / 4


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_copy_that_fails_on_one_rank_is_told_when_the_next_save_is_due(
    rank: int, on_error: str
) -> None:
    """The others have gone on to train; alone it would leave them in their all-reduce."""
    with watched():
        trial = Trial(
            Course(on_error), Call(rank, "step", "stage_pieces", 2), error=NoSpace("No room")
        ).run()
    what = "step" if on_error == "raise" else "warning"
    assert [[(w, step) for w, step, _ in told] for told in trial.told] == [[(what, 6)]] * SIZE
    assert isinstance(trial.told[rank][0][2], NoSpace)
    assert trial.failed == 1


@pytest.mark.slow
def test_no_call_to_a_store_of_one_rank_ends_the_resume_for_that_rank_alone() -> None:
    course = Course(resume=True)
    with watched(), ThreadPoolExecutor(6) as pool:
        clean = Trial(course).run()
        kinds = [k for k in clean.calls if k[:2] == (1, "store") and "version_4" in k[2]]
        fails = [Call(*kind, n) for kind in kinds for n in range(1, clean.calls[kind] + 1)]
        made = list(pool.map(lambda c: Trial(course, c, error=Unavailable("No")).run(), fails))
    assert [t.failed for t in made] == [1] * len(fails)
    assert sum("manifest" in c.what for c in fails) > 0


def main(first: int, count: int, times: int = 4) -> None:
    def one(seed: int) -> None:
        try:
            made = drawn(seed, times)
        except BaseException:
            print(f"--- seed {seed}\n{traceback.format_exc()}", flush=True)
        else:
            total.update(
                trials=len(made),
                late=sum(t.was_late > 0 for t in made),
                failed=sum(t.failed > 0 for t in made),
            )

    total: Counter[str] = Counter()
    with watched(), ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(first, first + count)))
    print(dict(total))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
