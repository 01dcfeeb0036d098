"""What a training has spent: on saves, and on steps that were kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Clock = Callable[[], float]


class Goodput:
    """Counts of saves, and the seconds by which goodput is told.

    Goodput is the share of wall time since the run first began, in whatever process, that went
    into steps which a committed version holds. Time lost to saves, restarts, waiting for machines
    and steps that had to be made again is the rest. ``clock`` does not jump; ``wall`` is the time
    of day, since only that goes on from process to process.
    """

    def __init__(self, clock: Clock = time.monotonic, wall: Clock = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._started = wall()
        self._trained_seconds = 0.0
        self._committed_seconds = 0.0
        self._last_clock = clock()
        self.counts = {"saves": 0, "failures": 0, "skipped": 0, "bytes": 0, "referred_bytes": 0}
        self.seconds = {
            "blocked": 0.0,
            "last_blocked": 0.0,
            "waited": 0.0,
            "background": 0.0,
        }

    def resume_from(self, training_metadata: Mapping[str, Any]) -> None:
        """Go on from what the resumed version has noted."""
        self._started = _seconds(training_metadata.get("began"), self._started)
        self._trained_seconds = self._committed_seconds = _seconds(
            training_metadata.get("trained_seconds"), 0.0
        )
        self._last_clock = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Training was going on until now, and does so again behind the ``with`` block, which has
        held it up."""
        self.end_step()
        began = self._last_clock
        try:
            yield
        finally:
            self.begin_step()
            self.seconds["blocked"] += self._last_clock - began

    def end_step(self) -> None:
        """Since the last call of ``step_next`` the machine was training."""
        now = self._clock()
        self._trained_seconds += now - self._last_clock
        self._last_clock = now

    def begin_step(self) -> None:
        """Training goes on."""
        self._last_clock = self._clock()

    def to_metadata(self) -> dict[str, float]:
        """What a version notes for who resumes from it."""
        return {
            "began": round(self._started, 3),
            "trained_seconds": round(self._trained_seconds, 6),
        }

    def add_blocked(self, seconds: float) -> None:
        """The last save has held the training up once more, in the middle of a step."""
        self.seconds["blocked"] += seconds
        self.seconds["last_blocked"] += seconds
        self._last_clock += seconds

    def mark_committed(self, trained_seconds: float) -> None:
        """A version holds the first ``trained`` seconds of steps."""
        self._committed_seconds = max(self._committed_seconds, trained_seconds)

    def statistics(self) -> dict[str, float]:
        wall = self._wall() - self._started
        kept = min(max(self._committed_seconds / wall, 0.0), 1.0) if wall > 0 else 0.0
        seconds = {f"{name}_seconds": s for name, s in self.seconds.items()}
        return {**self.counts, **seconds, "goodput": kept}


def _seconds(value: Any, default: float) -> float:
    """A number from a manifest, which another writer may have filled otherwise."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else default
