"""Trainings of several ranks in threads. Each rank has its own Checkpointer and store."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import limpet
from limpet.ranks.kv import Timeouts
from limpet.run.policy import contains_at_end
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.unreliable_stores import HookedStore

SHORT_TIMEOUTS = Timeouts(silent=4.0, stuck=8.0)
ROWS = 120

Metrics = Callable[[int], Any]
"""Returns the metrics to pass to ``Checkpointer.step`` at a step."""


def no_metrics(step): ...


def initial_state(rank, size, progress=True):
    """Return the state of a rank before its first step.

    The weights are sharded across ranks, "same" is replicated, and "mine" is a PerRank value.
    """
    rows = np.array_split(np.arange(ROWS), size)[rank]
    state: dict[str, Any] = {
        "weights": limpet.Boxed(np.zeros((len(rows), 5)), (int(rows[0]), 0), (ROWS, 5)),
        "same": np.zeros(3),
        "mine": limpet.PerRank(np.full(2, float(rank))),
    }
    return {**state, "progress": limpet.Progress()} if progress else state


def train_step(state, step):
    """Make a step whose result depends on all earlier steps."""
    weights = state["weights"].tensor
    weights *= 1.01
    weights += step
    state["same"] += step
    state["mine"].value += 1


def matches_uninterrupted(state, rank, size, last_step):
    """Return True if the state equals that of an uninterrupted training."""
    expected = initial_state(rank, size)
    for step in range(1, last_step + 1):
        train_step(expected, step)
    return (
        np.array_equal(state["weights"].tensor, expected["weights"].tensor)
        and np.array_equal(state["same"], expected["same"])
        and np.array_equal(state["mine"].value, expected["mine"].value)
    )


@dataclass
class TrainingRank:
    """One rank of a job.

    ``calls``: the calls to its store. ``resumed``: the snapshot that it resumed from.
    ``saved_steps``: the steps at which it began a save.
    """

    job: "TrainingJob"
    rank: int
    store: HookedStore
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    ckpt: limpet.Checkpointer = None
    state: dict[str, Any] = field(default_factory=dict)
    resumed: Any = None
    saved_steps: list[int] = field(default_factory=list)

    def calls_without_pin_checks(self):
        """Return its calls, except the check in each save that it can see the pin of rank 0."""
        return [c for c in self.calls.elements() if not (c[0] == "stat" and "pin-" in c[1])]

    def make_checkpointer(self, **options):
        """The last step is saved only with ``at_end=True``, ``AtEnd``, or the default policy."""
        state = options.pop("state", None)
        save = options.get("save")
        options.setdefault("at_end", save is None or contains_at_end(save))
        self.state = initial_state(self.rank, self.job.size) if state is None else state
        self.ckpt = limpet.Checkpointer(self.store, self.state, **options)
        return self.ckpt

    def train_steps(self, last_step, metrics=no_metrics):
        """Train up to step ``last_step``, or until the training stops.

        In a lockstep job, the ranks wait for one another before each step, as in an all-reduce.
        """
        while self.ckpt.current_step < last_step and not self.ckpt.should_stop:
            self.job.wait_for_step(self.rank)
            step = self.ckpt.current_step + 1
            train_step(self.state, step)
            save_number = self.ckpt._cadence._save_number
            try:
                self.ckpt.step(metrics(step))
            finally:
                if self.ckpt._cadence._save_number > save_number and step > 1:
                    self.saved_steps.append(step)

    def train(self, last_step, metrics=no_metrics, **options):
        """Run a whole training. Return the result of ``resume``."""
        with self.make_checkpointer(**options):
            self.resumed = self.ckpt.resume()
            self.train_steps(last_step, metrics)
        return self.resumed


class StepBarrier:
    """A barrier like ``threading.Barrier``, except that ``abort`` affects only waiting ranks.

    With ``threading.Barrier``, an ``abort`` right after the last arrival also fails the threads
    that have passed the barrier and have not woken up yet.
    """

    def __init__(self, size):
        self._size = size
        self._changed = threading.Condition()
        self.reset()

    def reset(self):
        self._arrived, self._aborted = 0, False

    def wait(self, timeout):
        with self._changed:
            self._arrived += 1
            target = -(-self._arrived // self._size) * self._size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._aborted or self._arrived >= target, timeout)
            if self._arrived < target:
                raise threading.BrokenBarrierError

    def abort(self):
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class TrainingJob:
    """A training of ``size`` ranks. Rank 0 calls ``before_step()`` before each step."""

    def __init__(self, size, inner=None, timeouts=SHORT_TIMEOUTS, lockstep=True):
        self.size = size
        self.inner = MemoryStore() if inner is None else inner
        self.group = FakeGroup(size, timeouts)
        self.ranks = [TrainingRank(self, r, HookedStore(self.inner)) for r in range(size)]
        self.before_step: Callable[[], object] = lambda: None
        self._barrier = StepBarrier(size) if lockstep else None
        for trainer in self.ranks:
            trainer.store.before = self._call_counter(trainer)

    @staticmethod
    def _call_counter(trainer):
        def count(method, key):
            trainer.calls[method, key] += 1

        return count

    def set_before_call(self, rank, callback):
        """Run ``callback(method, key)`` before each call of a rank to its store."""
        count = self._call_counter(self.ranks[rank])

        def count_and_call(method, key):
            count(method, key)
            callback(method, key)

        self.ranks[rank].store.before = count_and_call

    def wait_for_step(self, rank):
        if rank == 0:
            self.before_step()
        if self._barrier is not None:
            self._barrier.wait(30)

    def wait_for_saves(self):
        """Wait for the saves in flight."""
        for trainer in self.ranks:
            if (pending := trainer.ckpt._saver.pending) is not None:
                pending.wait()

    def run(self, work):
        """Return the result of ``work`` on each rank. Raises the first exception of any rank."""
        if self._barrier is not None:
            self._barrier.reset()
        return self.group.run(lambda rank: self._run_rank(work, rank))

    def outcomes(self, work):
        return self.group.outcomes(lambda rank: self._run_rank(work, rank))

    def _run_rank(self, work, rank):
        try:
            return work(self.ranks[rank])
        except BaseException:
            if self._barrier is not None:
                self._barrier.abort()  # an all-reduce that lacks a rank ends too
            raise

    def train(self, last_step, metrics=no_metrics, **options):
        return self.run(lambda trainer: trainer.train(last_step, metrics, **options))

    @property
    def versions(self):
        return [s.step for s in Run(self.inner).snapshots()]

    def leftover_keys(self):
        """Return the keys that remain in the key-value store, except heartbeats."""
        return sorted(k for k in self.group.store.values if not k.startswith("heartbeat/"))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.group.close()
