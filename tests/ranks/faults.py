"""Ranks in threads to which things happen: at any call to the board or to the store of one of them
it dies, the call fails, or it does not return.
"""

from __future__ import annotations

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

import holdfast
from holdfast.engine.distributed.kv import Timeouts
from holdfast.engine.loading.load import load_snapshot
from holdfast.errors import HoldfastError, RankFailed
from holdfast.format.names import Version
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.fakegroup import FakeGroup
from tests.engine.unreliable_stores import HookedStore
from tests.trainings import initial_state, state_after, states_equal

SHORT_TIMEOUTS = Timeouts(silent=1.5, stuck=2.5)
"""As short as a thread that is alive can be told from one that is not, on a busy machine."""

PARALLEL_TRIALS = 20
"""Trials that go on side by side: most of their time is waiting."""

TIME_LIMIT = 3 * SHORT_TIMEOUTS.stuck

STORES_BY_URL: dict[str, Store] = {}
"""What a URL's root leads to: the store of one rank of one trial."""

OPEN_JOBS: list[ThreadedJob] = []

_url_numbers = count()


class Killed(BaseException):
    """Ends the thread of a rank whose process was killed."""


class Call(NamedTuple):
    """A call of one rank: to the ``board`` or the ``store``, the n-th of its kind."""

    target: str
    method: str
    key: str
    occurrence: int


def state_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """The state of ``trainings.after(step)``: the weights are cut, the rest is everywhere."""
    state = state_after(step)
    rows = np.array_split(np.arange(1000), size)[rank]
    part = state["weights"][rows]
    return {**state, "weights": holdfast.Boxed(part, (int(rows[0]),), (1000,))}


@dataclass
class FaultyRank:
    """One rank, and what it has called. ``peril(call)`` is called before each of its calls."""

    store_view: Any
    store: HookedStore
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    before_call: Callable[[Call], object] = lambda call: None
    dead: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def record_call(self, target: str, method: str, key: str) -> None:
        key = re.sub(r"\b[0-9a-f]{12,}\b", "*", key)
        with self.lock:
            self.calls[target, method, key] += 1
            call = Call(target, method, key, self.calls[target, method, key])
        if not self.dead:
            self.before_call(call)
        if self.dead:
            raise ConnectionError("killed by a test") if target == "board" else Killed

    def distinct_calls(self) -> list[Call]:
        """Each of its calls; of those to the board that are made again and again the first."""
        return [
            Call(*kind, n)
            for kind, times in self.calls.items()
            for n in range(1, (1 if kind[0] == "board" else times) + 1)
        ]


class ThreadedJob:
    """A group of ranks, each with a store that it sees alone, all of the same ``inner`` one."""

    def __init__(
        self, size: int, stores: Sequence[Store], timeouts: Timeouts = SHORT_TIMEOUTS
    ) -> None:
        self.group = FakeGroup(size, timeouts)
        self.size = size
        self.urls = [f"rank://{next(_url_numbers)}" for _ in range(size)]
        self.ranks: list[FaultyRank] = []
        for view, inner, url in zip(self.group.views, stores, self.urls, strict=True):
            rank = FaultyRank(view, HookedStore(inner))
            view.before = lambda method, key, rank=rank: rank.record_call("board", method, key)
            rank.store.before = lambda method, key, rank=rank: rank.record_call(
                "store", method, key
            )
            STORES_BY_URL[url] = rank.store
            self.ranks.append(rank)
        OPEN_JOBS.append(self)

    def url(self, rank: int, step: int) -> str:
        return f"{self.urls[rank]}/version_{step}"

    def save(self, rank: int, step: int) -> Any:
        return holdfast.save(self.url(rank, step), state_of(rank, self.size, step), step=step)

    def save_async(self, rank: int, step: int) -> Any:
        state = state_of(rank, self.size, step)
        pending = holdfast.save_async(self.url(rank, step), state, step=step)
        state["weights"].tensor[...] = 7
        return pending.wait()

    def leftover_keys(self) -> list[str]:
        """What is left on the board, but for the pulses."""
        return sorted(k for k in self.group.store.values if not k.startswith("pulse/"))


FaultAction = Callable[[ThreadedJob, int, Any], object]
"""What happens to a rank of a crew, at a call; the event is set when the trial is over."""


def kill_rank(job: ThreadedJob, victim: int, finished: Any) -> None:
    job.ranks[victim].dead = True


def hang_rank(job: ThreadedJob, victim: int, finished: Any) -> None:
    finished.wait(60)


def kill_store(job: ThreadedJob, victim: int, finished: Any) -> None:
    for view in job.group.views:
        view.disconnect()
    raise ConnectionError("the store is gone")


