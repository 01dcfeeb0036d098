"""A Checkpointer takes a run over from earlier ones of the same process.

In a notebook, the cell that creates the Checkpointer of a run is run again and again. The earlier
Checkpointer is then closed as after an exception: its saves in flight complete, and nothing that
may belong to no step is saved. Only a Checkpointer that the same thread has made is closed. The
ranks of one job may share a process, in threads; a rank takes over only from itself.

This happens when the new one is created. At its first step, it would be too late: ``resume`` would
not see the version of the save in flight.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from threading import current_thread
from weakref import ref

from limpet import events
from limpet.errors import FormatTooNew, LimpetError, SaveFailed, StoreError, UnsavedSteps
from limpet.machine import after_fork
from limpet.run.policy import Never
from limpet.run.writer_lock import find_writer
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.text import user_line, warn_user
from limpet.training.ending import Ending, describe_unsaved_steps
from limpet.training.saver import Saver

_trainings: dict[ref[Saver], ref[Ending]] = {}
"""The trainings of this process, by their ``Saver``, which lives until its saves have ended.

There is no lock: each access is a single operation of the dict.
"""

after_fork(_trainings.clear)  # they belong to the parent


def _forget(saver: ref[Saver], trainings: dict[ref[Saver], ref[Ending]] = _trainings) -> None:
    trainings.pop(saver, None)  # a parameter: at the exit of the interpreter, globals are None


def take_over(newer: Ending) -> None:
    """End the earlier trainings of this process that have the run and the rank of a ``newer`` one.

    A warning names the steps that no version holds. Raises ``LimpetError``, and changes nothing,
    if such a Checkpointer was made by another thread, or one of its calls is running.
    """
    saver = newer.saver
    for known, owner in _trainings.copy().items():
        earlier = known()
        if (
            earlier is not None
            and earlier.group.rank == saver.group.rank
            and _is_same_run(earlier, saver)
        ):
            _end(earlier, owner())
    _trainings[ref(saver, _forget)] = ref(newer)


def _end(saver: Saver, earlier: Ending | None) -> None:
    """End an earlier training, or wait for its saves if its Checkpointer has been discarded."""
    if earlier is None or earlier._lifecycle.is_closed:
        try:
            saver.wait()
        except Exception as e:  # noqa: BLE001  (the new training may be what the user does about it)
            warn_user(f"The last save of an earlier Checkpointer failed: {e}", SaveFailed)
        saver.writer_lock.release()
        return
    lifecycle, run = earlier._lifecycle, saver.run.url
    _check_may_close(earlier)
    lifecycle.was_taken_over = True
    could_save = lifecycle.can_save
    error = LimpetError(f"A newer Checkpointer of this process has taken {run} over")
    earlier.finish_here(error)
    step, saved_step = earlier.step_counter.progress.step, saver.saved_step
    if could_save:
        events.emit("taken_over", run=run, step=step, saved=saved_step)
    if could_save and step != saved_step and not isinstance(earlier.policy, Never):
        reason = "a newer Checkpointer of this process has taken the run over"
        if saved_step:
            reason += f". Call its resume() to continue from step {saved_step}"
        message = describe_unsaved_steps(run, step, saved_step, reason)
        # Not ``warn``, which shows an equal message only once: a cell may run many times.
        warnings.warn_explicit(message, UnsavedSteps, *user_line())


def _check_may_close(training: Ending) -> None:
    """Raise ``LimpetError`` if a Checkpointer is in use by another part of the program: another
    thread made it, or a call of it is running."""
    lifecycle, running = training._lifecycle, training._lifecycle.running_call()
    if running is not None:
        found = f"a call of {running[0]}() in {running[1]} thread"
    elif lifecycle.made_by is not current_thread():
        step = training.step_counter.progress.step
        found = f"one at step {step}, which another thread has made"
    else:
        return
    raise LimpetError(
        f"An earlier Checkpointer of this process is in use for {training.saver.url}",
        expected="a run without an open Checkpointer, or one of this thread that is idle",
        found=found,
        todo="Close that Checkpointer first, or give each training its own run",
    )


def _is_same_run(earlier: Saver, newer: Saver) -> bool:
    """Return True if two trainings have the same run, however it is spelled."""
    first, second = earlier.run.store, newer.run.store
    if first is second:
        return True
    if isinstance(first, LocalStore) and isinstance(second, LocalStore):
        if os.path.realpath(first.root) == os.path.realpath(second.root):
            return True
        with suppress(OSError):  # neither folder may exist yet
            return os.path.samefile(first.root, second.root)
        return False
    if isinstance(first, MemoryStore) and isinstance(second, MemoryStore):
        return first.shares_objects_with(second) and first.url == second.url
    if first.traits.in_memory or second.traits.in_memory or first.url != second.url:
        return False
    lock_id = earlier.writer_lock.id
    if lock_id is None:
        return True
    try:  # two servers may use the same URL
        writer = find_writer(newer.run.store)
    except (StoreError, FormatTooNew):
        return False
    return writer is not None and writer.attempt == lock_id
