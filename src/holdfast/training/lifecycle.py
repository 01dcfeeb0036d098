"""Whether a Checkpointer may be used, and may save."""

from __future__ import annotations

import os
import sys
from threading import main_thread

from holdfast.errors import HoldfastError


def is_process_ending() -> bool:
    """Return True if the main thread has ended. No thread can be started from then on."""
    return not main_thread().is_alive()


class Lifecycle:
    """The states of a Checkpointer: resumed, started (by the first step or save), and closed.

    ``is_state_valid`` is False after a ``resume`` that failed and may have overwritten a part of
    the live state.
    """

    def __init__(self) -> None:
        self.is_state_valid = True
        self.is_resumed = self.is_started = self.is_closed = False
        self._pid = os.getpid()
        self._outer_exception = id(None)

    @property
    def is_forked(self) -> bool:
        """True in a forked process: the saves and buffers belong to the parent."""
        return self._pid != os.getpid()

    @property
    def can_save(self) -> bool:
        """True if training has started, the state is valid, and the Checkpointer is open."""
        return self.is_started and self.is_state_valid and not (self.is_closed or self.is_forked)

    def interruption(self) -> BaseException | None:
        """Return the exception that ends the training, as in a ``finally`` block after an error.

        An exception that was being handled at the last step too is not the end: the whole training
        runs in an ``except`` block.
        """
        error = sys.exception()
        return None if id(error) == self._outer_exception else error

    def check_open(self) -> None:
        """Raise ``HoldfastError`` if the Checkpointer is closed, or in a forked process."""
        self._outer_exception = id(sys.exception())
        if self.is_closed:
            raise HoldfastError("The Checkpointer is closed", todo="Create a new one")
        self.check_not_forked()

    def check_not_forked(self) -> None:
        """Raise ``HoldfastError`` in a forked process."""
        if self.is_forked:
            raise HoldfastError(
                "This Checkpointer was created before this process was forked",
                todo="Use it only in the process that created it",
            )

    def check_state_valid(self) -> None:
        """Raise ``HoldfastError`` if a failed ``resume`` may have left the live state invalid."""
        if not self.is_state_valid:
            raise HoldfastError(
                "The last resume() failed and may have left the live state invalid",
                todo="Resume from an intact version before you continue the training",
            )
