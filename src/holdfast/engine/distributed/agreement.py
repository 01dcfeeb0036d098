"""Agree on a step at which all ranks perform the same actions, without a collective per step.

A round is one value in the key-value store. Ranks change it only by compare-and-set, so every rank
sees the same history of the proposed actions, the step T, and the outcome. There is no leader:

1. A rank that proposes an action opens a round or adds the action to the open round. The rank that
   opens the round sets T slightly ahead of its own training.
2. A background thread of each rank polls the store. When it sees the round, it arms the gate at T.
   If its training has reached T already, it moves T to a later step. Otherwise it acknowledges T,
   and the training of this rank cannot pass T.
3. The last rank that acknowledges ends the round with the outcome "agreed". If a rank is dead,
   hangs, or has left, another rank detects this and ends the round as aborted. The first outcome in
   the store is final for all ranks.

A training thread that reaches T before the round ends waits there, and nowhere else. All ranks call
``step`` equally often. T counts these calls, so a run that returns to an earlier version needs no
special case.

The protocol follows Paxos Commit (Gray and Lamport, 2006), with the store in place of the
acceptors. The preemption handler of TensorFlow has a similar gate, but a leader.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec

from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.group import Group, StoreGroup
from holdfast.engine.distributed.kv import KVClient
from holdfast.engine.distributed.step_gate import NEVER, StepGate
from holdfast.errors import RankFailed
from holdfast.events import emit

AGREED, ABORTED, CLOSED = "agreed", "aborted", "closed"
"""The outcomes of a round. ``CLOSED`` ends all rounds: the training of a rank has ended."""


class Agreement:
    """Agreement of all ranks on actions at a common step, such as a save or a stop.

    Each rank creates one object, in the same order relative to the group's other operations.
    ``name``: the purpose of the agreement; ``idle_poll``: the shortest and the longest interval in
    seconds between two polls of the store while no round is open.
    """

    def __init__(
        self, group: StoreGroup, name: str, idle_poll: tuple[float, float] = (0.1, 0.5)
    ) -> None:
        kv = group.kv
        self._gate = StepGate(kv.timeouts.stuck + 4 * kv.timeouts.silent)
        self._participant = RoundParticipant(
            kv, group.size, f"{group.next_sequence_number()}/{name}", self._gate, idle_poll
        )
        self._proposals: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._watch, name="holdfast-agree", daemon=True)
        self._thread.start()

    def propose(self, action: str) -> None:
        """Propose an action to all ranks.

        May be called from any thread or signal handler: takes no lock and returns immediately. An
        action that is already proposed is not proposed twice.

        The proposal fails if a rank is dead or hangs, if a rank has closed the agreement, or if the
        store does not respond. The event ``not_agreed`` then reports the failure, and the action
        may be proposed again.
        """
        if action not in self._participant.proposed:
            self._proposals.put((action, self._gate.delivery_count))

    def step(self) -> frozenset[str]:
        """Return the actions that all ranks perform now, usually none.

        Call this after each training step, equally often on all ranks. It waits only at a step on
        which the ranks are about to agree. Raises ``RankFailed``, once, if the store failed and
        this rank cannot know whether the ranks agreed: others may act at this step.
        """
        return self._gate.step()

    def close(self) -> None:
        """End the agreement because the training of this rank has ended.

        From now on, the ranks cannot agree on any action. Open rounds end for the other ranks, and
        their training continues. Waits for the store for at most 2 seconds.
        """
        if not self._closed:
            self._closed = True
            self._gate.disable()
            self._proposals.put(None)
            self._thread.join(2)

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
            action, _ = proposal
            if action not in reported:
                reported.add(action)
                emit("not_agreed", wanted=[action], error=participant.closed_error)

    def _wait_for_proposals(self, timeout: float) -> None:
        """Wait until there is a new proposal, or until the timeout."""
        clock = self._participant.clock
        deadline = clock() + timeout
        has_new = False
        while True:
            try:
                proposal = self._proposals.get(
                    timeout=0 if has_new else max(0.0, deadline - clock())
                )
            except Empty:
                return
            if proposal is None:
                self._participant.closing = has_new = True
                continue
            action, since = proposal
            proposed = self._participant.proposed
            if action not in proposed and not self._gate.is_delivered_after(action, since):
                proposed.add(action)
                has_new = True


class LocalAgreement:
    """The ``Agreement`` of one process: its next step returns the proposed actions."""

    def __init__(self) -> None:
        self._proposals: SimpleQueue[str] = SimpleQueue()

    def propose(self, action: str) -> None:
        self._proposals.put(action)

    def step(self) -> frozenset[str]:
        return frozenset(self._proposals.get() for _ in range(self._proposals.qsize()))

    def close(self) -> None:
        if actions := self.step():
            emit("not_agreed", wanted=sorted(actions), error=RankFailed("Training has ended"))


def make_agreement(group: Group, name: str) -> Agreement | LocalAgreement:
    """Create the ``Agreement`` of a group. All ranks of the group must call this function."""
    return (
        Agreement(group, name)
        if isinstance(group, StoreGroup) and group.size > 1
        else LocalAgreement()
    )


class Round(msgspec.Struct, frozen=True):
    """The value of a round in the store: the actions that all ranks perform at ``step``.

    Each ``attempt`` has another ``step``. If the round fails, ``reason`` says why and ``rank`` is
    the rank that caused it.
    """

    actions: tuple[str, ...] = ()
    step: int = 0
    attempt: int = 0
    outcome: str = ""
    reason: str = ""
    rank: int | None = None


_ROUND = msgspec.json.Decoder(Round)


class RoundParticipant:
    """The part of one rank in the rounds, one round after the other.

    It waits only for responses of the store. All calls must be from one thread.
    """

    def __init__(
        self, kv: KVClient, size: int, name: str, gate: StepGate, idle_poll: tuple[float, float]
    ) -> None:
        self.proposed: set[str] = set()
        self.closing = False
        self.closed_error: RankFailed | None = None
        """The reason why the ranks cannot agree on further actions."""

        self.clock: Callable[[], float] = kv.clock
        self._kv = kv
        self._size = size
        self._name = name
        self._gate = gate
        # 16,000 ranks then poll 8,000 times per second in total.
        self._idle_poll = idle_poll[0], idle_poll[1] + size * 1e-4
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

    def poll(self) -> float:
        """Poll the round once, perform this rank's part, and return the seconds to the next poll.

        Raises ``RankFailed`` if the store does not respond.
        """
        self._measure_speed()
        text = self._kv.get_text(self._key) or ""
        current = _ROUND.decode(text) if text else None
        if current is not None and self._current is None:
            self._poll_delay, self._started_at = self._active_poll[0], self.clock()
        self._current = current
        if current is not None and current.outcome:
            self._finish_round(current)
            return 0.0
        proposed = self._next_state(current)
        if proposed is not None and proposed != current:
            self._kv.compare_and_set(self._key, msgspec.json.encode(proposed).decode(), text)
            return 0.0  # another rank may have won: read the round again
        growth, max_delay = (
            (1.2, self._idle_poll[1]) if current is None else (1.5, self._active_poll[1])
        )
        delay, self._poll_delay = self._poll_delay, min(self._poll_delay * growth, max_delay)
        return delay

    def _next_state(self, current: Round | None) -> Round | None:
        """Return the state of the round that this rank wants to write, or None for no round."""
        rank = self._kv.rank
        if self.closing:
            reason = f"The training of rank {rank} has ended, so no further agreement is possible"
            return msgspec.structs.replace(
                current or Round(), outcome=CLOSED, reason=reason, rank=rank
            )
        if current is None:
            actions = tuple(sorted(self.proposed))
            return Round(actions, self._choose_step(0)) if actions else None
        if added := self.proposed.difference(current.actions):
            return msgspec.structs.replace(
                current, actions=tuple(sorted(added.union(current.actions)))
            )
        if current.attempt not in self._acked_attempts:
            if not self._gate.arm(current.step):
                attempt = current.attempt + 1
                return msgspec.structs.replace(
                    current, step=self._choose_step(attempt), attempt=attempt
                )
            # Before the acknowledgment is sent, because the response may be lost.
            self._acked_attempts.append(current.attempt)
            self._kv.put_all({self._ack_key(rank, current.attempt): b""})
            self._all_acked = self._kv.increment(f"{self._key}/{current.attempt}") == self._size
        if self._all_acked:
            return msgspec.structs.replace(current, outcome=AGREED)
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
        """End the round if ranks have failed.

        Rank 0 monitors all ranks that have not acknowledged; the other ranks monitor rank 0.
        """
        timeouts, now = self._kv.timeouts, self.clock()
        interval = min(max(1.0, self._size / 2000), timeouts.silent / 4)
        if self._detector is None:
            self._detector = FailureDetector(
                self._kv, f"the agreement on {', '.join(current.actions)}", NEVER
            )
            self._next_check_at = now + interval
        if now < self._next_check_at:
            return current
        self._next_check_at = now + interval
        ranks, timeout = [0], timeouts.stuck + timeouts.silent
        if self._kv.rank == 0:
            acks = [self._ack_key(r, current.attempt) for r in range(self._size)]
            if self._kv.has_all(acks):  # the last rank died before it could end the round
                return msgspec.structs.replace(current, outcome=AGREED)
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
        if failure is None:
            return current
        return msgspec.structs.replace(
            current, outcome=ABORTED, reason=str(failure), rank=failure.rank
        )

    # -- the end of a round ----------------------------------------------------------------------

    def _finish_round(self, finished: Round) -> None:
        """Act on the outcome and begin the next round. The last rank to leave deletes the keys."""
        error = RankFailed(finished.reason, rank=finished.rank)
        key, acks = self._key, [self._ack_key(self._kv.rank, a) for a in self._acked_attempts]
        failed_actions = set(finished.actions)
        # Before the grant, because the actions may be proposed again right after it.
        self.proposed -= failed_actions
        if finished.outcome == AGREED:
            self._gate.grant(finished.step, frozenset(failed_actions))
            self._last_agreed_step, failed_actions = finished.step, set()
        else:
            self._gate.disarm()
        if finished.outcome == CLOSED:
            self.closed_error = error
            failed_actions |= self.proposed
            self.proposed.clear()
        self._begin_round()
        if failed_actions:
            emit("not_agreed", wanted=sorted(failed_actions), error=error)
        self._kv.delete(acks)
        if self._kv.increment(f"{key}/left") == self._size:
            counts = [f"{key}/{attempt}" for attempt in range(finished.attempt + 1)]
            self._kv.delete([key, *counts, f"{key}/left"])

    def abort(self, error: Exception) -> None:
        """End the agreement after an error of the store.

        Training continues, but stops at a step that this rank has acknowledged and whose outcome
        it does not know.
        """
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
