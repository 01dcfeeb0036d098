"""When to stop."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan
from typing import Any

from limpet.run.policy.checks import Mode, check_count, check_metric, is_number, require


@dataclass(frozen=True, slots=True)
class StopState:
    """The progress of a ``StopWhen``.

    ``best`` is the best value so far, and ``misses`` is the number of values since then that were
    not better. Each snapshot stores this state, so that a restart does not reset the patience.
    """

    best: float | None = None
    misses: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Stop when ``patience`` values of ``metric`` in a row are not better than the best so far.

    The order is that of the steps. A value is better if it is below the best value (above it with
    ``mode="max"``) by more than ``min_delta``. NaN is never better. (Keras's ``EarlyStopping``,
    except for NaN.) For a metric like ``val_accuracy`` the mode must be given.
    """

    metric: str
    patience: int = 3
    mode: Mode = None  # type: ignore[assignment]  # never None in an object
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        example = 'StopWhen("val_loss", patience=3, mode="min")'
        mode = check_metric("StopWhen", self.metric, self.mode, example)
        object.__setattr__(self, "mode", mode)
        check_count("StopWhen", self.patience, "values (patience)", example)
        valid = is_number(self.min_delta) and 0 <= self.min_delta < inf
        require("StopWhen", valid, "a finite min_delta of 0 or more", self.min_delta, example)

    def observe(self, state: StopState, value: float) -> StopState:
        """Return the state after one more value of the metric."""
        if state.best is None:
            better = not isnan(value)
        elif self.mode == "min":  # NaN is never better: a comparison with NaN is False
            better = value < state.best - self.min_delta
        else:
            better = value > state.best + self.min_delta
        if better:
            return StopState(value)
        misses = state.misses + 1
        return StopState(state.best, misses, misses >= self.patience)

    def to_plain(self, state: StopState) -> dict[str, Any]:
        """Return ``state`` as plain values, together with the metric and the mode."""
        plain = {"metric": self.metric, "mode": self.mode}
        return {**plain, "best": state.best, "misses": state.misses}

    def from_plain(self, plain: object) -> StopState:
        """Return the state from the result of ``to_plain``, judged by this policy's patience.

        For any other value, or for another metric or mode, the result is a new state.
        """
        stored = plain if isinstance(plain, dict) else {}
        best, misses = stored.get("best"), stored.get("misses")
        matches = (stored.get("metric"), stored.get("mode")) == (self.metric, self.mode)
        if not matches or not isinstance(misses, int) or not (best is None or is_number(best)):
            return StopState()
        return StopState(best, misses, misses >= self.patience)
