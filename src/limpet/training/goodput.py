"""Statistics of a training: the cost of its saves, and goodput."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from limpet.saving.pending import Pending


class Durations:
    """The durations of the last 100 steps or saves, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=100)
        self.add = self._recent.append

    def __len__(self) -> int:
        return len(self._recent)

    def percentile(self, percent: int) -> float:
        """Return the duration that so many percent do not exceed, or 0.0 if there is none."""
        ordered = sorted(self._recent)
        return ordered[len(ordered) * percent // 100] if ordered else 0.0

    def start_from(self, seconds: Any) -> None:
        """Start with the p95 of an earlier process, if that is what ``seconds`` is."""
        if not self._recent and _seconds(seconds, -1.0) >= 0:
            self.add(float(seconds))


class Goodput:
    """Counts saves and their seconds. Goodput: the share of wall time since the run began, in all
    its processes, spent on steps in a version."""

    def __init__(self) -> None:
        self._started = time.time()  # it goes on between the processes
        self._trained_seconds = 0.0
        self._committed_seconds = 0.0
        self.step_began_at = time.monotonic()
        """The time at which the step in progress began."""

        self.step_durations = Durations()
        self._steps_during_saves, self._other_steps = Durations(), Durations()
        self.pending: Pending | None = None  # the newest save
        self._is_during_save = False
        self.save_durations = Durations()
        """From the beginning of a save until it is committed."""

        self.run_calls = 0
        """The complete calls of a ``PreemptionGuard``, also those of earlier processes."""

        self.call_durations = Durations()
        """Those of the calls of ``PreemptionGuard.run``, which may make several steps each."""

        self.counts = Counter(saves=0, failures=0, bytes=0, referred_bytes=0)
        self.seconds = dict.fromkeys(("blocked", "last_blocked", "waited", "background"), 0.0)

    @property
    def usual_seconds(self) -> tuple[float, float]:
        """The seconds that nearly all steps and saves take (p95), or 0.0. A call of
        ``PreemptionGuard.run`` is one step: the training cannot leave in it."""
        step_seconds = max(self.step_durations.percentile(95), self.call_durations.percentile(95))
        return step_seconds, self.save_durations.percentile(95)

    def resume_from(self, training_metadata: Mapping[str, Any]) -> None:
        self._started = _seconds(training_metadata.get("began"), self._started)
        self._trained_seconds = self._committed_seconds = _seconds(
            training_metadata.get("trained_seconds"), 0.0
        )
        calls = training_metadata.get("run_calls")
        self.run_calls = calls if type(calls) is int else 0
        self.step_durations.start_from(training_metadata.get("step_seconds"))
        if self.run_calls:
            self.call_durations.start_from(training_metadata.get("step_seconds"))
        self.save_durations.start_from(training_metadata.get("save_seconds"))
        self.step_began_at = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time in the block as blocked, and that since the last such block as a step."""
        began = time.monotonic()
        seconds = began - self.step_began_at
        self._trained_seconds += seconds
        self.step_durations.add(seconds)
        (self._steps_during_saves if self._is_during_save else self._other_steps).add(seconds)
        try:
            yield
        finally:
            self._is_during_save = self.pending is not None and not self.pending.done
            self.step_began_at = time.monotonic()
            self.seconds["blocked"] += self.step_began_at - began

    def to_metadata(self) -> dict[str, float]:
        """Return what a version stores, so that a resumed training continues the measurement."""
        step_seconds, save_seconds = self.usual_seconds
        metadata = {
            "began": round(self._started, 3),
            "trained_seconds": round(self._trained_seconds, 6),
        }
        if step_seconds:
            metadata["step_seconds"] = round(step_seconds, 6)
        if save_seconds:
            metadata["save_seconds"] = round(save_seconds, 6)
        return metadata

    def add_blocked(self, seconds: float) -> None:
        """Count seconds in the middle of a step in which the last save blocked training."""
        self.seconds["blocked"] += seconds
        self.seconds["last_blocked"] += seconds
        self.step_began_at += seconds

    def mark_committed(self, trained_seconds: float) -> None:
        """Record that a committed version holds the first ``trained_seconds`` of training."""
        self._committed_seconds = max(self._committed_seconds, trained_seconds)

    def statistics(self) -> dict[str, float]:
        """See ``Checkpointer.statistics``."""
        wall = time.time() - self._started
        goodput = min(max(self._committed_seconds / wall, 0.0), 1.0) if wall > 0 else 0.0
        found: dict[str, float] = {**self.counts, "goodput": goodput}
        found |= {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        kinds = self._steps_during_saves, self._other_steps
        if min(map(len, kinds)) >= 5 and (usual := self._other_steps.percentile(50)):
            found["step_slowdown"] = self._steps_during_saves.percentile(50) / usual
        return found


def _seconds(value: Any, default: float) -> float:
    """Return a number from a manifest, or ``default`` if another writer stored something else."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else default
