"""``PreemptionGuard``: preemption for training loops that do not call ``Checkpointer.step``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, Self, TypeVar

from limpet.arguments import require, whole
from limpet.errors import LimpetError, Preempted
from limpet.format.names import MAX_STEP
from limpet.lazy_torch import torch_or_none
from limpet.ranks.agreement import LocalAgreement
from limpet.run.policy import Never
from limpet.storage.memory import MemoryStore
from limpet.tracebacks import short_tracebacks
from limpet.training.checkpointer import Checkpointer
from limpet.training.preemption_plan import DEFAULT, Preemption

P = ParamSpec("P")
R = TypeVar("R")


class PreemptionGuard:
    """Preemption for loops that do not call ``Checkpointer.step`` themselves.

    ``PreemptionGuard(ckpt)`` has no settings: ``Checkpointer(preemption=...)`` has them. ``run``
    and ``save_if_preempted`` count the steps, save when a save is due, and leave after a notice, as
    ``Checkpointer.step`` does. All ranks call them equally often.

    ``PreemptionGuard(save_fn=my_save)`` is for a program without a Checkpointer: after a notice on
    any rank, all ranks call ``save_fn`` after the same number of calls, and exit with code 75. If
    the notice leaves time for two saves, they do so at once, go on, and save again. If ``save_fn``
    raises on one rank, none exits with 75. ``preemption`` has the other settings. The guard watches
    from its creation until ``close()``, or the end of the ``with`` block, which raises an error of
    one rank on all. Use one for a process: the first that is called after a notice leaves.

    Raises ``LimpetError`` for an invalid argument.

    The design follows TensorFlow's ``PreemptionCheckpointHandler``.
    """

    def __init__(
        self,
        ckpt: Checkpointer | None = None,
        *,
        save_fn: Callable[..., object] | None = None,
        preemption: Preemption | None = DEFAULT,
    ) -> None:
        self._is_alone = ckpt is None
        if ckpt is None:
            expected = "a function that saves, unless a Checkpointer is the first argument"
            require("save_fn=", callable(save_fn), expected, save_fn)
            is_valid = preemption is None or (
                isinstance(preemption, Preemption) and preemption.save_fn is None
            )
            expected = "a limpet.Preemption without save_fn, or None"
            require("preemption=", is_valid, expected, preemption)
            settings = preemption and replace(preemption, save_fn=save_fn)
            # its run stays empty: what a guard needs is the loop, the agreement, and the exit
            ckpt = Checkpointer(MemoryStore(), {}, save=Never(), preemption=settings)
            ckpt._saver.reported_url = None
            ckpt._preemption.watch()
        elif save_fn is not None or preemption is not DEFAULT:
            raise LimpetError("With a Checkpointer, its preemption= has the settings of the guard")
        expected = "a Checkpointer; for a function, PreemptionGuard(save_fn=FUNCTION)"
        require("ckpt", isinstance(ckpt, Checkpointer), expected, ckpt)
        self._ckpt = ckpt
        self._response = ckpt._preemption

    @property
    def total_run_calls(self) -> int:
        """The number of complete calls of ``run`` and ``save_if_preempted``, including those before
        a restart. Calls in a call of ``run`` are a part of it.

        Each version stores the number. After ``ckpt.resume()``, training continues in epoch
        ``total_run_calls // steps_per_epoch``. Without a Checkpointer, ``save_fn`` saves it, and
        the program sets it after a restart, before the first call.
        """
        return self._ckpt._goodput.run_calls

    @total_run_calls.setter
    def total_run_calls(self, calls: int) -> None:
        if not self._is_alone or self._ckpt._step_counter.calls:
            raise LimpetError(
                "total_run_calls can be set only before the first call, and without a Checkpointer,"
                " whose versions store it"
            )
        expected = f"a whole number from 0 to {MAX_STEP}"
        require("total_run_calls", whole(calls, 0, MAX_STEP) is not None, expected, calls)
        self._ckpt._goodput.run_calls = self._ckpt._step_counter.progress.step = int(calls)

    @property
    def should_stop(self) -> bool:
        """See ``Checkpointer.should_stop``: end a ``watch_scope``, or the training."""
        return self._ckpt.should_stop

    def close(self) -> None:
        """End a guard without a Checkpointer, whose ``close`` ends it otherwise."""
        if self._is_alone:
            self._ckpt.close()

    def __enter__(self) -> Self:
        if self._is_alone:
            self._ckpt.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_alone:
            self._ckpt.__exit__(kind, error, trace)

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
        goodput = self._ckpt._goodput
        goodput.call_durations.add(time.monotonic() - began)
        goodput.run_calls += not response.open_calls  # else it is a part of that call
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
        response, goodput = self._response, self._ckpt._goodput
        calls, steps = goodput.run_calls, self._ckpt._step_counter.calls
        goodput.run_calls += not response.open_calls  # before the save, which stores it
        if response.save_fn is not None:
            response.save_arguments, args, kwargs = (args, kwargs), (), {}
        try:
            self._ckpt.step(*args, **kwargs)
        finally:
            response.save_arguments = (), {}
            if self._ckpt._step_counter.calls == steps:  # refused
                goodput.run_calls = calls

    @contextmanager
    @short_tracebacks
    def watch_scope(self) -> Iterator[None]:
        """Leave only at the end of this block, where the device is synchronized first.

        After a notice, steps in the block only note that the training must leave, and
        ``should_stop`` is True: end the block soon. The training leaves in the block all the
        same when its time would otherwise be over.

        The end of the block waits for all work of the accelerator, if one is in use, and raises its
        errors. An exception in the block is raised on all ranks, as by ``run``.
        """
        if self._is_alone:
            self._ckpt._begin_call()
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
        if self._is_alone or self._ckpt._step_counter.calls:
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
