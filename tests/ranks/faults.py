"""Ranks in threads with injected faults.

At a chosen call of one rank to its key-value client (kv) or to its store, the rank dies, the call
fails, or the call does not return.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

import limpet
from limpet.errors import LimpetError, RankFailed
from limpet.format.names import Version
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.ranks.group import current_group
from limpet.ranks.kv import Timeouts
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Store
from tests.fakegroup import FakeGroup
from tests.trainings import initial_state, state_after, states_equal
from tests.unreliable_stores import HookedStore

SHORT_TIMEOUTS = Timeouts(silent=1.5, stuck=2.5)
"""The shortest timeouts that distinguish a live thread from a dead one on a busy machine."""

PARALLEL_TRIALS = 20
"""The number of trials that run at the same time. A trial spends most of its time waiting."""

TIME_LIMIT = 3 * SHORT_TIMEOUTS.stuck

STORES_BY_URL: dict[str, Store] = {}
"""The store of one rank of one trial, by the root of its URL."""

OPEN_JOBS = []

_url_numbers = count()


class Killed(BaseException):
    """Ends the thread of a rank, as if its process had been killed."""


class Call(NamedTuple):
    """A call of one rank: the n-th of its kind to the ``target``, "kv" or "store"."""

    target: str
    method: str
    key: str
    occurrence: int


def state_of(rank, size, step):
    """Return the state of ``trainings.state_after(step)`` as one rank has it.

    The weights are sharded across ranks. The other values are the same on all ranks.
    """
    state = state_after(step)
    rows = np.array_split(np.arange(1000), size)[rank]
    part = state["weights"][rows]
    return {**state, "weights": limpet.Boxed(part, (int(rows[0]),), (1000,))}


@dataclass
class FaultyRank:
    """One rank and the calls that it made. ``before_call(call)`` runs before each of its calls."""

    store_view: Any
    store: HookedStore
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    before_call: Callable[[Call], object] = lambda call: None
    dead: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def record_call(self, target, method, key):
        key = re.sub(r"\b[0-9a-f]{12,}\b", "*", key)
        with self.lock:
            self.calls[target, method, key] += 1
            call = Call(target, method, key, self.calls[target, method, key])
        if not self.dead:
            self.before_call(call)
        if self.dead:
            raise ConnectionError("killed by a test") if target == "kv" else Killed

    def distinct_calls(self):
        """Return all calls of this rank.

        Calls to the key-value client are repeated while the rank waits. Only the first call of each
        kind is included.
        """
        return [
            Call(*kind, n)
            for kind, times in self.calls.items()
            for n in range(1, (1 if kind[0] == "kv" else times) + 1)
        ]


class ThreadedJob:
    """A group of ranks. Each rank has its own view of a store, which all of them may share."""

    def __init__(self, size, stores, timeouts=SHORT_TIMEOUTS):
        self.group = FakeGroup(size, timeouts)
        self.size = size
        self.urls = [f"rank://{next(_url_numbers)}" for _ in range(size)]
        self.ranks: list[FaultyRank] = []
        for view, inner, url in zip(self.group.views, stores, self.urls, strict=True):
            rank = FaultyRank(view, HookedStore(inner))
            view.before = lambda method, key, rank=rank: rank.record_call("kv", method, key)
            rank.store.before = lambda method, key, rank=rank: rank.record_call(
                "store", method, key
            )
            STORES_BY_URL[url] = rank.store
            self.ranks.append(rank)
        OPEN_JOBS.append(self)

    def url(self, rank, step):
        return f"{self.urls[rank]}/version_{step}"

    def save(self, rank, step):
        return limpet.save(self.url(rank, step), state_of(rank, self.size, step), step=step)

    def save_async(self, rank, step):
        state = state_of(rank, self.size, step)
        pending = limpet.save_async(self.url(rank, step), state, step=step)
        state["weights"].tensor[...] = 7
        return pending.wait()

    def leftover_keys(self):
        """Return the keys that remain in the key-value store, except heartbeats."""
        return sorted(k for k in self.group.store.values if not k.startswith("heartbeat/"))


FaultAction = Callable[[ThreadedJob, int, Any], object]
"""An action on a rank of a job, at one of its calls. The event is set when the trial ends."""


def kill_rank(job, victim, finished):
    job.ranks[victim].dead = True


def hang_rank(job, victim, finished):
    finished.wait(60)


def kill_store(job, victim, finished):
    for view in job.group.views:
        view.disconnect()
    raise ConnectionError("the store is gone")


def raise_error(error):
    def fail(job, victim, finished):
        raise error

    return fail


@dataclass
class Trial:
    """One save of a job in which a fault occurs at one call of one rank, the victim."""

    size: int
    victim: int
    call: Call
    action: FaultAction
    save: Callable[[ThreadedJob, int, int], Any] = ThreadedJob.save
    stores: Sequence[Store] | None = None
    fired_at: float = 0.0
    outcomes: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self):
        self.inner = MemoryStore()
        self.job = job = ThreadedJob(self.size, self.stores or [self.inner] * self.size)
        finished = threading.Event()
        finished_ranks = count(1)
        self.seconds = [0.0] * self.size

        def fault(call):
            if call == self.call and not self.fired_at:
                self.fired_at = time.monotonic()
                self.action(job, self.victim, finished)

        def work(rank):
            try:
                return self.save(job, rank, 1)
            finally:
                self.seconds[rank] = time.monotonic() - (self.fired_at or time.monotonic())
                if rank != self.victim and next(finished_ranks) == self.size - 1:
                    finished.set()

        job.ranks[self.victim].before_call = fault
        try:
            self.outcomes = job.group.outcomes(work)
        finally:
            finished.set()
        return self

    # -- outcomes ----------------------------------------------------------------------------------

    @property
    def committed(self):
        return any(s.key == "version_1/manifest.json" for s in self.inner.list(""))

    def uncertain_ranks(self):
        """Return the ranks that do not know if the version is committed."""
        return [
            r
            for r, o in enumerate(self.outcomes)
            if isinstance(o, LimpetError) and o.fields.get("outcome") == "unknown"
        ]

    def check(self):
        """Check the outcomes of all ranks that are alive.

        Each rank reports correctly if the version is committed and returns within the time limit. A
        rank that raises names the victim.
        """
        for rank, outcome in enumerate(self.outcomes):
            if self.job.ranks[rank].dead:
                continue
            assert self.seconds[rank] < TIME_LIMIT or rank == self.victim, (self, self.seconds)
            if not isinstance(outcome, BaseException):
                assert self.committed, (self, rank, "says it is committed")
                saved = Run(self.inner).open(Version(1, 0))
                assert reader_of(outcome).digest == reader_of(saved).digest
                continue
            assert isinstance(outcome, LimpetError), (self, rank, outcome)
            if rank not in self.uncertain_ranks():
                assert not self.committed, (self, rank, "says it is not committed", outcome)
            if rank != self.victim:
                assert isinstance(outcome, RankFailed), (self, rank, outcome)
                expected = None if self.action is kill_store else self.victim
                assert outcome.rank == expected, (self, rank, outcome)

    def check_next_save(self, same_ranks):
        """Check that the next save succeeds and that all versions are intact afterward.

        It saves the same version, or the next one if that version is committed. Without
        ``same_ranks``, a new job saves it.
        """
        job = self.job
        if not same_ranks:
            job.group.close()
            self.job = job = ThreadedJob(self.size, self.stores or [self.inner] * self.size)
        step = 2 if self.committed else 1
        job.group.run(lambda rank: self.save(job, rank, step))
        assert job.leftover_keys() == [], (self, job.leftover_keys())
        job.group.close()
        assert_versions_intact(self.inner, [1] if step == 1 else [1, 2])

    def __repr__(self):
        return (
            f"{self.size} ranks, {self.victim} {self.action.__name__} at {self.call}: "
            + "; ".join(f"{r}: {o!r}" for r, o in enumerate(self.outcomes))
        )


def assert_versions_intact(store, steps):
    """Check that the store holds exactly these versions, and each one as it was saved."""
    run = Run(store)
    assert [v.step for v in run.listing().versions] == steps
    for step in steps:
        snapshot = run.open(Version(step, 0))
        report = snapshot.verify()
        assert report.ok, report.problems
        state = initial_state()
        load_snapshot(reader_of(snapshot), state, group=current_group())
        assert states_equal(state, state_after(step)), f"version {step} holds another state"


def record_calls(size, save=ThreadedJob.save):
    """Return the calls of each rank of a job in which no fault occurs."""
    job = ThreadedJob(size, [MemoryStore()] * size)
    job.group.run(lambda rank: save(job, rank, 1))
    job.group.close()
    return [rank.distinct_calls() for rank in job.ranks]


def run_trials(trials, check_after):
    """Run all trials, several at a time, and check each one."""

    def run_and_check(trial):
        trial.run()
        try:
            trial.check()
            check_after(trial)
        finally:
            trial.job.group.close()

    with ThreadPoolExecutor(PARALLEL_TRIALS) as pool:
        list(pool.map(run_and_check, trials))
