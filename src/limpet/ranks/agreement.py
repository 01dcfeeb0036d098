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

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from limpet.errors import RankFailed
from limpet.events import emit
from limpet.ranks.error_report import decode_raised, encode_raised, is_from_torch
from limpet.ranks.group import Group
from limpet.ranks.rounds import Observer, RoundDeadline, RoundParticipant
from limpet.ranks.step_gate import StepGate

IDLE_POLL = 0.1, 0.5
"""The shortest and the longest interval in seconds between two polls while no round is open."""


class Proposal(NamedTuple):
    """A proposed action. ``since``: the number of deliveries so far (see ``StepGate``)."""

    action: str
    since: int
    deadline: RoundDeadline | None


class Agreement:
    """Agreement of all ranks on actions at a common step, such as a save or a stop.

    Each rank creates one object, in the same order relative to the group's other operations.
    ``name``: the purpose of the agreement; ``idle_poll``: the shortest and the longest interval in
    seconds between two polls of the store while no round is open.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        idle_poll: tuple[float, float] = IDLE_POLL,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or Observer()
        if (kv := group.kv) is None:
            raise ValueError("An agreement needs several ranks")
        self._kv = kv
        self._gate = StepGate(kv.timeouts.stuck + 4 * kv.timeouts.silent, kv.clock)
        self._participant = RoundParticipant(
            kv,
            group.size,
            f"{group.next_sequence_number()}/{name}",
            self._gate,
            idle_poll,
            self._observer,
        )
        self._proposals: SimpleQueue[Proposal | str | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._watch, name="limpet-agree", daemon=True)
        self._thread.start()

    def propose(self, action: str, seconds: float | None = None, cause: str = "") -> None:
        """Propose an action to all ranks.

        ``seconds``: the time from now until all ranks must have acted, because of ``cause``. Every
        wait for the agreement then ends in a third of it, and ``Observer.on_deadline`` tells all
        ranks. Of several deadlines, the earliest one counts.

        May be called from any thread or signal handler: takes no lock and returns immediately. An
        action that is already proposed is not proposed twice.

        The proposal fails if a rank is dead or hangs, if a rank has closed the agreement, or if the
        store does not respond. The event ``not_agreed`` then reports the failure, and the action
        may be proposed again.
        """
        deadline = None
        if seconds is not None:
            deadline = RoundDeadline(self._participant.clock() + seconds, cause)
        if deadline is not None or action not in self._participant.proposed:
            self._proposals.put(Proposal(action, self._gate.delivery_count, deadline))

    def step(self) -> frozenset[str]:
        """Return the actions that all ranks perform now, usually none.

        Call this after each training step, equally often on all ranks. It waits only at a step on
        which the ranks are about to agree. Raises ``RankFailed``, once, if the store failed and
        this rank cannot know whether the ranks agreed: others may act at this step.
        """
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
        """End the agreement because the training of this rank has ended.

        From now on, the ranks cannot agree on any action. Open rounds end for the other ranks, and
        their training continues. Waits for the store for at most 2 seconds.
        """
        if not self._closed:
            self._closed = True
            self._gate.disable()
            self._proposals.put(None)
            self._thread.join(2)
            self._kv.peer_error = None

    def publish_error(self, error: BaseException) -> BaseException | None:
        """End the agreement because the training of this rank has ended with an error.

        The other ranks raise it at their next ``step``. Waits for the store for at most 2 seconds.
        Returns the error of the rank that raised before this one, if ``error`` may be a consequence
        of it: that of a collective operation whose connection was lost. Otherwise, returns None.
        """
        if self._closed:
            return None
        report = encode_raised(error, self._kv.rank)
        self._proposals.put(report)
        self.close()
        first = self._participant.raised
        return decode_raised(first) if first not in ("", report) and is_from_torch(error) else None

    def clock(self) -> float:
        """Return the time on the clock of ``RoundDeadline``."""
        return self._participant.clock()

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


def make_agreement(
    group: Group, name: str, observer: Observer | None = None
) -> Agreement | LocalAgreement:
    """Create the ``Agreement`` of a group. All ranks of the group must call this function."""
    if group.kv is None or group.size == 1:
        return LocalAgreement()
    return Agreement(group, name, observer=observer)
