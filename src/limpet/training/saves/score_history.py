"""The scores of a training by step, from which early stopping follows, in any order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from typing import Any, TypeGuard

from limpet.format.names import MAX_STEP
from limpet.run.policy import StopState, StopWhen

MAX_SCORES = 100
"""The scores that are kept by step. A score that arrives for a step before these cannot count any
more. Every version stores them, in about 20 bytes each."""


class ScoreHistory:
    """Follows a ``StopWhen`` over the scores of steps, in the order of the steps.

    The newest ``MAX_SCORES`` scores are kept by step, and the ones before are folded into one
    ``StopState``. A score that arrives late is inserted at its step, and the result is computed
    again.
    """

    def __init__(self, stop: StopWhen) -> None:
        self._stop = stop
        self._folded, self._folded_step = StopState(), -1
        self._scores: dict[int, float] = {}
        self.state = StopState()
        """The result of all scores. Once it is ``stopped``, scores of later steps do not count."""

    def give(self, step: int, score: float) -> None:
        """Add the score that the training gives at a step, unless the step has one already."""
        if step not in self._scores:
            self.record(step, score)

    def record(self, step: int, score: float) -> None:
        """Set the score of a step. It overrides the one that the step has."""
        if self.covers(step, score):
            return
        is_last = not self._scores or step > next(reversed(self._scores))
        self._scores[step] = score
        if is_last:
            self.state = self._observe(self.state, score)
        else:
            self._scores = dict(sorted(self._scores.items()))
            self._scan()
        while len(self._scores) > MAX_SCORES:
            self._folded_step = next(iter(self._scores))
            oldest = self._scores.pop(self._folded_step)
            self._folded = self._observe(self._folded, oldest)

    def covers(self, step: int, score: float) -> bool:
        """Return True if the score is part of the result, or is too old to become a part of it."""
        known = self._scores.get(step)
        if known is None:
            return step <= self._folded_step
        return known == score or (isnan(known) and isnan(score))

    def _scan(self) -> None:
        self.state = self._folded
        for score in self._scores.values():
            self.state = self._observe(self.state, score)

    def _observe(self, state: StopState, score: float) -> StopState:
        return state if state.stopped else self._stop.observe(state, score)

    # -- what a version stores -----------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """Return what a version stores: the result, which earlier releases read, and the scores."""
        plain = self._stop.to_plain(self.state)
        if self._scores:
            plain["scores"] = [[step, score] for step, score in self._scores.items()]
        if self._folded_step >= 0:
            folded = {"best": self._folded.best, "misses": self._folded.misses}
            plain["before"] = {"step": self._folded_step, **folded}
        return plain

    @classmethod
    def from_plain(cls, stop: StopWhen, plain: object, step: int) -> ScoreHistory:
        """Return the history that the version of ``step`` stores, judged by the policy ``stop``.

        It is empty if the version stores none of this metric and mode. A version of an earlier
        release stores the state alone: then no score of its step or before can count any more,
        unless no score has counted so far.
        """
        history = cls(stop)
        history.state = history._folded = stop.from_plain(plain)
        if history.state == StopState() or not isinstance(plain, dict):
            return history
        scores, before = plain.get("scores"), plain.get("before", {"step": -1, "misses": 0})
        if not (_are_scores(scores) and isinstance(before, dict) and _is_step(before.get("step"))):
            history._folded_step = step
            return history
        history._folded = stop.from_plain({**plain, "best": None, **before})
        history._folded_step = before["step"]
        history._scores = {s: score for s, score in scores if s > before["step"]}
        history._scan()
        return history


def _is_step(value: object) -> bool:
    return type(value) is int and -1 <= value <= MAX_STEP


def _are_scores(value: object) -> TypeGuard[Sequence[tuple[int, float]]]:
    """Return True for a list of pairs of a step and a score, in the order of the steps."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    pairs = [isinstance(v, Sequence) and len(v) == 2 and _is_step(v[0]) for v in value]
    return (
        all(pairs)
        and all(type(score) in (int, float) for _, score in value)
        and all(a[0] < b[0] for a, b in pairwise(value))
    )
