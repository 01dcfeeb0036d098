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

from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.group import Group, StoreGroup
from holdfast.engine.distributed.kv import KVClient
from holdfast.engine.distributed.step_gate import NEVER, NO_ACTIONS, StepGate
from holdfast.errors import RankFailed
from holdfast.events import emit

AGREED, ABORTED, CLOSED = "agreed", "given up", "over"
"""How a round ends. OVER is the end of all rounds: a rank trains no more."""


class Agreement:
    """What all ranks do together at some step, such as a save or a stop. One object on each rank,
    made in the same order among all that the group does; ``name``: what it is for.

    ``idle``: seconds between two looks at the store while nothing is wanted, from and to.
    """

    def __init__(
        self, group: StoreGroup, name: str, idle_poll: tuple[float, float] = (0.1, 0.5)
    ) -> None:
        board = group.kv
        self._gate = StepGate(board.timeouts.stuck + 4 * board.timeouts.silent)
        self._participant = RoundParticipant(
            board, group.size, f"{group.next_sequence_number()}/{name}", self._gate, idle_poll
        )
        self._proposals: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._watch, name="holdfast-agree", daemon=True)
        self._thread.start()

    def propose(self, action: str) -> None:
        """Ask that all ranks do it. From any thread or signal handler; takes no lock, returns at
        once. What is waiting already is not asked for twice.

        It comes to nothing if a rank is dead or hangs, if one has closed, or if the store is gone:
        then the event ``not_agreed`` tells it, and it may be proposed again.
        """
        if action not in self._participant.proposed:
            self._proposals.put((action, self._gate.delivery_count))

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
            self._gate.disable()
            self._proposals.put(None)
            self._thread.join(2)

    # -- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        rounds = self._participant
        try:
            while True:
                pause = rounds.poll()
                if rounds.closed_error is not None:
                    break
                self._wait_for_proposals(pause)
        except Exception as e:  # noqa: BLE001  (top of a thread: told, and raised at a shut gate)
            rounds.abort(e)
        told: set[str] = set()
        while not rounds.closing:
            asked = self._proposals.get()
            if asked is None:
                return
            if asked[0] not in told:
                told.add(asked[0])
                emit("not_agreed", wanted=[asked[0]], error=rounds.closed_error)

    def _wait_for_proposals(self, timeout: float) -> None:
        """Until something new is asked for, or the pause is over."""
        clock = self._participant.clock
        until = clock() + timeout
        new = False
        while True:
            try:
                asked = self._proposals.get(timeout=0 if new else max(0.0, until - clock()))
            except Empty:
                return
            if asked is None:
                self._participant.closing = new = True
            elif asked[0] not in self._participant.proposed and not self._gate.is_delivered_after(
                *asked
            ):
                self._participant.proposed.add(asked[0])
                new = True


class LocalAgreement:
    """The ``Agreement`` of one process: what is proposed is done at its next step."""

    def __init__(self) -> None:
        self._proposals: SimpleQueue[str] = SimpleQueue()

    def propose(self, action: str) -> None:
        self._proposals.put(action)

    def step(self) -> frozenset[str]:
        if self._proposals.empty():
            return NO_ACTIONS
        return frozenset(self._proposals.get() for _ in range(self._proposals.qsize()))

    def close(self) -> None:
        if wanted := self.step():
            emit("not_agreed", wanted=sorted(wanted), error=RankFailed("The training has ended"))


def make_agreement(group: Group, name: str) -> Agreement | LocalAgreement:
    """The ``Agreement`` of a group. A call of all its ranks."""
    if isinstance(group, StoreGroup) and group.size > 1:
        return Agreement(group, name)
    return LocalAgreement()


class Round(msgspec.Struct, frozen=True):
    """The note of a round: what all ranks are to do at step ``at``. Each ``attempt`` has another
    ``at``. ``why`` it has come to nothing, by which ``rank``."""

    actions: tuple[str, ...] = ()
    step: int = 0
    attempt: int = 0
    outcome: str = ""
    reason: str = ""
    rank: int | None = None


