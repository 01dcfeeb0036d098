"""``PreemptionGuard``: preemption for training loops that do not call ``Checkpointer.step``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from limpet.arguments import require
from limpet.errors import Preempted
from limpet.lazy_torch import torch_or_none
from limpet.ranks.agreement import LocalAgreement
from limpet.training.checkpointer import Checkpointer

P = ParamSpec("P")
R = TypeVar("R")


class PreemptionGuard:
    """A view of a Checkpointer's preemption, for loops that do not call its ``step`` themselves.

    It has no settings of its own: ``Checkpointer(preemption=...)`` has them. ``run`` and
    ``save_if_preempted`` count the steps, save when a save is due, and leave after a notice, as
    ``Checkpointer.step`` does. All ranks call them equally often.

    The design follows TensorFlow's ``PreemptionCheckpointHandler``.
    """

    def __init__(self, ckpt: Checkpointer) -> None:
        require("ckpt", isinstance(ckpt, Checkpointer), "a Checkpointer", ckpt)
        self._ckpt = ckpt
        self._response = ckpt._preemption

    @property
    def total_run_calls(self) -> int:
        """The number of complete calls of ``run``, including those before a restart.

        Each version stores the number. After ``ckpt.resume()``, training continues in epoch
        ``total_run_calls // steps_per_epoch``.
        """
        return self._ckpt._goodput.run_calls

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``fn``, make one step of the training, and return the result of ``fn``.

        If ``fn`` makes steps itself, by ``ckpt.step``, no other step is made. The training then
        saves and leaves at the end of the call, not in it. (``OnException`` can save the step
        before an exception of the call.)

        An exception of ``fn`` is raised on all ranks, with the same type and message where
        possible. It ends the training of all ranks, except in a single process, where the caller
        may catch it and continue. Raises what ``ckpt.step`` raises: after a notice, ``Preempted``.
        """
        self._ckpt._begin_call()
        counter, response = self._ckpt._step_counter, self._response
        steps, began = counter.calls, time.monotonic()
        response.open_calls += 1
        try:
            result = fn(*args, **kwargs)
        except BaseException as e:
            self._publish_error(e)
            raise
        finally:
            response.open_calls -= 1
        self._ckpt._goodput.add_call(time.monotonic() - began)
        if counter.calls == steps:
            self._ckpt.step()
        else:
            self._ckpt._end_call()
        return result

    def save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Make one step of the training: save and leave if the process will be stopped.

        Call it after each step, or after each function that makes several: it counts one step. The
        arguments are those of ``Preemption.save_fn``, or else of ``ckpt.step``: the metrics that
        the version stores, ``steps=``, and ``batches=``.

        Raises what ``ckpt.step`` raises: after a notice, ``Preempted``.
        """
        if not self._response.has_save_function:
            self._ckpt.step(*args, **kwargs)
            return
        self._response.save_arguments = args, kwargs
        try:
            self._ckpt.step()
        finally:
            self._response.save_arguments = (), {}

    @contextmanager
    def watch_scope(self) -> Iterator[None]:
        """Leave only at the end of this block, where the device is synchronized first.

        After a notice, steps in the block only note that the training must leave, and
        ``ckpt.should_stop`` is True: end the block soon. The training leaves in the block all the
        same when its time would otherwise be over.

        The end of the block waits for all work of the accelerator, if one is in use, and raises its
        errors. An exception in the block is raised on all ranks, as by ``run``.
        """
        try:
            self._response.open_scopes += 1
            try:
                yield
            finally:
                self._response.open_scopes -= 1
            synchronize_device()
        except BaseException as e:
            self._publish_error(e)
            raise
        if self._ckpt._step_counter.calls:
            self._ckpt._end_call()

    def _publish_error(self, error: BaseException) -> None:
        """Make other ranks raise ``error``; raise that of the first rank, if it is the cause."""
        agreement = self._response.agreement
        is_exit = isinstance(error, SystemExit) and not error.code
        if isinstance(error, Preempted) or is_exit or isinstance(agreement, LocalAgreement):
            return
        first = agreement.publish_error(error)
        if first is not None:
            raise first from error


def synchronize_device() -> None:
    """Wait for the work of the accelerator, if this process uses one, and raise its errors."""
    torch = torch_or_none()
    if torch is not None and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        if getattr(getattr(torch, kind), "is_initialized", lambda: True)():
            torch.accelerator.synchronize()
