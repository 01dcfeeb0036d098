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
from holdfast.engine.distributed.kv import Patience
from holdfast.engine.loading.load import load_snapshot
from holdfast.errors import HoldfastError, RankFailed
from holdfast.format.names import Version
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.fakegroup import FakeGroup
from tests.engine.unreliable_stores import Wrapped
from tests.trainings import after, fresh, same

SOON = Patience(silent=1.5, stuck=2.5)
"""As short as a thread that is alive can be told from one that is not, on a busy machine."""

AT_ONCE = 20
"""Trials that go on side by side: most of their time is waiting."""

BOUND = 3 * SOON.stuck

STORES: dict[str, Store] = {}
"""What a URL's root leads to: the store of one rank of one trial."""

CREWS: list[Crew] = []

_names = count()


class Killed(BaseException):
    """Ends the thread of a rank whose process was killed."""


class Call(NamedTuple):
    """A call of one rank: to the ``board`` or the ``store``, the n-th of its kind."""

    to: str
    method: str
    key: str
    n: int


def state_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """The state of ``trainings.after(step)``: the weights are cut, the rest is everywhere."""
    state = after(step)
    rows = np.array_split(np.arange(1000), size)[rank]
    part = state["weights"][rows]
    return {**state, "weights": holdfast.Boxed(part, (int(rows[0]),), (1000,))}


@dataclass
class Rank:
    """One rank, and what it has called. ``peril(call)`` is called before each of its calls."""

    view: Any
    store: Wrapped
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    peril: Callable[[Call], object] = lambda call: None
    dead: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def called(self, to: str, method: str, key: str) -> None:
        key = re.sub(r"\b[0-9a-f]{12,}\b", "*", key)
        with self.lock:
            self.calls[to, method, key] += 1
            call = Call(to, method, key, self.calls[to, method, key])
        if not self.dead:
            self.peril(call)
        if self.dead:
            raise ConnectionError("killed by a test") if to == "board" else Killed

    def known(self) -> list[Call]:
        """Each of its calls; of those to the board that are made again and again the first."""
        return [
            Call(*kind, n)
            for kind, times in self.calls.items()
            for n in range(1, (1 if kind[0] == "board" else times) + 1)
        ]


class Crew:
    """A group of ranks, each with a store that it sees alone, all of the same ``inner`` one."""

    def __init__(self, size: int, stores: Sequence[Store], patience: Patience = SOON) -> None:
        self.group = FakeGroup(size, patience)
        self.size = size
        self.urls = [f"rank://{next(_names)}" for _ in range(size)]
        self.ranks: list[Rank] = []
        for view, inner, url in zip(self.group.views, stores, self.urls, strict=True):
            rank = Rank(view, Wrapped(inner))
            view.before = lambda method, key, rank=rank: rank.called("board", method, key)
            rank.store.before = lambda method, key, rank=rank: rank.called("store", method, key)
            STORES[url] = rank.store
            self.ranks.append(rank)
        CREWS.append(self)

    def url(self, rank: int, step: int) -> str:
        return f"{self.urls[rank]}/version_{step}"

    def save(self, rank: int, step: int) -> Any:
        return holdfast.save(self.url(rank, step), state_of(rank, self.size, step), step=step)

    def save_async(self, rank: int, step: int) -> Any:
        state = state_of(rank, self.size, step)
        pending = holdfast.save_async(self.url(rank, step), state, step=step)
        state["weights"].tensor[...] = 7
        return pending.wait()

    def keys(self) -> list[str]:
        """What is left on the board, but for the pulses."""
        return sorted(k for k in self.group.store.values if not k.startswith("pulse/"))


Act = Callable[[Crew, int, Any], object]
"""What happens to a rank of a crew, at a call; the event is set when the trial is over."""


def dies(crew: Crew, victim: int, over: Any) -> None:
    crew.ranks[victim].dead = True


def hangs(crew: Crew, victim: int, over: Any) -> None:
    over.wait(60)


def all_boards_die(crew: Crew, victim: int, over: Any) -> None:
    for view in crew.group.views:
        view.die()
    raise ConnectionError("the store is gone")


