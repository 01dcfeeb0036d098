"""Trainings of several ranks in threads, each with a Checkpointer and a store of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import holdfast
from holdfast.engine.distributed.kv import Timeouts
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.fakegroup import FakeGroup
from tests.engine.unreliable_stores import HookedStore

SHORT_TIMEOUTS = Timeouts(silent=4.0, stuck=8.0)
ROWS = 120

Metrics = Callable[[int], Any]
"""What is given to each step."""


def no_metrics(step: int) -> None: ...


def initial_state(rank: int, size: int, progress: bool = True) -> dict[str, Any]:
    """A state before its first step: weights that are cut, and what is the same everywhere."""
    rows = np.array_split(np.arange(ROWS), size)[rank]
    state: dict[str, Any] = {
        "weights": holdfast.Boxed(np.zeros((len(rows), 5)), (int(rows[0]), 0), (ROWS, 5)),
        "same": np.zeros(3),
        "mine": holdfast.PerRank(np.full(2, float(rank))),
    }
    return {**state, "progress": holdfast.Progress()} if progress else state


def train_step(state: dict[str, Any], step: int) -> None:
    """A step that depends on all before it."""
    weights = state["weights"].tensor
    weights *= 1.01
    weights += step
    state["same"] += step
    state["mine"].value += 1


def matches_uninterrupted(state: dict[str, Any], rank: int, size: int, last_step: int) -> bool:
    """Whether it is the state of a training that was never interrupted."""
    wanted = initial_state(rank, size)
    for step in range(1, last_step + 1):
        train_step(wanted, step)
    return (
        np.array_equal(state["weights"].tensor, wanted["weights"].tensor)
        and np.array_equal(state["same"], wanted["same"])
        and np.array_equal(state["mine"].value, wanted["mine"].value)
    )


@dataclass
class TrainingRank:
    """One rank of a crew. ``at``: is called with each step that it has made."""

    job: TrainingJob
    rank: int
    store: HookedStore
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    ckpt: holdfast.Checkpointer = None  # type: ignore[assignment]
    state: dict[str, Any] = field(default_factory=dict)
    resumed: Any = None
    saved_steps: list[int] = field(default_factory=list)

    def calls_without_pin_checks(self) -> list[tuple[str, str]]:
        """What it has called, but for the look whether it sees the pin of rank 0, one at a save."""
        return [c for c in self.calls.elements() if not (c[0] == "stat" and "pin-" in c[1])]

    def make_checkpointer(self, **given: Any) -> holdfast.Checkpointer:
        state = given.pop("state", None)
        self.state = initial_state(self.rank, self.job.size) if state is None else state
        self.ckpt = holdfast.Checkpointer(self.store, self.state, **given)
        return self.ckpt

    def train_steps(self, last_step: int, metrics: Metrics = no_metrics) -> None:
        """In step with the others, as by an all-reduce, until step ``to``, or all stop."""
        while self.ckpt.current_step < last_step and not self.ckpt.should_stop:
            self.job.wait_for_step(self.rank)
            step = self.ckpt.current_step + 1
            train_step(self.state, step)
            begun = self.ckpt._cadence._save_number
            try:
                self.ckpt.step(metrics(step))
            finally:
                if self.ckpt._cadence._save_number > begun and step > 1:
                    self.saved_steps.append(step)

    def train(self, last_step: int, metrics: Metrics = no_metrics, **given: Any) -> Any:
        """A whole training; what ``resume`` has found."""
        with self.make_checkpointer(**given):
            self.resumed = self.ckpt.resume()
            self.train_steps(last_step, metrics)
        return self.resumed


class StepBarrier:
    """A barrier, like one of threading; but who has got through it is not called back by an
    ``abort`` right after that, as there, where a thread may still have to wake up."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        self._arrived, self._aborted = 0, False

    def wait(self, timeout: float) -> None:
        with self._changed:
            self._arrived += 1
            all_of_them = -(-self._arrived // self._size) * self._size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._aborted or self._arrived >= all_of_them, timeout)
            if self._arrived < all_of_them:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class TrainingJob:
    """``size`` ranks. ``pace()`` is called by rank 0 before each step."""

    def __init__(
        self,
        size: int,
        inner: Store | None = None,
        timeouts: Timeouts = SHORT_TIMEOUTS,
        lockstep: bool = True,
    ) -> None:
        self.size = size
        self.inner = MemoryStore() if inner is None else inner
        self.group = FakeGroup(size, timeouts)
        self.ranks = [TrainingRank(self, r, HookedStore(self.inner)) for r in range(size)]
        self.before_step: Callable[[], object] = lambda: None
        self._barrier = StepBarrier(size) if lockstep else None
        for member in self.ranks:
            member.store.before = self._call_counter(member)

    @staticmethod
    def _call_counter(member: TrainingRank) -> Callable[[str, str], None]:
        def note(method: str, key: str) -> None:
            member.calls[method, key] += 1

        return note

    def set_before_call(self, rank: int, callback: Callable[[str, str], object]) -> None:
        """``act(method, key)`` before each call of a rank to its store."""
        note = self._call_counter(self.ranks[rank])

        def both(method: str, key: str) -> None:
            note(method, key)
            callback(method, key)

        self.ranks[rank].store.before = both

    def wait_for_step(self, rank: int) -> None:
        if rank == 0:
            self.before_step()
        if self._barrier is not None:
            self._barrier.wait(30)

    def wait_for_saves(self) -> None:
        """Wait for the saves in flight."""
        for member in self.ranks:
            if (pending := member.ckpt._saver._pending) is not None:
                pending.wait()

    def run(self, work: Callable[[TrainingRank], Any]) -> list[Any]:
        """What ``work`` has returned on each rank; an exception that is returned is raised."""
        if self._barrier is not None:
            self._barrier.reset()
        return self.group.run(lambda rank: self._run_rank(work, rank))

    def outcomes(self, work: Callable[[TrainingRank], Any]) -> list[Any]:
        return self.group.outcomes(lambda rank: self._run_rank(work, rank))

    def _run_rank(self, work: Callable[[TrainingRank], Any], rank: int) -> Any:
        try:
            return work(self.ranks[rank])
        except BaseException:
            if self._barrier is not None:
                self._barrier.abort()  # an all-reduce in which one is missing ends as well
            raise

    def train(self, last_step: int, metrics: Metrics = no_metrics, **given: Any) -> Any:
        return self.run(lambda member: member.train(last_step, metrics, **given))

    @property
    def versions(self) -> list[int]:
        return [s.step for s in Run(self.inner).snapshots()]

    def leftover_keys(self) -> list[str]:
        """What is left on the board, but for pulses."""
        return sorted(k for k in self.group.store.values if not k.startswith("pulse/"))

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.group.close()