def raise_error(error: Exception) -> FaultAction:
    def act(crew: ThreadedJob, victim: int, over: Any) -> None:
        raise error

    return act


@dataclass
class Trial:
    """One save by a crew, one of whose ranks has bad luck at a call."""

    size: int
    victim: int
    call: Call
    action: FaultAction
    save: Callable[[ThreadedJob, int, int], Any] = ThreadedJob.save
    stores: Sequence[Store] | None = None
    fired_at: float = 0.0
    outcomes: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self) -> Trial:
        self.inner = MemoryStore()
        self.job = crew = ThreadedJob(self.size, self.stores or [self.inner] * self.size)
        over = threading.Event()
        left = count(1)
        self.seconds = [0.0] * self.size

        def peril(call: Call) -> None:
            if call == self.call and not self.fired_at:
                self.fired_at = time.monotonic()
                self.action(crew, self.victim, over)

        def work(rank: int) -> Any:
            try:
                return self.save(crew, rank, 1)
            finally:
                self.seconds[rank] = time.monotonic() - (self.fired_at or time.monotonic())
                if rank != self.victim and next(left) == self.size - 1:
                    over.set()

        crew.ranks[self.victim].before_call = peril
        try:
            self.outcomes = crew.group.outcomes(work)
        finally:
            over.set()
        return self

    # -- what came of it ---------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        return any(s.key == "version_1/manifest.json" for s in self.inner.list(""))

    def uncertain_ranks(self) -> list[int]:
        """The ranks that cannot tell whether it is committed."""
        return [
            r
            for r, o in enumerate(self.outcomes)
            if isinstance(o, HoldfastError) and o.fields.get("outcome") == "unknown"
        ]

    def check(self) -> None:
        """Nobody says what is not so, nobody has waited for long, and all who have failed know by
        whom."""
        for rank, outcome in enumerate(self.outcomes):
            if self.job.ranks[rank].dead:
                continue
            assert self.seconds[rank] < TIME_LIMIT or rank == self.victim, (self, self.seconds)
            if not isinstance(outcome, BaseException):
                assert self.committed, (self, rank, "says it is committed")
                assert outcome.digest == Run(self.inner).open(Version(1, 0)).digest
                continue
            assert isinstance(outcome, HoldfastError), (self, rank, outcome)
            if rank not in self.uncertain_ranks():
                assert not self.committed, (self, rank, "says it is not committed", outcome)
            if rank != self.victim:
                assert isinstance(outcome, RankFailed), (self, rank, outcome)
                wanted = None if self.action is kill_store else self.victim
                assert outcome.rank == wanted, (self, rank, outcome)

    def check_next_save(self, same_ranks: bool) -> None:
        """The next save, of that version or the next, ``again`` by the same ranks; then all that is
        there is sound."""
        crew = self.job
        if not same_ranks:
            crew.group.close()
            self.job = crew = ThreadedJob(self.size, self.stores or [self.inner] * self.size)
        step = 2 if self.committed else 1
        crew.group.run(lambda rank: self.save(crew, rank, step))
        assert crew.leftover_keys() == [], (self, crew.leftover_keys())
        crew.group.close()
        assert_versions_intact(self.inner, [1] if step == 1 else [1, 2])

    def __repr__(self) -> str:
        return (
            f"{self.size} ranks, {self.victim} {self.action.__name__} at {self.call}: "
            + "; ".join(f"{r}: {o!r}" for r, o in enumerate(self.outcomes))
        )


def assert_versions_intact(store: Store, steps: list[int]) -> None:
    """There are these versions, whole and as they were saved."""
    run = Run(store)
    assert [v.step for v in run.listing().versions] == steps
    for step in steps:
        snapshot = run.open(Version(step, 0))
        report = snapshot.verify()
        assert report.ok, report.problems
        state = initial_state()
        load_snapshot(snapshot, state)
        assert states_equal(state, state_after(step)), f"version {step} holds another state"


def record_calls(
    size: int, save: Callable[[ThreadedJob, int, int], Any] = ThreadedJob.save
) -> list[list[Call]]:
    """The calls of each rank of a crew that nothing happens to."""
    crew = ThreadedJob(size, [MemoryStore()] * size)
    crew.group.run(lambda rank: save(crew, rank, 1))
    crew.group.close()
    return [rank.distinct_calls() for rank in crew.ranks]


def run_trials(trials: Sequence[Trial], check_after: Callable[[Trial], object]) -> None:
    """Run all trials, some at a time, and what is to be looked at after each."""

    def one(trial: Trial) -> None:
        trial.run()
        try:
            trial.check()
            check_after(trial)
        finally:
            trial.job.group.close()

    with ThreadPoolExecutor(PARALLEL_TRIALS) as pool:
        list(pool.map(one, trials))
