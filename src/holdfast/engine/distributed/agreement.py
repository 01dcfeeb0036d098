"""Ranks agree on a step at which all of them do the same, with no collective in the step.

A round is one note in the store, which is only ever changed by compare-and-set, so that every rank
sees the same history of it: what is wanted, the step T, and how it has ended. Nobody leads:

1. Whoever wants something opens the round, or adds to what is wanted in one that is open, and T is
   the step that its own training is in, or a little later.
2. A thread beside the training of each rank sees that, and shuts the gate at T. If its training has
   come to T already, it moves T; else it acknowledges. Nobody's training can then pass T.
3. The last to acknowledge ends the round: agreed. A rank that is dead, hangs or has left is missed
   by the others, and one of them ends the round: given up. Whichever comes first stands for all.

A training thread that comes to T before that waits there, and nowhere else. All ranks call ``step``
equally often; T is the number of a call, so a run that goes back to an earlier version needs no
care.

After Paxos Commit (Gray and Lamport, 2006), with the store for its acceptors; TensorFlow's
preemption handler has the gate, and a leader.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec

from holdfast.engine.distributed.failure_detector import Vigil
from holdfast.engine.distributed.group import Group, Ranks
from holdfast.engine.distributed.kv import Board
from holdfast.engine.distributed.step_gate import NEVER, NOTHING, Gate
from holdfast.errors import RankFailed
from holdfast.events import emit

AGREED, GIVEN_UP, OVER = "agreed", "given up", "over"
"""How a round ends. OVER is the end of all rounds: a rank trains no more."""


class Agreement:
    """What all ranks do together at some step, such as a save or a stop. One object on each rank,
    made in the same order among all that the group does; ``name``: what it is for.

    ``idle``: seconds between two looks at the store while nothing is wanted, from and to.
    """

    def __init__(self, ranks: Ranks, name: str, idle: tuple[float, float] = (0.1, 0.5)) -> None:
        board = ranks.board
        self._gate = Gate(board.patience.stuck + 4 * board.patience.silent)
        self._rounds = Rounds(board, ranks.size, f"{ranks.number()}/{name}", self._gate, idle)
        self._asked: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._watch, name="holdfast-agree", daemon=True)
        self._thread.start()

    def propose(self, what: str) -> None:
        """Ask that all ranks do it. From any thread or signal handler; takes no lock, returns at
        once. What is waiting already is not asked for twice.

        It comes to nothing if a rank is dead or hangs, if one has closed, or if the store is gone:
        then the event ``not_agreed`` tells it, and it may be proposed again.
        """
        if what not in self._rounds.wanted:
            self._asked.put((what, self._gate.taken))

    def step(self) -> frozenset[str]:
        """What all ranks do now, usually nothing; called after each step, equally often on all.

        Waits only at a step on which the ranks are about to agree. Raises ``RankFailed``, once, if
        whether they have cannot be known, since the store is gone: others may act at this step.
        """
        return self._gate.step()

    def close(self) -> None:
        """This rank trains no more, so nothing can be agreed by all from now on: rounds under way
        end for the other ranks, whose training goes on. Waits for the store two seconds at most."""
        if not self._closed:
            self._closed = True
            self._gate.open()
            self._asked.put(None)
            self._thread.join(2)

    # -- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        rounds = self._rounds
        try:
            while True:
                pause = rounds.turn()
                if rounds.over is not None:
                    break
                self._hear(pause)
        except Exception as e:  # noqa: BLE001  (top of a thread: told, and raised at a shut gate)
            rounds.break_off(e)
        told: set[str] = set()
        while not rounds.closing:
            asked = self._asked.get()
            if asked is None:
                return
            if asked[0] not in told:
                told.add(asked[0])
                emit("not_agreed", wanted=[asked[0]], error=rounds.over)

    def _hear(self, pause: float) -> None:
        """Until something new is asked for, or the pause is over."""
        clock = self._rounds.clock
        until = clock() + pause
        new = False
        while True:
            try:
                asked = self._asked.get(timeout=0 if new else max(0.0, until - clock()))
            except Empty:
                return
            if asked is None:
                self._rounds.closing = new = True
            elif asked[0] not in self._rounds.wanted and not self._gate.meets(*asked):
                self._rounds.wanted.add(asked[0])
                new = True


class Alone:
    """The ``Agreement`` of one process: what is proposed is done at its next step."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[str] = SimpleQueue()

    def propose(self, what: str) -> None:
        self._asked.put(what)

    def step(self) -> frozenset[str]:
        if self._asked.empty():
            return NOTHING
        return frozenset(self._asked.get() for _ in range(self._asked.qsize()))

    def close(self) -> None:
        if wanted := self.step():
            emit("not_agreed", wanted=sorted(wanted), error=RankFailed("The training has ended"))


