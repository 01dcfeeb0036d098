"""Agree on a step at which all ranks perform the same actions, without a collective per step.

A round is one value in the key-value store, changed only by compare-and-set, so that all ranks see
one history of the actions, the step T, and the outcome. There is no leader:

1. A rank that proposes an action opens a round, with T slightly ahead of its training, or adds it.
2. A thread of each rank polls. It arms the gate at T and acknowledges T, which the training of this
   rank then cannot pass; if that has reached T already, it moves T to a later step.
3. The last rank that acknowledges ends the round with "agreed". If a rank is dead, hangs, or has
   left, another one ends it as aborted. The first outcome in the store is final for all ranks.

A training thread that reaches T before the round ends waits there, and nowhere else. T counts the
calls of ``step``, which are equal on all ranks, so a return to an earlier version is no special
case. (Paxos Commit, Gray and Lamport, 2006, with the store in place of the acceptors.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from limpet.errors import RankFailed
from limpet.events import emit
from limpet.ranks.error_report import decode_raised, encode_raised, is_from_torch
from limpet.ranks.failure_detector import FailureDetector
from limpet.ranks.group import Group
from limpet.ranks.kv import KVClient
from limpet.ranks.step_gate import NEVER, StepGate

IDLE_POLL = 0.1, 0.5
"""The shortest and the longest interval in seconds between two polls while no round is open."""

AGREED, ABORTED, CLOSED, RAISED = "agreed", "aborted", "closed", "raised"
"""The outcomes of a round. ``CLOSED`` ends all rounds: the training of a rank has ended. So does
``RAISED``: it has ended with an error, which all ranks raise."""

_EARLIER = 0.1
"""Seconds by which a deadline must be earlier than the known one, or nobody is told of it."""


class RoundDeadline(NamedTuple):
    """The time by which the ranks must have acted, on the clock of this rank, and why."""

    at: float
    cause: str


class Observer:
    """Learns of what the ranks publish, and does nothing. The thread of the agreement calls it."""

    def on_deadline(self, deadline: RoundDeadline) -> None:
        """A rank has proposed an action with a deadline, or an earlier deadline."""

    def on_failure(self, actions: frozenset[str], error: RankFailed) -> None:
        """The ranks could not agree on these actions."""

    def on_error(self, report: str) -> None:
        """The training of another rank has ended with an error (see ``publish_error``)."""

    def on_raised(self) -> None:
        """``step`` has raised an error, in the training thread."""


class Round(msgspec.Struct, frozen=True):
    """The value of a round: the actions that all ranks perform at ``step``, which each ``attempt``
    moves. ``seconds_left``: from its write until all must have acted, if ``cause`` demands it."""

    actions: tuple[str, ...] = ()
    step: int = 0
    attempt: int = 0
    outcome: str = ""
    reason: str = ""
    rank: int | None = None
    seconds_left: float | None = None
    cause: str = ""


_ROUND = msgspec.json.Decoder(Round)


class RoundParticipant:
    """The part of one rank in the rounds, one after the other. It waits only for the store. All
    calls must be from one thread."""

    def __init__(
        self,
        kv: KVClient,
        size: int,
        name: str,
        gate: StepGate,
        observer: Observer,
    ) -> None:
        self.proposed: set[str] = set()
        self.closing = False
        self.raised = ""
        """The report of the error with which the training of this rank has ended, or, when the
        agreement has ended, that of the first rank that raised."""

        self.closed_error: RankFailed | None = None
        """The reason why the ranks cannot agree on further actions."""

        self.clock: Callable[[], float] = kv.clock
        self._kv = kv
        self._size = size
        self._name = name
        self._gate = gate
        self._observer = observer
        self._own_deadline: RoundDeadline | None = None  # until a round has it
        self._deadline: RoundDeadline | None = None  # also of later rounds: it can only get earlier
        # 16,000 ranks then poll 8,000 times per second in total.
        self._idle_poll = IDLE_POLL[0], IDLE_POLL[1] + size * 1e-4
        self._active_poll = 0.001, 0.01 + size * 2e-5
        self._round_number = 0
        self._last_agreed_step = 0
        self._steps_per_second = 0.0
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
        self._ack_by = inf

    def propose(self, action: str, deadline: RoundDeadline | None) -> None:
        """Propose an action, which may have a deadline."""
        self.proposed.add(action)
        if deadline is not None and (
            self._own_deadline is None or deadline.at < self._own_deadline.at
        ):
            self._own_deadline = deadline

    def poll(self) -> float:
        """Poll the round, perform this rank's part, and return the seconds to the next poll.
        ``RankFailed``: the store does not respond."""
        self._measure_speed()
        text = self._kv.get_text(self._key) or ""
        current = _ROUND.decode(text) if text else None
        if self._deadline is not None and self._deadline.at <= self.clock():
            self._deadline, self._kv.give_up_at = None, inf  # the training goes on all the same
        if current is not None and self._current is None:
            self._poll_delay, self._started_at = self._active_poll[0], self.clock()
        self._observe_deadline(current)
        self._current = current
        if current is not None and current.outcome:
            self._finish_round(current)
            return 0.0
        proposed = self._next_state(current)
        if proposed is not None and proposed != current:
            written = msgspec.json.encode(self._with_deadline(proposed)).decode()
            if self._kv.compare_and_set(self._key, written, text) == written:
                self._learn(self._own_deadline)
                self._own_deadline = None
            return 0.0  # another rank may have won: read the round again
        growth, max_delay = (
            (1.2, self._idle_poll[1]) if current is None else (1.5, self._active_poll[1])
        )
        delay, self._poll_delay = self._poll_delay, min(self._poll_delay * growth, max_delay)
        return delay

    def _observe_deadline(self, current: Round | None) -> None:
        """Learn of a round's deadline, and until when to wait. Seconds count from now, as clocks
        differ: the value is at most one poll old, and each rank that replaces it counts down."""
        if current is not None and current.seconds_left is not None and current != self._current:
            self._learn(RoundDeadline(self.clock() + current.seconds_left, current.cause))
            if self._ack_by == inf:
                self._limit_waits()

    def _learn(self, deadline: RoundDeadline | None) -> None:
        """Learn of a deadline, and tell the observer if it is earlier than the known one."""
        known = self._deadline
        if deadline is None or (known is not None and deadline.at >= known.at - _EARLIER):
            return
        self._deadline = deadline
        self._limit_waits()
        self._observer.on_deadline(deadline)

    def _limit_waits(self) -> None:
        """Let the waits of this round end early: with 30 s left, within 10 s."""
        if self._deadline is not None:
            now = self.clock()
            self._ack_by = now + (self._deadline.at - now) / 4
            third = now + (self._deadline.at - now) / 3
            self._gate.limit(third)
            self._kv.give_up_at = min(self._kv.give_up_at, third)

    def _with_deadline(self, proposed: Round) -> Round:
        """Return a state of the round with the earliest known deadline, counted from now."""
        known = [d for d in (self._deadline, self._own_deadline) if d is not None]
        if not known:
            return proposed
        deadline = min(known)
        left = round(max(0.0, deadline.at - self.clock()), 3)
        return replace(proposed, seconds_left=left, cause=deadline.cause)

    def _has_earlier_deadline(self) -> bool:
        """Return True if no round has the deadline that this rank knows."""
        own, known = self._own_deadline, self._deadline
        if own is not None and known is not None and own.at >= known.at - _EARLIER:
            self._own_deadline = None
        return self._own_deadline is not None

    def _next_state(self, current: Round | None) -> Round | None:
        """Return the state of the round that this rank wants to write, or None for no round."""
        rank, last = self._kv.rank, current or Round()
        if self.raised:
            return replace(last, outcome=RAISED, reason=self.raised, rank=rank)
        if self.closing:
            reason = f"The training of rank {rank} has ended, so no further agreement is possible"
            return replace(last, outcome=CLOSED, reason=reason, rank=rank)
        if current is None:
            actions = tuple(sorted(self.proposed))
            return Round(actions, self._choose_step(0)) if actions else None
        if (added := self.proposed.difference(current.actions)) or self._has_earlier_deadline():
            actions = tuple(sorted(added.union(current.actions)))
            return self._with_deadline(replace(current, actions=actions))
        if current.attempt not in self._acked_attempts:
            if not self._gate.arm(current.step):
                attempt = current.attempt + 1
                return replace(current, step=self._choose_step(attempt), attempt=attempt)
            # Before the acknowledgment is sent, because the response may be lost.
            self._acked_attempts.append(current.attempt)
            self._kv.put_all({self._ack_key(rank, current.attempt): b""})
            self._all_acked = self._kv.increment(f"{self._key}/{current.attempt}") == self._size
        if self._all_acked:
            return replace(current, outcome=AGREED)
        return self._check_failures(current)

    def _choose_step(self, attempt: int) -> int:
        """Return a step that most likely no rank has reached when the last rank sees the round."""
        seconds_ahead = self._idle_poll[1]
        if self._current is not None:
            seconds_ahead = max(seconds_ahead, 2 * (self.clock() - self._started_at))
        steps_ahead = int(2 ** min(attempt, 20) + self._steps_per_second * seconds_ahead)
        return max(self._gate.current_step, self._last_agreed_step) + steps_ahead

    def _measure_speed(self) -> None:
        (last_time, last_step), now = self._last_measurement, self.clock()
        if now - last_time >= 0.25 and self._gate.current_step > last_step:
            self._last_measurement = now, self._gate.current_step
            self._steps_per_second = (self._last_measurement[1] - last_step) / (now - last_time)

    def _ack_key(self, rank: int, attempt: int) -> str:
        return f"{self._key}/{attempt}/{rank}"

    # -- failed ranks ----------------------------------------------------------------------------

    def _check_failures(self, current: Round) -> Round:
        """End the round if ranks have failed. Rank 0 monitors those not ready, and they rank 0."""
        timeouts, now = self._kv.timeouts, self.clock()
        interval = min(max(1.0, self._size / 2000), timeouts.silent / 4)
        if now >= self._ack_by:
            return self._abort_late(current)
        if self._detector is None:
            self._detector = FailureDetector(self._kv, _describe(current), NEVER)
            self._next_check_at = now + interval
        if now < self._next_check_at:
            return current
        self._next_check_at = now + interval
        ranks, timeout = [0], timeouts.stuck + timeouts.silent
        if self._kv.rank == 0:
            acks = [self._ack_key(r, current.attempt) for r in range(self._size)]
            if self._kv.has_all(acks):  # the last rank died before it could end the round
                return replace(current, outcome=AGREED)
            ranks, timeout = list(range(self._size)), timeouts.stuck

        def has_acked(rank: int) -> bool:
            return self._kv.has_all([self._ack_key(rank, current.attempt)]) and self._kv.rank == 0

        failure = self._detector.failed(ranks, has_acked)
        if failure is None and self._detector.waited > timeout:
            missing = [r for r in ranks if not has_acked(r)] or [0]
            failure = self._detector.make_error(
                missing,
                f"an acknowledgment within {timeout:g} s",
                "none, though the process is alive",
            )
        return current if failure is None else _aborted(current, failure)

    def _abort_late(self, current: Round) -> Round:
        """End the round because ranks acknowledge too late for the deadline. Rank 0 names them. If
        it is late itself, the others end the round a little later."""
        acks = {r: self._ack_key(r, current.attempt) for r in range(self._size)}
        missing = [0]
        if self._kv.rank:
            known = self._deadline
            late = 0.0 if known is None else max(0.2, (known.at - self._ack_by) / 30)
            if self.clock() < self._ack_by + late:
                return current
        elif self._kv.has_all(list(acks.values())):
            return replace(current, outcome=AGREED)
        else:
            missing = [r for r, key in acks.items() if not self._kv.has_all([key])]
        failure = FailureDetector(self._kv, _describe(current), NEVER).make_error(
            missing or [0],
            f"an acknowledgment in a quarter of the time that is left after {current.cause}",
            "none",
        )
        return _aborted(current, failure)

    # -- the end of a round ----------------------------------------------------------------------

    def _finish_round(self, finished: Round) -> None:
        """Act on the outcome and begin the next round. The last rank to leave deletes the keys."""
        error = RankFailed(finished.reason, rank=finished.rank)
        if finished.outcome == CLOSED:
            error.fields["ended"] = True
        if finished.outcome == RAISED:
            self.raised = finished.reason
            todo = f"See the log of rank {finished.rank}"
            error = RankFailed(
                f"The training of rank {finished.rank} has raised", todo=todo, rank=finished.rank
            )
        key, acks = self._key, [self._ack_key(self._kv.rank, a) for a in self._acked_attempts]
        failed_actions = set(finished.actions)
        # Before the grant, because the actions may be proposed again right after it.
        self.proposed -= failed_actions
        if not self.proposed:
            self._own_deadline = None
        if finished.outcome == AGREED:
            self._gate.grant(finished.step, frozenset(failed_actions))
            self._last_agreed_step, failed_actions = finished.step, set()
        else:
            self._gate.disarm()
        self._gate.unlimit()
        if finished.outcome in (CLOSED, RAISED):
            self.closed_error = error
            failed_actions |= self.proposed
            self.proposed.clear()
        self._begin_round()
        if failed_actions:
            emit("not_agreed", wanted=sorted(failed_actions), error=error)
            self._observer.on_failure(frozenset(failed_actions), error)
        if finished.outcome == RAISED and finished.rank != self._kv.rank:
            self._observer.on_error(finished.reason)
        self._kv.delete(acks)
        if self._kv.increment(f"{key}/left") == self._size:
            counts = [f"{key}/{attempt}" for attempt in range(finished.attempt + 1)]
            self._kv.delete([key, *counts, f"{key}/left"])

    def report_closed(self, action: str) -> None:
        """Report that an action was proposed after the end of the agreement."""
        error = self.closed_error or RankFailed("The agreement has ended")
        emit("not_agreed", wanted=[action], error=error)
        self._observer.on_failure(frozenset({action}), error)

    def abort(self, error: Exception) -> None:
        """End the agreement after an error of the store. Training goes on, but stops at an
        acknowledged step whose outcome this rank does not know."""
        failed_actions = self.proposed.union(
            self._current.actions if self._current is not None else ()
        )
        closed_error = RankFailed(
            "The ranks cannot agree on actions anymore",
            found=str(error) or type(error).__name__,
            todo="Committed versions are safe; restart the job",
        )
        closed_error.__cause__ = error
        if self._acked_attempts:
            self._gate.fail(closed_error)
        else:
            self._gate.disarm()
        self.closed_error = closed_error
        self.proposed.clear()
        if failed_actions and not self.closing:
            emit("not_agreed", wanted=sorted(failed_actions), error=closed_error)
            self._observer.on_failure(frozenset(failed_actions), closed_error)


def _describe(current: Round) -> str:
    return f"the agreement on {', '.join(current.actions)}"


def _aborted(current: Round, failure: RankFailed) -> Round:
    return replace(current, outcome=ABORTED, reason=str(failure), rank=failure.rank)


class Proposal(NamedTuple):
    """A proposed action. ``since``: the number of deliveries so far (see ``StepGate``)."""

    action: str
    since: int
    deadline: RoundDeadline | None


class Agreement:
    """Agreement of all ranks on actions at a common step. Each rank creates one, in the same order
    among the group's operations."""

    def __init__(self, group: Group, name: str, observer: Observer | None = None) -> None:
        self._observer = observer or Observer()
        if (kv := group.kv) is None:
            raise ValueError("An agreement needs several ranks")
        self._kv = kv
        self.clock = kv.clock
        """The clock of ``RoundDeadline``."""

        self._gate = StepGate(kv.timeouts.stuck + 4 * kv.timeouts.silent, kv.clock)
        self._participant = RoundParticipant(
            kv,
            group.size,
            f"{group.next_sequence_number()}/{name}",
            self._gate,
            self._observer,
        )
        self._proposals: SimpleQueue[Proposal | str | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._watch, name="limpet-agree", daemon=True)
        self._thread.start()

    def propose(self, action: str, seconds: float | None = None, cause: str = "") -> None:
        """Propose an action, from any thread or signal handler: without a lock, at once, and not
        twice. ``seconds``: until all ranks must have acted, because of ``cause``; the earliest one
        counts. Every wait then ends in a third of it. If the ranks cannot agree, ``not_agreed`` is
        emitted, and the action may be proposed again."""
        deadline = None
        if seconds is not None:
            deadline = RoundDeadline(self.clock() + seconds, cause)
        if deadline is not None or action not in self._participant.proposed:
            self._proposals.put(Proposal(action, self._gate.delivery_count, deadline))

    def step(self) -> frozenset[str]:
        """Return the actions that all ranks perform now. All ranks call it after each step. It
        waits only at a step to agree on. Raises ``RankFailed``, once, if the store failed and
        others may act at this step."""
        with self._raising():
            return self._gate.step()

    def check(self) -> None:
        """Raise the error of another rank, if there is one, without counting a step."""
        with self._raising():
            self._gate.check()

    @contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._kv.peer_error = None  # if it was that of another rank, this rank raises it now
            self._observer.on_raised()
            raise

    def close(self) -> None:
        """End the agreement because the training of this rank has ended: open rounds end for the
        others, whose training goes on. Waits at most 2 seconds for the store."""
        if not self._closed:
            self._closed = True
            self._gate.disable()
            self._proposals.put(None)
            self._thread.join(2)
            self._kv.peer_error = None

    def publish_error(self, error: BaseException) -> BaseException | None:
        """End the agreement with an error, which others raise at their next ``step``, within 2 s.
        Returns an earlier rank's error if ``error``, a lost connection, may follow from it."""
        if self._closed:
            return None
        report = encode_raised(error, self._kv.rank)
        self._proposals.put(report)
        self.close()
        first = self._participant.raised
        return decode_raised(first) if first not in ("", report) and is_from_torch(error) else None

    def raise_at_next_step(self, error: BaseException) -> None:
        """Make the training raise an error of another rank: in the next ``step``, or in the step
        or the collective in which it waits now."""
        if not self._closed:
            self._kv.peer_error = error
            self._gate.raise_once(error)

    # -- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        participant = self._participant
        try:
            while True:
                delay = participant.poll()
                if participant.closed_error is not None:
                    break
                self._wait_for_proposals(delay)
        except Exception as e:  # noqa: BLE001  (top of a thread: emitted, and raised at an armed gate)
            participant.abort(e)
        reported: set[str] = set()
        while not participant.closing:
            proposal = self._proposals.get()
            if proposal is None:
                return
            if isinstance(proposal, Proposal) and proposal.action not in reported:
                reported.add(proposal.action)
                participant.report_closed(proposal.action)

    def _wait_for_proposals(self, timeout: float) -> None:
        """Wait until there is a new proposal, or until the timeout."""
        deadline = self.clock() + timeout
        has_new = False
        while True:
            try:
                proposal = self._proposals.get(
                    timeout=0 if has_new else max(0.0, deadline - self.clock())
                )
            except Empty:
                return
            if proposal is None:
                self._participant.closing = has_new = True
                continue
            if isinstance(proposal, str):
                self._participant.raised = proposal
                has_new = True
                continue
            action, since, act_by = proposal
            is_known = act_by is None and action in self._participant.proposed
            if not is_known and not self._gate.is_delivered_after(action, since):
                self._participant.propose(action, act_by)
                has_new = True


class LocalAgreement:
    """The ``Agreement`` of one process: its next step returns the proposed actions."""

    def __init__(self) -> None:
        self._proposals: SimpleQueue[str] = SimpleQueue()

    def propose(self, action: str, seconds: float | None = None, cause: str = "") -> None:
        self._proposals.put(action)

    def publish_error(self, error: BaseException) -> None:
        self.close()

    def check(self) -> None:
        """There is no other rank that could raise."""

    def step(self) -> frozenset[str]:
        actions = set()
        for _ in range(self._proposals.qsize()):
            actions.add(self._proposals.get())
        return frozenset(actions)

    def close(self) -> None:
        if actions := self.step():
            emit("not_agreed", wanted=sorted(actions), error=RankFailed("Training has ended"))


AnyAgreement = Agreement | LocalAgreement


def make_agreement(group: Group, name: str, observer: Observer | None = None) -> AnyAgreement:
    """Create the ``Agreement`` of a group. All ranks of the group must call this function."""
    if group.kv is None or group.size == 1:
        return LocalAgreement()
    return Agreement(group, name, observer)
