"""The live ranks decide together that they save their savepoints, although others may be dead.

The decision is one value in the key-value store, changed only by compare-and-set:

1. A rank holds its savepoint and votes for the step of it. While it holds the savepoint, no
   optimizer of it begins a step, so the vote is a promise that stays true until the decision.
2. A rank that sees votes for different steps voids all votes: it begins the next attempt, for the
   latest of these steps. The ranks that are behind release their savepoints, and vote again once
   they have reached it. No rank passes it, because those at that step hold their savepoints.
3. If all ranks have voted for one step, one that sees it decides that they save. If ranks are
   missing, the others wait for them: for a quarter of the time for those that do not respond, and
   for longer for those that are alive but cannot vote, such as during an EMA swap.

Only the first ranks read all votes, and more of them if these are dead: the store of 1,000 ranks
could not answer a million requests in time.

The first decision is final. A rank that it does not name, because it was stopped, saves nothing.
This is the commit protocol of ``agreement.py`` with a vote on the participants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from limpet.ranks.failure_detector import Heartbeat, WaitPosition
from limpet.ranks.group import Group, LocalGroup, StoreGroup
from limpet.ranks.kv import KVClient
from limpet.ranks.store_connection import KeyValueStore

T = TypeVar("T")


class Decision(msgspec.Struct, frozen=True):
    """The value in the store. ``ranks`` save ``step`` together. Without ranks, it is still open,
    and ``step`` is the earliest step for which to vote."""

    attempt: int = 0
    step: int = 0
    ranks: tuple[int, ...] = ()


_READERS = 4

_DECISION = msgspec.json.Decoder(Decision)
_VOTE = msgspec.json.Decoder(tuple[int, bool])


@dataclass(frozen=True, slots=True)
class Voter:
    """The part of this rank in the vote.

    ``hold`` holds the savepoint and returns its step, or None if there is no valid one.
    ``release`` releases it. ``is_saving`` returns True if a save of all ranks that holds this step
    has begun: then this rank votes only in case that another one is dead. ``has_ended`` returns
    True if the training makes no more steps: then a rank without a savepoint does not vote.
    """

    hold: Callable[[], int | None]
    release: Callable[[], object]
    is_saving: Callable[[], bool]
    has_ended: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class VoteTimes:
    """Times on the clock of the vote. ``respond_by``: the time until which a rank must respond.
    ``hold_by``: that until which this rank waits for a savepoint of its own, and ``vote_by``: for
    the votes of ranks that respond. ``end``: the end of the vote."""

    respond_by: float
    hold_by: float
    vote_by: float
    end: float


class SavepointVote:
    """The vote of the ranks of ``group`` on the savepoint to save, under the keys of ``name``."""

    def __init__(
        self, group: StoreGroup, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kv = group.kv
        self._rank, self._size = group.rank, group.size
        self._name = name
        self._clock = clock
        self._attempt = 0
        self._vote: int | None = None
        self._target = 0  # the earliest step for which to vote
        self._votes: dict[int, tuple[int, bool]] = {}
        self.poll_seconds = 0.25 + group.size * 1e-4
        """The interval between two calls of ``has_begun``."""

    # -- the beginning and the end ---------------------------------------------------------------

    def begin(self) -> None:
        """Make all ranks vote."""
        self._kv.compare_and_set(f"{self._name}/begun", "1")

    def has_begun(self) -> bool:
        """Return True if a rank has called ``begin``."""
        return self._kv.get_text(f"{self._name}/begun") is not None

    def mark_saved(self, step: int) -> None:
        """Tell the ranks that did not take part that this step is saved."""
        self._kv.compare_and_set(f"{self._name}/saved", str(step))

    def saved_step(self) -> int | None:
        """Return the step that was saved, or None."""
        text = self._kv.get_text(f"{self._name}/saved")
        return None if text is None else int(text)

    def subgroup(self, decision: Decision) -> Group:
        """Return the group of the ranks of a decision, of which this rank is one."""
        if len(decision.ranks) == 1:
            return LocalGroup(ranks=decision.ranks)
        kv = SubsetKVClient(self._kv, decision.ranks, f"{self._name}/save")
        return StoreGroup(kv, len(decision.ranks), decision.ranks)

    # -- the vote --------------------------------------------------------------------------------

    def run(self, voter: Voter, times: VoteTimes, is_over: Callable[[], bool]) -> Decision | None:
        """Vote, and return the decision, or None if there is none in time, if ``is_over``, or if
        this rank has no savepoint for which it could vote.

        If the decision names this rank, the savepoint is still held. Raises ``RankFailed`` if the
        store does not respond.
        """
        self._kv.put_all({self._key("alive", self._rank): b""})
        delay = 0.01
        while self._clock() < times.end and not is_over():
            text = self._kv.get_text(f"{self._name}/decision") or ""
            current = _DECISION.decode(text) if text else Decision()
            if current.ranks:
                return current
            self._cast_vote(current, voter)
            has_ended, now = voter.has_ended(), self._clock()
            if self._vote is None and (has_ended or now >= times.hold_by):
                self._kv.delete([self._key("alive", self._rank)])  # no other rank waits for it
                if has_ended or now >= times.hold_by + self.poll_seconds:
                    return None  # the others have not decided without it
            proposed = self._next_state(current, times)
            if proposed is None:
                time.sleep(delay)
                delay = min(1.3 * delay, 0.05 + self._size * 1e-4)
                continue
            encoded = msgspec.json.encode(proposed).decode()
            self._kv.compare_and_set(f"{self._name}/decision", encoded, text)
        return None

    def _cast_vote(self, current: Decision, voter: Voter) -> None:
        """Vote in the current attempt, if there is a savepoint that is not behind the others."""
        self._target = max(self._target, current.step)
        if current.attempt != self._attempt:
            if self._vote is not None and self._vote < self._target:
                voter.release()
            self._attempt, self._vote = current.attempt, None
            self._votes.clear()
        if self._vote is None and (step := voter.hold()) is not None:
            if step < self._target:
                voter.release()
                return
            self._vote = step
            vote = msgspec.json.encode((step, voter.is_saving()))
            self._kv.put_all({self._key(self._attempt, self._rank): vote})

    def _next_state(self, current: Decision, times: VoteTimes) -> Decision | None:
        """Return the state of the decision that this rank wants to write, or None."""
        if self._vote is None or self._rank >= self._reader_count(times):
            return None
        self._read_votes()
        steps = {step for step, _ in self._votes.values()}
        if len(steps) > 1:
            return Decision(current.attempt + 1, max(steps))
        missing = [r for r in range(self._size) if r not in self._votes]
        if not missing and all(is_saving for _, is_saving in self._votes.values()):
            return None
        if missing and not self._may_leave_out(missing, times):
            return None
        return Decision(current.attempt, self._vote, tuple(sorted(self._votes)))

    def _reader_count(self, times: VoteTimes) -> int:
        """Return how many ranks read all votes."""
        now = self._clock()
        if now >= times.vote_by:
            return self._size
        return _READERS if now < times.respond_by else _READERS**3

    def _read_votes(self) -> None:
        for rank in range(self._size):
            if rank not in self._votes:
                raw = self._kv.try_get(self._key(self._attempt, rank))
                if raw is not None:
                    self._votes[rank] = _VOTE.decode(raw)

    def _may_leave_out(self, missing: Sequence[int], times: VoteTimes) -> bool:
        now = self._clock()
        if all(beat is not None and beat.count < 0 for beat in self._kv.heartbeats(missing)):
            return True  # their processes have ended
        if now < times.respond_by:
            return False
        return now >= times.vote_by or not any(
            self._kv.has_all([self._key("alive", r)]) for r in missing
        )

    def _key(self, kind: object, rank: int) -> str:
        return f"{self._name}/{kind}/{rank}"


class SubsetKVClient(KVClient):
    """The client of a rank in a subset of the ranks, with keys of their own.

    It uses the thread, the connection, and the heartbeats of the client of all ranks.
    """

    def __init__(self, kv: KVClient, ranks: Sequence[int], prefix: str) -> None:
        super().__init__(
            _PrefixedStore(kv, prefix), ranks.index(kv.rank), len(ranks), kv.timeouts, kv.clock
        )
        self._parent = kv
        self._ranks = ranks

    def _call(self, operation: Callable[[], T]) -> T:
        return self._parent._call(operation)

    def start(self) -> None:
        self._parent.start()

    def close(self) -> None: ...

    @property
    def progress(self) -> int:
        return self._parent.progress

    def advance(self) -> None:
        self._parent.advance()

    @contextmanager
    def waiting(self, position: WaitPosition) -> Iterator[None]:
        yield

    def heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        return self._parent.heartbeats([self._ranks[r] for r in ranks])


class _PrefixedStore:
    """The store of a client, with a prefix before all keys."""

    def __init__(self, kv: KVClient, prefix: str) -> None:
        self._store: Callable[[], KeyValueStore] = lambda: kv._store  # replaced when it joins
        self._prefix = prefix

    def _named(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: bytes) -> None:
        self._store().set(self._named(key), value)

    def get(self, key: str) -> bytes:
        return self._store().get(self._named(key))

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._store().multi_set([*map(self._named, keys)], values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store().multi_get([*map(self._named, keys)])

    def check(self, keys: list[str]) -> bool:
        return self._store().check([*map(self._named, keys)])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store().compare_set(self._named(key), expected, desired)

    def add(self, key: str, number: int) -> int:
        return self._store().add(self._named(key), number)

    def delete_key(self, key: str) -> bool:
        return self._store().delete_key(self._named(key))
