"""The rounds in which ranks agree on actions and a step (see ``agreement.py`` for the protocol)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.kv import KVClient
from holdfast.engine.distributed.step_gate import NEVER, StepGate
from holdfast.errors import RankFailed
from holdfast.events import emit

AGREED, ABORTED, CLOSED = "agreed", "aborted", "closed"
"""The outcomes of a round. ``CLOSED`` ends all rounds: the training of a rank has ended."""


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