class RoundParticipant:
    """The rounds, one after the other, as one rank sees and takes part in them. It waits for
    nothing but the store's answers; all calls are from one thread."""

    def __init__(
        self, kv: KVClient, size: int, name: str, gate: StepGate, idle_poll: tuple[float, float]
    ) -> None:
        self.proposed: set[str] = set()
        self.closing = False
        self.closed_error: RankFailed | None = None
        """Why nothing more is agreed."""

        self.clock: Callable[[], float] = kv.clock
        self._kv = kv
        self._size = size
        self._name = name
        self._gate = gate
        self._idle_poll = (
            idle_poll[0],
            idle_poll[1] + size * 1e-4,
        )  # 16,000 ranks: 8,000 looks a second
        self._active_poll = 0.001, 0.01 + size * 2e-5
        self._round_number = 0
        self._last_agreed_step = 0  # the latest step that was agreed
        self._steps_per_second = 0.0  # steps a second
        self._last_measurement = kv.clock(), 0
        self._begin_round()

    def _begin_round(self) -> None:
        self._round_number += 1
        self._key = f"{self._name}/{self._round_number}"
        self._current: Round | None = None
        self._acked_attempts: list[int] = []
        self._all_acked = False
        self._poll_delay = self._idle_poll[0]
        self._detector: FailureDetector | None = None
        self._started_at = self._next_check_at = 0.0

    def poll(self) -> float:
        """Look at the round once, and do what is this rank's to do. Seconds until the next look.

        Raises ``RankFailed`` if the store does not answer.
        """
        self._measure_speed()
        text = self._kv.get_text(self._key) or ""
        found = msgspec.json.decode(text, type=Round) if text else None
        if found is not None and self._current is None:
            self._poll_delay, self._started_at = self._active_poll[0], self.clock()
        self._current = found
        if found is not None and found.outcome:
            self._finish_round(found)
            return 0.0
        made = self._next_state(found)
        if made is not None and made != found:
            self._kv.compare_and_set(self._key, msgspec.json.encode(made).decode(), text)
            return 0.0  # whoever has won: look again
        growth, longest = (
            (1.2, self._idle_poll[1]) if found is None else (1.5, self._active_poll[1])
        )
        pause, self._poll_delay = self._poll_delay, min(self._poll_delay * growth, longest)
        return pause

    def _next_state(self, current: Round | None) -> Round | None:
        """What this rank makes of the round."""
        me = self._kv.rank
        if self.closing:
            why = f"Rank {me} trains no more, so the ranks agree on nothing more"
            return msgspec.structs.replace(current or Round(), outcome=CLOSED, reason=why, rank=me)
        if current is None:
            wanted = tuple(sorted(self.proposed))
            return Round(wanted, self._choose_step(0)) if wanted else None
        if more := self.proposed.difference(current.actions):
            return msgspec.structs.replace(
                current, actions=tuple(sorted(more.union(current.actions)))
            )
        if current.attempt not in self._acked_attempts:
            if not self._gate.arm(current.step):
                attempt = current.attempt + 1
                return msgspec.structs.replace(
                    current, step=self._choose_step(attempt), attempt=attempt
                )
            self._acked_attempts.append(
                current.attempt
            )  # before it is sent: the answer may be lost
            self._kv.put(self._ack_key(self._kv.rank, current.attempt), b"")
            count = self._kv.increment(f"{self._key}/{current.attempt}")
            self._all_acked = count == self._size
        if self._all_acked:
            return msgspec.structs.replace(current, outcome=AGREED)
        return self._check_failures(current)

    def _choose_step(self, attempt: int) -> int:
        """A step that no rank will have come to, most likely, when the last has seen it."""
        seen = self._idle_poll[1]
        if self._current is not None:
            seen = max(seen, 2 * (self.clock() - self._started_at))
        ahead = int(2 ** min(attempt, 20) + self._steps_per_second * seen)
        return max(self._gate.current_step, self._last_agreed_step) + ahead

    def _measure_speed(self) -> None:
        (before, at), now = self._last_measurement, self.clock()
        if now - before >= 0.25 and self._gate.current_step > at:
            self._last_measurement = now, self._gate.current_step
            self._steps_per_second = (self._last_measurement[1] - at) / (now - before)

    def _ack_key(self, rank: int, attempt: int) -> str:
        return f"{self._key}/{attempt}/{rank}"

    # -- ranks that are missed -------------------------------------------------------------------

    def _check_failures(self, current: Round) -> Round:
        """Rank 0 looks after all that have not acknowledged, and the others after rank 0."""
        patience, now = self._kv.timeouts, self.clock()
        every = min(max(1.0, self._size / 2000), patience.silent / 4)
        if self._detector is None:
            self._detector = FailureDetector(
                self._kv, f"agreeing on {', '.join(current.actions)}", NEVER
            )
            self._next_check_at = now + every
        if now < self._next_check_at:
            return current
        self._next_check_at = now + every
        ranks, longest = [0], patience.stuck + patience.silent
        if self._kv.rank == 0:
            acks = [self._ack_key(r, current.attempt) for r in range(self._size)]
            if self._kv.has_all(acks):  # the last of them has died before it could end the round
                return msgspec.structs.replace(current, outcome=AGREED)
            ranks, longest = list(range(self._size)), patience.stuck

        def came(rank: int) -> bool:
            return self._kv.has_all([self._ack_key(rank, current.attempt)]) and self._kv.rank == 0

        lost = self._detector.failed(ranks, came)
        if lost is None and now - self._started_at > longest:
            expected, nothing = f"an answer within {longest:g} s", "none, though it is alive"
            missed = [r for r in ranks if not came(r)] or [0]
            lost = self._detector.make_error(missed, expected, nothing)
        if lost is None:
            return current
        return msgspec.structs.replace(current, outcome=ABORTED, reason=str(lost), rank=lost.rank)

    # -- the end of a round ----------------------------------------------------------------------

    def _finish_round(self, finished: Round) -> None:
        """Act upon the end of the round, and go on to the next. The last to leave cleans up."""
        error = RankFailed(finished.reason, rank=finished.rank)
        key, acks = self._key, [self._ack_key(self._kv.rank, a) for a in self._acked_attempts]
        lost = set(finished.actions)
        self.proposed -= lost  # before it is granted: it may be asked for again right after
        if finished.outcome == AGREED:
            self._gate.grant(finished.step, frozenset(lost))
            self._last_agreed_step, lost = finished.step, set()
        else:
            self._gate.disarm()
        if finished.outcome == CLOSED:
            self.closed_error = error
            lost |= self.proposed
            self.proposed.clear()
        self._begin_round()
        if lost:
            emit("not_agreed", wanted=sorted(lost), error=error)
        self._kv.delete(acks)
        if self._kv.increment(f"{key}/left") == self._size:
            counts = [f"{key}/{attempt}" for attempt in range(finished.attempt + 1)]
            self._kv.delete([key, *counts, f"{key}/left"])

    def abort(self, error: Exception) -> None:
        """There is no agreement any more. The training goes on, up to a step that this rank has
        acknowledged and whose round has no end that it knows."""
        lost = self.proposed.union(self._current.actions if self._current is not None else ())
        failed = RankFailed(
            "The ranks cannot agree on what they do any more",
            found=str(error) or type(error).__name__,
            todo="What was committed before is safe. Start the job again",
        )
        failed.__cause__ = error
        if self._acked_attempts:
            self._gate.fail(failed)
        else:
            self._gate.disarm()
        self.closed_error = failed
        self.proposed.clear()
        if lost and not self.closing:
            emit("not_agreed", wanted=sorted(lost), error=failed)