def agreement(group: Group, name: str) -> Agreement | Alone:
    """The ``Agreement`` of a group. A call of all its ranks."""
    if isinstance(group, Ranks) and group.size > 1:
        return Agreement(group, name)
    return Alone()


class Round(msgspec.Struct, frozen=True):
    """The note of a round: what all ranks are to do at step ``at``. Each ``attempt`` has another
    ``at``. ``why`` it has come to nothing, by which ``rank``."""

    wanted: tuple[str, ...] = ()
    at: int = 0
    attempt: int = 0
    end: str = ""
    why: str = ""
    rank: int | None = None


class Rounds:
    """The rounds, one after the other, as one rank sees and takes part in them. It waits for
    nothing but the store's answers; all calls are from one thread."""

    def __init__(
        self, board: Board, size: int, name: str, gate: Gate, idle: tuple[float, float]
    ) -> None:
        self.wanted: set[str] = set()
        self.closing = False
        self.over: RankFailed | None = None
        """Why nothing more is agreed."""

        self.clock: Callable[[], float] = board.clock
        self._board = board
        self._size = size
        self._name = name
        self._gate = gate
        self._idle = idle[0], idle[1] + size * 1e-4  # 16,000 ranks: 8,000 looks a second
        self._busy = 0.001, 0.01 + size * 2e-5
        self._number = 0
        self._last = 0  # the latest step that was agreed
        self._speed = 0.0  # steps a second
        self._timed = board.clock(), 0
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        self._key = f"{self._name}/{self._number}"
        self._found: Round | None = None
        self._acked: list[int] = []
        self._complete = False
        self._pause = self._idle[0]
        self._vigil: Vigil | None = None
        self._began = self._look_at = 0.0

    def turn(self) -> float:
        """Look at the round once, and do what is this rank's to do. Seconds until the next look.

        Raises ``RankFailed`` if the store does not answer.
        """
        self._measure()
        text = self._board.claimed(self._key) or ""
        found = msgspec.json.decode(text, type=Round) if text else None
        if found is not None and self._found is None:
            self._pause, self._began = self._busy[0], self.clock()
        self._found = found
        if found is not None and found.end:
            self._leave(found)
            return 0.0
        made = self._next(found)
        if made is not None and made != found:
            self._board.claim(self._key, msgspec.json.encode(made).decode(), text)
            return 0.0  # whoever has won: look again
        growth, longest = (1.2, self._idle[1]) if found is None else (1.5, self._busy[1])
        pause, self._pause = self._pause, min(self._pause * growth, longest)
        return pause

    def _next(self, found: Round | None) -> Round | None:
        """What this rank makes of the round."""
        me = self._board.rank
        if self.closing:
            why = f"Rank {me} trains no more, so the ranks agree on nothing more"
            return msgspec.structs.replace(found or Round(), end=OVER, why=why, rank=me)
        if found is None:
            wanted = tuple(sorted(self.wanted))
            return Round(wanted, self._beyond(0)) if wanted else None
        if more := self.wanted.difference(found.wanted):
            return msgspec.structs.replace(found, wanted=tuple(sorted(more.union(found.wanted))))
        if found.attempt not in self._acked:
            if not self._gate.arm(found.at):
                attempt = found.attempt + 1
                return msgspec.structs.replace(found, at=self._beyond(attempt), attempt=attempt)
            self._acked.append(found.attempt)  # before it is sent: the answer may be lost
            self._board.put(self._ack(self._board.rank, found.attempt), b"")
            count = self._board.count(f"{self._key}/{found.attempt}")
            self._complete = count == self._size
        if self._complete:
            return msgspec.structs.replace(found, end=AGREED)
        return self._look_after(found)

    def _beyond(self, attempt: int) -> int:
        """A step that no rank will have come to, most likely, when the last has seen it."""
        seen = self._idle[1]
        if self._found is not None:
            seen = max(seen, 2 * (self.clock() - self._began))
        ahead = int(2 ** min(attempt, 20) + self._speed * seen)
        return max(self._gate.at, self._last) + ahead

    def _measure(self) -> None:
        (before, at), now = self._timed, self.clock()
        if now - before >= 0.25 and self._gate.at > at:
            self._timed = now, self._gate.at
            self._speed = (self._timed[1] - at) / (now - before)

    def _ack(self, rank: int, attempt: int) -> str:
        return f"{self._key}/{attempt}/{rank}"

    # -- ranks that are missed -------------------------------------------------------------------

    def _look_after(self, found: Round) -> Round:
        """Rank 0 looks after all that have not acknowledged, and the others after rank 0."""
        patience, now = self._board.patience, self.clock()
        every = min(max(1.0, self._size / 2000), patience.silent / 4)
        if self._vigil is None:
            self._vigil = Vigil(self._board, f"agreeing on {', '.join(found.wanted)}", NEVER)
            self._look_at = now + every
        if now < self._look_at:
            return found
        self._look_at = now + every
        ranks, longest = [0], patience.stuck + patience.silent
        if self._board.rank == 0:
            acks = [self._ack(r, found.attempt) for r in range(self._size)]
            if self._board.there(acks):  # the last of them has died before it could end the round
                return msgspec.structs.replace(found, end=AGREED)
            ranks, longest = list(range(self._size)), patience.stuck

        def came(rank: int) -> bool:
            return self._board.there([self._ack(rank, found.attempt)]) and self._board.rank == 0

        lost = self._vigil.lost(ranks, came)
        if lost is None and now - self._began > longest:
            expected, nothing = f"an answer within {longest:g} s", "none, though it is alive"
            missed = [r for r in ranks if not came(r)] or [0]
            lost = self._vigil.error(missed, expected, nothing)
        if lost is None:
            return found
        return msgspec.structs.replace(found, end=GIVEN_UP, why=str(lost), rank=lost.rank)

    # -- the end of a round ----------------------------------------------------------------------

    def _leave(self, found: Round) -> None:
        """Act upon the end of the round, and go on to the next. The last to leave cleans up."""
        error = RankFailed(found.why, rank=found.rank)
        key, acks = self._key, [self._ack(self._board.rank, a) for a in self._acked]
        lost = set(found.wanted)
        self.wanted -= lost  # before it is granted: it may be asked for again right after
        if found.end == AGREED:
            self._gate.grant(found.at, frozenset(lost))
            self._last, lost = found.at, set()
        else:
            self._gate.release()
        if found.end == OVER:
            self.over = error
            lost |= self.wanted
            self.wanted.clear()
        self._begin()
        if lost:
            emit("not_agreed", wanted=sorted(lost), error=error)
        self._board.forget(acks)
        if self._board.count(f"{key}/left") == self._size:
            counts = [f"{key}/{attempt}" for attempt in range(found.attempt + 1)]
            self._board.forget([key, *counts, f"{key}/left"])

    def break_off(self, error: Exception) -> None:
        """There is no agreement any more. The training goes on, up to a step that this rank has
        acknowledged and whose round has no end that it knows."""
        lost = self.wanted.union(self._found.wanted if self._found is not None else ())
        failed = RankFailed(
            "The ranks cannot agree on what they do any more",
            found=str(error) or type(error).__name__,
            todo="What was committed before is safe. Start the job again",
        )
        failed.__cause__ = error
        if self._acked:
            self._gate.fail(failed)
        else:
            self._gate.release()
        self.over = failed
        self.wanted.clear()
        if lost and not self.closing:
            emit("not_agreed", wanted=sorted(lost), error=failed)