def fails(error: Exception) -> Act:
    def act(crew: Crew, victim: int, over: Any) -> None:
        raise error

    return act


@dataclass
class Trial:
    """One save by a crew, one of whose ranks has bad luck at a call."""

    size: int
    victim: int
    call: Call
    act: Act
    save: Callable[[Crew, int, int], Any] = Crew.save
    stores: Sequence[Store] | None = None
    fired: float = 0.0
    outcomes: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self) -> Trial:
        self.inner = MemoryStore()
        self.crew = crew = Crew(self.size, self.stores or [self.inner] * self.size)
        over = threading.Event()
        left = count(1)
        self.seconds = [0.0] * self.size

        def peril(call: Call) -> None:
            if call == self.call and not self.fired:
                self.fired = time.monotonic()
                self.act(crew, self.victim, over)

        def work(rank: int) -> Any:
            try:
                return self.save(crew, rank, 1)
            finally:
                self.seconds[rank] = time.monotonic() - (self.fired or time.monotonic())
                if rank != self.victim and next(left) == self.size - 1:
                    over.set()

        crew.ranks[self.victim].peril = peril
        try:
            self.outcomes = crew.group.outcomes(work)
        finally:
            over.set()
        return self

    # -- what came of it ---------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        return any(s.key == "version_1/manifest.json" for s in self.inner.list(""))

    def unknown(self) -> list[int]:
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
            if self.crew.ranks[rank].dead:
                continue
            assert self.seconds[rank] < BOUND or rank == self.victim, (self, self.seconds)
            if not isinstance(outcome, BaseException):
                assert self.committed, (self, rank, "says it is committed")
                assert outcome.digest == Run(self.inner).open(Version(1, 0)).digest
                continue
            assert isinstance(outcome, HoldfastError), (self, rank, outcome)
            if rank not in self.unknown():
                assert not self.committed, (self, rank, "says it is not committed", outcome)
            if rank != self.victim:
                assert isinstance(outcome, RankFailed), (self, rank, outcome)
                wanted = None if self.act is all_boards_die else self.victim
                assert outcome.rank == wanted, (self, rank, outcome)

    def goes_on(self, again: bool) -> None:
        """The next save, of that version or the next, ``again`` by the same ranks; then all that is
        there is sound."""
        crew = self.crew
        if not again:
            crew.group.close()
            self.crew = crew = Crew(self.size, self.stores or [self.inner] * self.size)
        step = 2 if self.committed else 1
        crew.group.run(lambda rank: self.save(crew, rank, step))
        assert crew.keys() == [], (self, crew.keys())
        crew.group.close()
        sound(self.inner, [1] if step == 1 else [1, 2])

    def __repr__(self) -> str:
        return f"{self.size} ranks, {self.victim} {self.act.__name__} at {self.call}: " + "; ".join(
            f"{r}: {o!r}" for r, o in enumerate(self.outcomes)
        )


def sound(store: Store, steps: list[int]) -> None:
    """There are these versions, whole and as they were saved."""
    run = Run(store)
    assert [v.step for v in run.listing().versions] == steps
    for step in steps:
        snapshot = run.open(Version(step, 0))
        report = snapshot.verify()
        assert report.ok, report.problems
        state = fresh()
        load_snapshot(snapshot, state)
        assert same(state, after(step)), f"version {step} holds another state"


def calls_of(size: int, save: Callable[[Crew, int, int], Any] = Crew.save) -> list[list[Call]]:
    """The calls of each rank of a crew that nothing happens to."""
    crew = Crew(size, [MemoryStore()] * size)
    crew.group.run(lambda rank: save(crew, rank, 1))
    crew.group.close()
    return [rank.known() for rank in crew.ranks]


def every(trials: Sequence[Trial], then: Callable[[Trial], object]) -> None:
    """Run all trials, some at a time, and what is to be looked at after each."""

    def one(trial: Trial) -> None:
        trial.run()
        try:
            trial.check()
            then(trial)
        finally:
            trial.crew.group.close()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, trials))
