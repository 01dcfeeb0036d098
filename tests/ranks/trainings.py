"""Trainings of several ranks in threads, each with a Checkpointer and a store of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import holdfast
from holdfast.engine.distributed.kv import Patience
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.fakegroup import FakeGroup
from tests.engine.unreliable_stores import Wrapped

SOON = Patience(silent=4.0, stuck=8.0)
ROWS = 120

Metrics = Callable[[int], Any]
"""What is given to each step."""


def none_at_all(step: int) -> None: ...


def fresh(rank: int, size: int, progress: bool = True) -> dict[str, Any]:
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


def same(state: dict[str, Any], rank: int, size: int, steps: int) -> bool:
    """Whether it is the state of a training that was never interrupted."""
    wanted = fresh(rank, size)
    for step in range(1, steps + 1):
        train_step(wanted, step)
    return (
        np.array_equal(state["weights"].tensor, wanted["weights"].tensor)
        and np.array_equal(state["same"], wanted["same"])
        and np.array_equal(state["mine"].value, wanted["mine"].value)
    )


@dataclass
class Member:
    """One rank of a crew. ``at``: is called with each step that it has made."""

    crew: Crew
    rank: int
    store: Wrapped
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    ckpt: holdfast.Checkpointer = None  # type: ignore[assignment]
    state: dict[str, Any] = field(default_factory=dict)
    resumed: Any = None
    saved: list[int] = field(default_factory=list)

    def others(self) -> list[tuple[str, str]]:
        """What it has called, but for the look whether it sees the pin of rank 0, one at a save."""
        return [c for c in self.calls.elements() if not (c[0] == "stat" and "pin-" in c[1])]

    def checkpointer(self, **given: Any) -> holdfast.Checkpointer:
        state = given.pop("state", None)
        self.state = fresh(self.rank, self.crew.size) if state is None else state
        self.ckpt = holdfast.Checkpointer(self.store, self.state, **given)
        return self.ckpt

    def steps(self, to: int, metrics: Metrics = none_at_all) -> None:
        """In step with the others, as by an all-reduce, until step ``to``, or all stop."""
        while self.ckpt.current_step < to and not self.ckpt.should_stop:
            self.crew.reduce(self.rank)
            step = self.ckpt.current_step + 1
            train_step(self.state, step)
            begun = self.ckpt._cadence._begun
            try:
                self.ckpt.step(metrics(step))
            finally:
                if self.ckpt._cadence._begun > begun and step > 1:
                    self.saved.append(step)

    def train(self, to: int, metrics: Metrics = none_at_all, **given: Any) -> Any:
        """A whole training; what ``resume`` has found."""
        with self.checkpointer(**given):
            self.resumed = self.ckpt.resume()
            self.steps(to, metrics)
        return self.resumed


class AllReduce:
    """A barrier, like one of threading; but who has got through it is not called back by an
    ``abort`` right after that, as there, where a thread may still have to wake up."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        self._came, self._ended = 0, False

    def wait(self, timeout: float) -> None:
        with self._changed:
            self._came += 1
            all_of_them = -(-self._came // self._size) * self._size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._came >= all_of_them, timeout)
            if self._came < all_of_them:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Crew:
    """``size`` ranks. ``pace()`` is called by rank 0 before each step."""

    def __init__(
        self,
        size: int,
        inner: Store | None = None,
        patience: Patience = SOON,
        lockstep: bool = True,
    ) -> None:
        self.size = size
        self.inner = MemoryStore() if inner is None else inner
        self.group = FakeGroup(size, patience)
        self.members = [Member(self, r, Wrapped(self.inner)) for r in range(size)]
        self.pace: Callable[[], object] = lambda: None
        self._barrier = AllReduce(size) if lockstep else None
        for member in self.members:
            member.store.before = self._noted(member)

    @staticmethod
    def _noted(member: Member) -> Callable[[str, str], None]:
        def note(method: str, key: str) -> None:
            member.calls[method, key] += 1

        return note

    def before(self, rank: int, act: Callable[[str, str], object]) -> None:
        """``act(method, key)`` before each call of a rank to its store."""
        note = self._noted(self.members[rank])

        def both(method: str, key: str) -> None:
            note(method, key)
            act(method, key)

        self.members[rank].store.before = both

    def reduce(self, rank: int) -> None:
        if rank == 0:
            self.pace()
        if self._barrier is not None:
            self._barrier.wait(30)

    def settle(self) -> None:
        """Wait for the saves in flight."""
        for member in self.members:
            if (pending := member.ckpt._saver._pending) is not None:
                pending.wait()

    def run(self, work: Callable[[Member], Any]) -> list[Any]:
        """What ``work`` has returned on each rank; an exception that is returned is raised."""
        if self._barrier is not None:
            self._barrier.reset()
        return self.group.run(lambda rank: self._act(work, rank))

    def outcomes(self, work: Callable[[Member], Any]) -> list[Any]:
        return self.group.outcomes(lambda rank: self._act(work, rank))

    def _act(self, work: Callable[[Member], Any], rank: int) -> Any:
        try:
            return work(self.members[rank])
        except BaseException:
            if self._barrier is not None:
                self._barrier.abort()  # an all-reduce in which one is missing ends as well
            raise

    def train(self, to: int, metrics: Metrics = none_at_all, **given: Any) -> Any:
        return self.run(lambda member: member.train(to, metrics, **given))

    @property
    def versions(self) -> list[int]:
        return [s.step for s in Run(self.inner).snapshots()]

    def keys(self) -> list[str]:
        """What is left on the board, but for pulses."""
        return sorted(k for k in self.group.store.values if not k.startswith("pulse/"))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.group.close()
