"""The parts of a training with which it responds to notices."""

from __future__ import annotations

from typing import Protocol

from limpet.deadline import Deadline
from limpet.training import savepoint_saver

SAVE, LEAVE = "save before the stop", "save and leave"
"""The actions on which the ranks agree after a notice."""

SAVE_ONLY = "save after a notice"
"""The action after a notice that the machine is at risk, or after a signal that means this."""


class Steps(Protocol):
    """What counts the steps of the training."""

    @property
    def step(self) -> int:
        """The last step that is complete."""


class Saves(savepoint_saver.Saves, Protocol):
    """What saves the state of the training."""

    url: str

    def wait(self, deadline: Deadline) -> object:
        """Wait for the save in flight, without the other ranks."""


class Ending(Protocol):
    """What ends the training."""

    def save_last_step(self, deadline: Deadline) -> None:
        """Save the last step on all ranks, and wait until it is committed."""

    def leave(self, code: int, problem: object, deadline: Deadline) -> None:
        """Note that the process leaves with this code, because of a ``problem`` or None."""
