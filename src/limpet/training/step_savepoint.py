"""The savepoint of a training: captured after the steps at which that costs almost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from limpet import events
from limpet.generators import Isolation
from limpet.state.copy_pool import TooManyBytes
from limpet.state.flatten import FlatState
from limpet.state.savepoint import Savepoint
from limpet.state.sharding import is_distributed_tensor
from limpet.state.walk import modules_in, optimizers_in, parameters_of
from limpet.training.goodput import Durations
from limpet.training.saver import SaveSpec
from limpet.types import MIB

if TYPE_CHECKING:
    import torch

SHARE = 0.01
"""The largest share of a step that a capture after each step may take."""

_MEASURED_SHARE = SHARE / 10
"""The share that captures take in the long run if they are too expensive to be made at each step:
each one measures whether that is still so."""

_MAX_SKIPPED = 10_000

MAX_BYTES = 64 * MIB
"""The largest copies that are kept during steps. The training may need the memory. After a notice,
there is no limit."""


class StepSavepoint:
    """The state after the last step, for a save while the next step runs, or after it has raised.

    With ``is_required``, every ``mark`` captures the state, and raises if that fails. Otherwise,
    ``mark`` captures it if that takes at most a hundredth of a step, or if a notice is pending.
    Without ``is_useful``, only a required capture is made. ``step_durations``: of the steps of the
    training.
    """

    def __init__(
        self,
        state: dict[str, Any],
        is_required: bool,
        is_useful: bool,
        step_durations: Durations,
    ) -> None:
        self._is_required, self.is_useful = is_required, is_useful
        self._savepoint = Savepoint(state)
        self._step_durations = step_durations
        self._skip = 0
        self._is_expensive = False
        self._is_failing = self._is_partial = False
        self._sharded: list[torch.nn.Module] | None = None

    def attach(self, state: dict[str, Any]) -> None:
        """Capture ``state`` from now on."""
        self._savepoint.state, self._sharded = state, None

    def mark(
        self, make_label: Callable[[], SaveSpec], is_pending: bool, is_partial: bool = False
    ) -> None:
        """Capture the state, which is the state after a step, unless that is too expensive.

        ``is_pending`` is True after a notice. ``is_partial`` is True for a step in a call of
        ``PreemptionGuard.run``: only a save after an exception may hold a part of a call.
        """
        self._is_partial = is_partial
        if self._is_required:
            self._savepoint.capture(make_label())
            return
        if is_partial or not self.is_useful:
            return
        self._reshard()
        if is_pending:
            self._try_capture(make_label, inf)
        elif self._skip:
            self._skip -= 1
        else:
            began = time.perf_counter()
            self._try_capture(make_label, MAX_BYTES)
            seconds, step_seconds = time.perf_counter() - began, self._step_durations.median()
            was_expensive = self._is_expensive
            self._is_expensive = self._is_failing or seconds > SHARE * step_seconds
            # the first of two in a row may have found new slots of an optimizer
            if self._is_expensive and (was_expensive or self._is_failing):
                captures = ceil(seconds / (_MEASURED_SHARE * max(step_seconds, 1e-6)))
                self._skip = _MAX_SKIPPED if self._is_failing else min(captures, _MAX_SKIPPED)
                self._is_expensive = False
                self._savepoint.free()

    def _reshard(self) -> None:
        """Free the parameters that a forward pass without a backward pass, such as an evaluation,
        has gathered in modules of ``fully_shard``, by the hook of their ``state_dict()``.

        A capture would do that, too. But each rank decides for itself whether it captures, and the
        next forward pass must gather the same parameters on all ranks.
        """
        if self._sharded is None:
            state = self._savepoint.state
            owned = (p for o in optimizers_in(state) for p in parameters_of(o))
            found = modules_in(state) if any(map(is_distributed_tensor, owned)) else []
            self._sharded = [m for root in found for m in root.modules()]
        for module in [*self._sharded]:
            if _has_gathered(module):
                with Isolation("call"):
                    module.state_dict()
                if _has_gathered(module):  # it is never sharded
                    self._sharded.remove(module)

    def _try_capture(self, make_label: Callable[[], SaveSpec], max_bytes: float) -> None:
        """Capture. A failure, such as one of the user's ``state_dict``, must not end the training
        because of a save that may never be needed. An event reports the first one."""
        try:
            self._savepoint.capture(make_label(), max_bytes)
            self._is_failing = False
        except TooManyBytes:
            self._is_failing = True  # the next one would need as many
            self._savepoint.free()
        except Exception as e:  # noqa: BLE001  (a save of the same state raises it)
            if not self._is_failing:
                events.emit("savepoint_failed", error=e)
            self._is_failing = True
            self._savepoint.free()

    @property
    def label(self) -> SaveSpec | None:
        """The label of the last capture, or None if nothing was captured."""
        label: SaveSpec | None = self._savepoint.label
        return label

    @property
    def step(self) -> int:
        """The step of the last capture, or 0."""
        label = self.label
        return 0 if label is None else label.version.step

    @property
    def invalid_reason(self) -> str | None:
        """The reason why the state of the last capture is not available, or None if it is."""
        return self._savepoint.invalid_reason

    def hold(self) -> bool:
        """Keep the captured state until ``release``, as ``Savepoint.hold`` does, if it is that of
        complete calls."""
        return not self._is_partial and self._savepoint.hold()

    def release(self) -> None:
        """Let the training continue that waits because of ``hold``."""
        self._savepoint.release()

    def flatten(self, rank: int) -> FlatState | None:
        """Return the state of the last capture, flattened as ``rank``, or None if it is lost."""
        with Isolation("call"):
            return self._savepoint.flatten_captured(rank)

    def discard(self) -> None:
        """Discard the captured state, because a different state is about to be loaded."""
        self._savepoint.invalidate()
        self._savepoint.label = None

    def close(self) -> None:
        self._savepoint.close()


def _has_gathered(module: torch.nn.Module) -> bool:
    """Return True if the module has parameters of its own that are not distributed."""
    return not all(map(is_distributed_tensor, module.parameters(recurse=False)))
