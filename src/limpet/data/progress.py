"""The progress of a training loop: its epoch, step, and number of samples."""

from __future__ import annotations

from typing import Any, Literal

from limpet.arguments import check_whole
from limpet.errors import LimpetError, PlanError

_MAX_COUNT = 10**17


class Progress:
    """The progress of the training.

    ``step``: the number of steps completed, which ``Checkpointer.step`` counts. ``epoch``: the
    number of epochs before the current one, which ``Checkpointer.end_epoch`` counts, and
    ``Checkpointer.epochs`` by it. ``samples``: a number that the user counts.

    ``step`` may be set before the first step of a process. Later, that raises ``LimpetError``.

    ``owner`` is an object that counts ``step`` and ``epoch`` itself, such as one of a framework.
    ``Checkpointer.step`` then reads both. The step must have grown since the last call, and so must
    the epoch at ``Checkpointer.end_epoch``. After a resume, both must equal those of the version:
    put the object that restores them into the state, or restore it before.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self._reported = {"step": 0, "epoch": 0}  # at the last ``step`` or ``end_epoch``
        self._loaded: dict[str, int] = {}
        self._step = self._epoch = self._epoch_began = self.samples = 0
        self._knows_began = False  # and it is not 0
        self._is_counted = False  # a step or an epoch was counted since the last load
        self._held: dict[str, int] = {}  # what a state has until the next step

    def __repr__(self) -> str:
        return f"Progress(epoch={self._epoch}, step={self._step}, samples={self.samples})"

    @property
    def step(self) -> int:
        """The number of steps completed."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        count = _check_count("progress.step", step)
        if self._is_counted or self.owner is not None:
            who = "its owner" if self.owner is not None else "ckpt.step()"
            raise LimpetError(f"progress.step cannot be set: {who} counts the steps")
        self._step = count

    @property
    def epoch(self) -> int:
        """The number of epochs before the current one."""
        return self._epoch

    @property
    def step_in_epoch(self) -> int:
        """The number of steps since ``epoch`` last changed, or, in a later epoch of a version that
        does not store when it began, since the resume."""
        return self._step - self._epoch_began

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self._epoch, "step": self._step, "samples": self.samples}
        began = {"epoch_began": self._epoch_began} if self._knows_began else {}
        return {**state, **(self._held or began)}

    def check_state_dict(self, state: object) -> None:
        """Raise ``PlanError`` if this is not the state of a ``Progress``."""
        if not (
            isinstance(state, dict)
            and set(state) - {"epoch_began"} == {"epoch", "step", "samples"}  # none in epoch 0
            and all(type(n) is int and 0 <= n < _MAX_COUNT for n in (state["epoch"], state["step"]))
        ):
            raise PlanError(
                "The loaded value is not the state of a Progress",
                expected="epoch and step, which are ints of 0 or more, and samples",
                found=repr(state)[:200],
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state. Raises ``PlanError`` if it is not the state of a ``Progress``."""
        self.check_state_dict(state)
        self._epoch, self._step, self.samples = state["epoch"], state["step"], state["samples"]
        self._epoch_began = state.get("epoch_began", self._step if self._epoch else 0)
        self._knows_began = "epoch_began" in state
        self._is_counted, self._held = False, {}
        self._loaded = {"step": self._step, "epoch": self._epoch}

    # -- for the Checkpointer ----------------------------------------------------------------------

    def add_steps(self, steps: int) -> None:
        self._is_counted, self._held = True, {}
        self._step += steps

    def end_epoch(self) -> None:
        self._is_counted = True
        self._begin_epoch(self._epoch + 1)

    def hold(self, before: dict[str, int]) -> None:
        """Return the epoch of an earlier state in ``state_dict`` until the next step."""
        self._held = {n: before[n] for n in ("epoch", "epoch_began") if n in before}

    def resume(self, step: int | None) -> None:
        """Allow assignments until the next step. Continue at ``step``, unless it is None."""
        self._is_counted = False
        if step is not None:
            self._step = self._loaded["step"] = step

    def begin(self) -> None:
        """Begin with the numbers of the owner, which must be those that were loaded, if any."""
        loaded, self._loaded = self._loaded, {}
        if self.owner is not None:
            self._reported = self._read_owner()
            if loaded.items() - self._reported.items():
                raise LimpetError(
                    f"The loaded version and {type(self.owner).__name__} do not have the same"
                    " position",
                    expected=", ".join(f"{name} {count}" for name, count in loaded.items()),
                    found=", ".join(f"{name} {count}" for name, count in self._reported.items()),
                    todo="Put the object that restores its step and epoch into the state, or"
                    " restore it before resume()",
                    live_state="not valid",
                )
            self._accept(self._reported)

    def read(self, counted: Literal["step", "epoch"] | None = None) -> int:
        """Read the numbers of the owner, if there is one. Return by how much ``counted`` has grown
        since the last call for it. Raises ``LimpetError`` if it has not."""
        if self.owner is None:
            return 0
        now, last = self._read_owner(), {"step": self._step, "epoch": self._epoch}
        for name in now:
            if now[name] < last[name]:
                raise LimpetError(
                    f"The {name} of {type(self.owner).__name__} has gone back from {last[name]} to"
                    f" {now[name]}",
                    todo="To go back to an earlier version, call ckpt.resume(at=STEP)",
                )
        if counted is not None and now[counted] <= self._reported[counted]:
            call = "step" if counted == "step" else "end_epoch"
            raise LimpetError(
                f"{call}() was called, but the {counted} of {type(self.owner).__name__} is still"
                f" {now[counted]}: call {call}() after its {counted} has grown"
            )
        self._accept(now)
        if counted is None:
            return 0
        grown = now[counted] - self._reported[counted]
        self._reported[counted] = now[counted]
        return grown

    def _accept(self, now: dict[str, int]) -> None:
        self._begin_epoch(now["epoch"])
        self._step = now["step"]

    def _read_owner(self) -> dict[str, int]:
        counts = {}
        for name in ("step", "epoch"):
            value = getattr(self.owner, name, None)
            counts[name] = _check_count(f"The {name} of {type(self.owner).__name__}", value)
        return counts

    def _begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_began, self._knows_began = epoch, self._step, True


def _check_count(name: str, value: object) -> int:
    return check_whole(name, value, "a whole number, 0 or more", most=_MAX_COUNT - 1)
